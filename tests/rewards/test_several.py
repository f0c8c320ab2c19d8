"""Several rewards for one sample: kept apart, checked one by one, named in metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import DanceGRPO, FlowGRPO, OnlineDPO
from digenrl.functional import group_advantages
from digenrl.rewards import RewardError, SeveralRewards, compute_rewards
from digenrl.types import Prompt, PromptBatch
from tests.integration.toy_runs import fit, relative_difference
from tests.toy import ToyPolicy, level_reward, toy_module


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


def constant(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.full((len(prompts),), 7.0)


def test_scaling_a_reward_changes_nothing_where_each_is_compared_with_its_own_kind() -> None:
    module = toy_module(advantage_eps=0.0, advantage_clip=100.0)
    module._reward = (SeveralRewards([level_reward, calm]),)
    rewards, groups = torch.randn(8, 2), torch.arange(8) // 4
    scaled = rewards * torch.tensor([1.0, 1000.0])
    torch.testing.assert_close(module.advantages(scaled, groups), module.advantages(rewards, groups))


def test_a_constant_reward_neither_hides_nor_poisons_the_other() -> None:
    module = toy_module()
    module._reward = (SeveralRewards([level_reward, constant]),)
    rewards, groups = torch.stack([torch.randn(8), torch.full((8,), 7.0)], dim=1), torch.arange(8) // 4
    expected = 0.5 * group_advantages(rewards[:, 0], groups)
    torch.testing.assert_close(module.advantages(rewards, groups), expected)


@pytest.mark.parametrize("algorithm", [FlowGRPO, DanceGRPO, OnlineDPO])
def test_in_mode_sum_samples_are_compared_by_the_weighted_sum(algorithm: Any) -> None:
    settings: dict[str, Any] = {"group_size": 4, "num_steps": 5}
    joined = algorithm(ToyPolicy(), SeveralRewards([level_reward, calm], [3, 1], mode="sum"), **settings)
    single = algorithm(ToyPolicy(), level_reward, **settings)
    rewards, groups = torch.randn(8, 2) * torch.tensor([1.0, 100.0]), torch.arange(8) // 4
    expected = single.advantages(0.75 * rewards[:, 0] + 0.25 * rewards[:, 1], groups)
    torch.testing.assert_close(joined.advantages(rewards, groups), expected)


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_a_run_in_mode_sum_is_that_of_one_reward_that_adds_up(strategy: str) -> None:
    def added(media: Tensor, prompts: PromptBatch) -> Tensor:
        return 0.75 * level_reward(media, prompts) + 0.25 * calm(media, prompts)

    def run(reward: Any) -> dict[str, Tensor]:
        module = toy_module()
        module._reward = (reward,)
        return fit(DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy, module=module)[2]

    joined = run(SeveralRewards([level_reward, calm], weights=[3, 1], mode="sum"))
    assert relative_difference(joined, run(added)) <= 1e-6


def test_the_stds_of_several_rewards_are_not_known_before_the_step_ends() -> None:
    settings: dict[str, Any] = {"group_size": 4, "num_steps": 5, "advantage_scope": "batch"}
    module = FlowGRPO(ToyPolicy(), SeveralRewards([level_reward, calm]), **settings)
    with pytest.raises(ValueError, match="several rewards: each has a std of its own"):
        fit(DisaggregatedStrategy(engine="inline", groups_per_micro_batch=1), module=module)


def test_metrics_show_each_reward_as_it_is_weighted_and_compared() -> None:
    module = toy_module()
    module._reward = (SeveralRewards([level_reward, constant], weights=[3, 1]),)
    rewards, groups = torch.stack([torch.randn(8), torch.full((8,), 7.0)], dim=1), torch.arange(8) // 4
    metrics = module.reward_metrics(rewards, groups)
    assert metrics["reward/constant"] == 7
    assert metrics["reward/level_reward/weighted"] == 0.75 * rewards[:, 0].mean()
    compared = group_advantages(rewards[:, 0], groups)
    assert metrics["reward/level_reward/normalized_abs_mean"] == compared.abs().mean()
    assert metrics["reward/constant/normalized_abs_mean"] == 0
    assert metrics["reward/constant/zero_std_group_frac"] == 1
    assert metrics["reward/level_reward/zero_std_group_frac"] == 0


def named(name: str) -> Any:
    reward = partial(constant)
    reward.name = name  # type: ignore[attr-defined]
    return reward


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([level_reward], None, "at least two, got 1"),
        ([level_reward, level_reward], None, "got `level_reward` twice: give one a `name`"),
        ([level_reward, partial(level_reward)], None, "got `level_reward` twice"),
        ([level_reward, ToyPolicy], None, r"`reward` must not be a class, got ToyPolicy: give an instance"),
        ([level_reward, named("a/b")], None, r"without / and commas.*got 'a/b': give the reward another `name`"),
        (
            [constant, SeveralRewards([level_reward, calm])],
            None,
            "single ones, got SeveralRewards of level_reward, calm: put all into one list",
        ),
        ([level_reward, "calm"], None, "callable"),
        ([level_reward, calm], [1.0], "one per reward, 2, got 1"),
        ([level_reward, calm], [1.0, -1.0], "at least 0"),
        ([level_reward, calm], [0, 0], "not all 0"),
    ],
)
def test_what_does_not_fit_is_refused(rewards: list[Any], weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeveralRewards(rewards, weights)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="`mode` must be normalize_then_sum or sum, got 'max'"):
        SeveralRewards([level_reward, calm], mode="max")  # type: ignore[arg-type]


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
