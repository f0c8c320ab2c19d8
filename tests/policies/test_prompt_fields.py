"""A column for policies that would have no effect ends a run before anything is built."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.algorithms import CRD, DGPO, FlowGRPO
from digenrl.module import DiffusionRLModule
from digenrl.policies.prompt_fields import check_prompt_fields
from digenrl.types import Condition, Prompt, PromptBatch, Rows
from tests.integration.toy_runs import fit
from tests.toy import WORDS, ToyCondition, ToyPolicy


class NegativePolicy(ToyPolicy):
    prompt_fields = ("image", "negative_prompt")

    def build(self) -> None:
        raise AssertionError("it must not come so far")


class NamedReward:
    requires = ("image",)

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return torch.zeros(len(prompts))


def prompts_of(*metadata: Mapping[str, Any]) -> list[Prompt]:
    return [Prompt(text, uid, metadata=row) for uid, (text, row) in enumerate(zip(WORDS, metadata, strict=False))]


@pytest.mark.parametrize(
    ("metadata", "is_guided", "message"),
    [
        (
            [{"video": "v"}],
            True,
            "`prompts` has the column `video`, as for 'low', but `NegativePolicy` does not read it",
        ),
        ([{"images": ["a"]}], True, r"the column `images`, .* \(it reads: image, negative_prompt\)"),
        ([{"image": "a"}, {}, {}], True, "the column `image`, .* but 2 of 3 prompts lack it"),
        ([{"negative_prompt": "a"}, {}], True, "1 of 2 prompts lack it, .* may be None for the policy's own"),
        ([{"negative_prompt": "a"}], False, "`guidance_scale` is 1, with which negative prompts have no effect"),
    ],
)
def test_a_column_without_effect_is_refused(
    metadata: Sequence[Mapping[str, Any]], is_guided: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_prompt_fields(NegativePolicy(), prompts_of(*metadata), is_guided=is_guided)
    assert "\n" not in str(caught.value)


def test_columns_that_policy_or_reward_reads_are_let_through() -> None:
    both = prompts_of({"image": "a", "negative_prompt": "b", "tag": 1}, {"image": "c", "negative_prompt": None})
    check_prompt_fields(NegativePolicy(), both, is_guided=True)
    check_prompt_fields(ToyPolicy(), both, is_guided=False, read_by_reward=("image", "negative_prompt"))
    check_prompt_fields(ToyPolicy(), [], is_guided=False)


def modules(scale: float) -> list[DiffusionRLModule]:
    settings: dict[str, Any] = {"group_size": 2, "num_steps": 4, "num_trained_timesteps": 2}
    policy = NegativePolicy()
    return [
        FlowGRPO(policy, NamedReward(), guidance_scale=scale, group_size=2, num_steps=3),
        DGPO(policy, NamedReward(), reference_guidance_scale=scale, **settings),
        CRD(policy, NamedReward(), reference_guidance_scale=scale, kl_beta=0.1, **settings),
    ]


def test_guidance_of_any_part_of_an_algorithm_uses_negative_prompts() -> None:
    prompts = prompts_of({"image": "a", "negative_prompt": "b"})
    for guided, without in zip(modules(2.0), modules(1.0), strict=True):
        guided.check_prompts(prompts)
        with pytest.raises(ValueError, match="`guidance_scale` is 1"):
            without.check_prompts(prompts)


@pytest.mark.parametrize("column", ["prompts", "validation_prompts"])
@pytest.mark.parametrize("is_disaggregated", [True, False])
def test_a_run_ends_before_anything_is_built(tmp_path: Path, column: str, is_disaggregated: bool) -> None:
    (tmp_path / "a.mp4").touch()
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "low", "image": "a.mp4", "video": "a.mp4"}), encoding="utf-8")
    data = PromptData(**{"prompts": WORDS, "prompts_per_step": 1, column: str(file)})
    strategy = DisaggregatedStrategy(1, 1, engine="inline") if is_disaggregated else "auto"
    module = FlowGRPO(NegativePolicy(), lambda media, prompts: media, group_size=2, num_steps=3)
    with pytest.raises(ValueError, match=f"`{column}` has the column `video`"):
        fit(strategy, module=module, data=data)


def test_prompts_of_other_data_are_checked_when_they_come() -> None:
    module = FlowGRPO(ToyPolicy(), lambda media, prompts: media, group_size=2, num_steps=3)
    for ask in (module.prompt_batch, lambda batch: module.validation_prompts(batch, 0)):
        with pytest.raises(ValueError, match=re.escape("`prompts` has the column `image`")):
            ask(prompts_of({"image": "a"}))


def test_rows_with_a_negative_condition_are_not_joined_with_rows_without() -> None:
    level = torch.zeros(1)
    parts: list[Condition] = [ToyCondition(level), ToyCondition(level, negative_condition=ToyCondition(level))]
    for order in (parts, parts[::-1]):
        with pytest.raises(AssertionError, match="different fields"):
            Rows.cat(order)
