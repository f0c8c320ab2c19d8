"""What a reward says of itself, and who reads it when."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptBatch, PromptData
from digenrl.rewards import (
    RewardError,
    RewardTraits,
    SeveralRewards,
    check_prompts,
    compute_rewards,
    reward_name,
    set_up_reward,
)
from digenrl.types import Prompt
from tests.integration.toy_runs import fit, relative_difference, toy_data
from tests.toy import level_reward, toy_module


class Styled:
    """A reward with all the traits."""

    requires = ("style",)
    batch_size = 2

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def setup(self, device: torch.device) -> None:
        if self.log is not None:
            with self.log.open("a") as lines:
                lines.write(f"setup {device}\n")

    def check_prompts(self, prompts: Any) -> None:
        if any(prompt.text == "forbidden" for prompt in prompts):
            raise ValueError("`prompts` must not be forbidden.")

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return level_reward(media, prompts)


class Ranked:
    """Ranks the samples of a prompt, of which it must see all."""

    groupwise = True

    def __init__(self, group_size: int = 4) -> None:
        self.group_size = group_size

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        ids = torch.tensor(prompts.group_ids)
        rewards, brightness = torch.zeros(len(ids)), media.flatten(1).mean(1)
        for group in ids.unique():
            rows = (ids == group).nonzero().flatten()
            assert len(rows) == self.group_size, f"saw {len(rows)} samples of a group"
            rewards[rows[brightness[rows].argsort()]] = torch.arange(len(rows)).float()
        return rewards


def with_reward(reward: Any, **settings: Any) -> Any:
    module = toy_module(**settings)
    module = type(module)(
        module.policy, reward, group_size=4, num_steps=5, timestep_fraction=0.8, clip_range=0.01, seed=0
    )
    # Adam would make a step of the learning rate of the smallest gradient, and so of rounding.
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    return module


def test_a_plain_function_has_the_defaults() -> None:
    assert RewardTraits.of(level_reward) == RewardTraits()


def test_several_rewards_need_what_each_needs() -> None:
    assert RewardTraits.of(SeveralRewards([Styled(), Ranked()])) == RewardTraits(("style",), groupwise=True)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("requires", [1], "`requires` of reward `Styled` must be names"),
        ("groupwise", "yes", "`groupwise` of reward `Styled` must be a bool, got 'yes'"),
        ("batch_size", 0, "`batch_size` of reward `Styled` is a count and must be at least 1, got 0"),
        ("offload", True, "`offload` of reward `Styled` must be false: the reward has no method"),
    ],
)
def test_wrong_traits_are_refused_where_the_module_is_made(attribute: str, value: Any, message: str) -> None:
    reward = Styled()
    setattr(reward, attribute, value)
    with pytest.raises(ValueError, match=message):
        with_reward(reward)


@pytest.mark.parametrize(
    "name", ["mean", "zero_std_group_frac", "dropped_groups", "a/b", "a,b", "a\nb", "a\tb", "\x1b[31m", " ", "\ud800"]
)
def test_a_name_that_metrics_cannot_have_is_refused_where_the_module_is_made(name: str) -> None:
    reward = Styled()
    reward.name = name  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^a reward's name must be .*: give the reward another `name`\.$") as info:
        with_reward(reward)
    assert repr(name) in str(info.value)


def test_a_function_of_such_a_name_is_refused_and_takes_another() -> None:
    def mean(media: Tensor, prompts: PromptBatch) -> Tensor:
        return media.flatten(1).mean(1)

    with pytest.raises(ValueError, match="got 'mean'"):
        RewardTraits.of(mean)
    mean.name = "mean brightness"  # type: ignore[attr-defined]
    assert RewardTraits.of(mean) == RewardTraits()


@pytest.mark.parametrize("reward", [Styled, partial(Styled)])
def test_a_class_is_refused_where_the_module_is_made(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"`reward` must not be a class, got Styled: give an instance, such as"):
        with_reward(reward)


class Scaled(Styled):
    groupwise = offload = True
    batch_size = 3
    moves: tuple[str, ...] = ()

    def to(self, device: torch.device) -> None:
        self.moves += (str(device),)

    def __call__(self, media: Tensor, prompts: PromptBatch, scale: float = 1.0) -> Tensor:
        return torch.full((len(prompts),), scale)


def test_a_partial_has_the_name_the_traits_and_the_methods_of_what_it_wraps(tmp_path: Path) -> None:
    inner = Scaled(tmp_path / "log")
    reward = partial(partial(inner), scale=2.0)
    assert reward_name(reward) == "Scaled"
    assert RewardTraits.of(reward) == RewardTraits.of(inner) == RewardTraits(("style",), True, 3, True)
    set_up_reward(reward, torch.device("meta"))
    assert (tmp_path / "log").read_text() == "setup cpu\n"
    with pytest.raises(ValueError, match="must not be forbidden"):
        check_prompts(reward, [Prompt("forbidden", 0, metadata={"style": "a"})])
    prompts = PromptBatch.for_step([Prompt("low", 0)], step=0, group_size=4, seed=0)
    assert compute_rewards(reward, torch.zeros(4, 1, 2, 2), prompts).tolist() == [2.0] * 4
    assert inner.moves == ("cpu", "cpu")
    reward.name = "scaled"  # type: ignore[attr-defined]
    assert reward_name(reward) == "scaled"


def test_a_set_up_that_fails_is_tried_again_without_the_rewards_before_it(tmp_path: Path) -> None:
    class Late(Styled):
        name = "late"
        is_there = False

        def setup(self, device: torch.device) -> None:
            if not self.is_there:
                raise ConnectionRefusedError("not yet")
            super().setup(device)

    log = tmp_path / "log"
    late = Late(log)
    joined = SeveralRewards([Styled(log), late, Ranked()])
    for _ in range(2):
        with pytest.raises(RewardError, match="reward `late` cannot be set up: ConnectionRefusedError: not yet"):
            set_up_reward(joined, torch.device("cpu"))
    assert log.read_text().splitlines() == ["setup cpu"]
    late.is_there = True
    copy = pickle.loads(cloudpickle.dumps(joined))
    set_up_reward(joined, torch.device("cpu"))
    assert log.read_text().splitlines() == ["setup cpu"] * 2
    set_up_reward(copy, torch.device("cpu"))  # in another process
    assert log.read_text().splitlines() == ["setup cpu"] * 4


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
@pytest.mark.parametrize("where", ["prompts", "validation_prompts"])
def test_a_missing_column_is_found_before_anything_is_generated(strategy: str, where: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "low", "style": "a"}\n{"prompt": "top", "style": "b"}\n')
    bad.write_text('{"prompt": "low", "style": "a"}\n{"prompt": "high"}\n')
    files = {"prompts": good, "validation_prompts": good, where: bad}
    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    with pytest.raises(ValueError, match=f"`{where}` must have the column `style`.* 1 of 2 lack it.*'high'"):
        fit(chosen, module=with_reward(Styled()), data=PromptData(**files, prompts_per_step=2, seed=0))


def test_a_reward_may_check_prompts_itself() -> None:
    with pytest.raises(ValueError, match="must not be forbidden"):
        check_prompts(Styled(), [Prompt("forbidden", 0, metadata={"style": "a"})])


@pytest.mark.parametrize(("num_reward_workers", "scorers"), [(0, 2), (1, 1)])
def test_a_reward_is_set_up_once_in_each_worker_that_scores(
    num_reward_workers: int, scorers: int, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word}", "style": "a"}}\n' for word in ("low", "high")))
    log = tmp_path / "log"
    strategy = DisaggregatedStrategy(generators=2, reward_workers=num_reward_workers, trainer_assist="off")
    data = PromptData(prompts, prompts_per_step=2, seed=0, validation_prompts=prompts)
    trainer, *_ = fit(strategy, module=with_reward(Styled(log)), data=data, max_steps=2)
    assert "val/reward/mean" in trainer.callback_metrics
    assert log.read_text().splitlines() == ["setup cpu"] * scorers


def test_with_reward_workers_an_assisting_trainer_does_not_score(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word}", "style": "a"}}\n' for word in ("low", "high", "top")))
    log = tmp_path / "log"
    strategy = DisaggregatedStrategy(reward_workers=1, trainer_assist="static:1")
    data = PromptData(prompts, prompts_per_step=3, seed=0)
    trainer, _, assisted = fit(strategy, module=with_reward(Styled(log)), data=data)
    assert trainer.callback_metrics["assist/micro_batches"] == 1
    assert log.read_text().splitlines() == ["setup cpu"]
    _, _, alone = fit("auto", module=with_reward(Styled()), data=PromptData(prompts, prompts_per_step=3, seed=0))
    assert relative_difference(assisted, alone) <= 1e-6


def test_a_set_up_that_fails_names_the_reward_and_ends_the_run_before_a_sample(tmp_path: Path) -> None:
    class Absent(Styled):
        requires = ()

        def setup(self, device: torch.device) -> None:
            raise ConnectionRefusedError("nobody listens on port 8000")

    message = "reward `Absent` cannot be set up: ConnectionRefusedError: nobody listens on port 8000"
    with pytest.raises(RewardError, match=message):
        set_up_reward(Absent(), torch.device("cpu"))
    with pytest.raises(Exception, match=message):
        fit(DisaggregatedStrategy(engine="inline"), module=with_reward(Absent()))


@pytest.mark.parametrize(
    "settings",
    [
        {"generators": 3, "groups_per_micro_batch": 4},
        {"generators": 2, "groups_per_micro_batch": 2, "reward_workers": 1, "trainer_assist": "static:1"},
        {"generators": 1, "groups_per_micro_batch": 4, "generation_batch_size": 5},
    ],
)
def test_a_groupwise_reward_sees_whole_groups_however_the_step_is_cut(settings: dict[str, Any]) -> None:
    _, _, colocated = fit("auto", module=with_reward(Ranked()))
    _, _, weights = fit(DisaggregatedStrategy(engine="inline", **settings), module=with_reward(Ranked()))
    assert relative_difference(weights, colocated) <= 1e-6


def test_validation_keeps_the_samples_of_a_prompt_together() -> None:
    settings: dict[str, Any] = {"validation_prompts": ["low", "high", "top"], "validation_samples_per_prompt": 4}
    strategy = DisaggregatedStrategy(engine="inline", generators=2)
    trainer, *_ = fit(strategy, module=with_reward(Ranked()), data=toy_data(**settings, validation_batch_size=12))
    assert trainer.callback_metrics["val/reward/mean"] == 1.5
    with pytest.raises(ValueError, match="`validation_batch_size` must be a multiple of .* 4, got 6"):
        fit("auto", module=with_reward(Ranked()), data=toy_data(**settings, validation_batch_size=6))
    with pytest.raises(ValueError, match="`validation_samples_per_prompt` must be at least 2, got 1"):
        fit("auto", module=with_reward(Ranked()), data=toy_data(validation_prompts=["low"]))


def test_a_worker_sets_a_reward_up_although_the_module_has_done_so(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "low", "style": "a"}\n')
    module = with_reward(Styled(tmp_path / "log"))
    module.set_up_reward()
    fit(DisaggregatedStrategy(trainer_assist="off"), module=module, data=PromptData(prompts, prompts_per_step=1))
    assert (tmp_path / "log").read_text() == "setup cpu\n" * 2


def test_a_group_that_no_generator_could_make_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="`generation_batch_size` must be at least the `group_size` 4, got 3"):
        fit(DisaggregatedStrategy(engine="inline", generation_batch_size=3), module=with_reward(Ranked()))


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_a_reward_computes_in_float32_whatever_the_policy_does(strategy: str) -> None:
    def picky(media: Tensor, prompts: PromptBatch) -> Tensor:
        product = media.flatten(1) @ torch.full((8, 1), 1 / 3)
        assert media.dtype == product.dtype == torch.float32, "autocast would make a bfloat16 of the product"
        return product.flatten()

    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    fit(chosen, module=with_reward(picky), precision="bf16-mixed")


def test_a_name_of_its_own_names_a_reward() -> None:
    reward = Styled()
    reward.name = "style"  # type: ignore[attr-defined]
    assert reward_name(reward) == "style"
