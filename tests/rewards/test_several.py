"""Several rewards for one sample: kept apart, checked one by one, named in metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.functional import group_advantages
from digenrl.rewards import RewardError, SeveralRewards, compute_rewards
from digenrl.types import Prompt, PromptBatch
from tests.integration.toy_runs import fit
from tests.toy import level_reward, toy_module


def calm(media: Tensor, prompts: PromptBatch) -> Tensor:
    return -100 * media.flatten(1).std(1)


def broken(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.tensor([1.0, float("nan"), 0.0, 0.0])


PROMPTS = PromptBatch.for_step([Prompt("low", 0)], step=0, group_size=4, seed=0)
MEDIA = torch.rand(4, 1, 2, 4, generator=torch.Generator().manual_seed(0))


def test_each_reward_has_a_column() -> None:
    rewards = compute_rewards(SeveralRewards([level_reward, calm]), MEDIA, PROMPTS)
    assert torch.equal(rewards, torch.stack([level_reward(MEDIA, PROMPTS), calm(MEDIA, PROMPTS)], dim=1))


def test_a_bad_value_names_the_reward_that_gave_it() -> None:
    with pytest.raises(RewardError, match="`broken` returned nan for 1 of 4 samples, the first for prompt 'low'"):
        compute_rewards(SeveralRewards([level_reward, broken]), MEDIA, PROMPTS)


def test_advantages_of_several_rewards_are_added_by_weight_and_free_of_scale() -> None:
    module = toy_module()
    module._reward = (SeveralRewards([level_reward, calm], weights=[3, 1]),)
    rewards, groups = torch.randn(8, 2) * torch.tensor([1.0, 1000.0]), torch.arange(8) // 4
    expected = 0.75 * group_advantages(rewards[:, 0], groups) + 0.25 * group_advantages(rewards[:, 1], groups)
    torch.testing.assert_close(module.advantages(rewards, groups), expected)


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([level_reward], None, "at least two, got 1"),
        ([level_reward, level_reward], None, "got `level_reward` twice"),
        ([level_reward, "calm"], None, "callable"),
        ([level_reward, calm], [1.0], "one per reward, 2, got 1"),
        ([level_reward, calm], [1.0, -1.0], "at least 0"),
        ([level_reward, calm], [0, 0], "not all 0"),
    ],
)
def test_what_does_not_fit_is_refused(rewards: list[Any], weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeveralRewards(rewards, weights)


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_metrics_show_each_reward_and_their_weighted_mean(strategy: str) -> None:
    module = toy_module()
    module._reward = (SeveralRewards([level_reward, calm], weights=[3, 1]),)
    chosen = DisaggregatedStrategy(engine="inline", groups_per_micro_batch=2) if strategy != "auto" else strategy
    trainer, _, _ = fit(chosen, module=module)
    metrics = trainer.callback_metrics
    weighted = 0.75 * metrics["reward/level_reward"] + 0.25 * metrics["reward/calm"]
    torch.testing.assert_close(metrics["reward/mean"], weighted)
    assert metrics["reward/calm"] < -1
