"""Online DPO: its loss against Flow-Factory's numbers, pairs, ties, timesteps, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptBatch
from digenrl.algorithms import OnlineDPO
from digenrl.functional import mean_square, pair_loss
from digenrl.rewards import SeveralRewards
from tests.algorithms.stored_forward import (
    StoredLinear,
    assert_linear_gradients,
    linear_weights,
    mean_loss,
    set_copy,
    stored_batch,
    stored_module,
)
from tests.algorithms.toy_rows import move, scored_batch, timestep_batch, toy
from tests.functional.golden import DTYPES, load, tensors
from tests.integration.toy_runs import fit, relative_difference
from tests.toy import ToyPolicy, level_reward

SMALL: dict[str, Any] = {"beta": 5.0, "num_trained_timesteps": 2}


def constant_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    """The same for all samples of a prompt."""
    return torch.tensor([float(len(text)) for text in prompts.texts])


SEVERAL = SeveralRewards([level_reward, constant_reward], weights=[1.0, 3.0])


def half_constant_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    """A preference for some prompts only."""
    return torch.where(torch.tensor([text == "low" for text in prompts.texts]), level_reward(media, prompts), 1.0)


@DTYPES
def test_loss_and_gradient_are_flow_factorys(dtype: torch.dtype) -> None:
    golden = load("ff_dpo_default")
    x0, embeds, rewards = tensors(golden, "x0", "embeds", "adv", dtype=dtype)
    groups, pairs = torch.from_numpy(golden["uid"]), torch.from_numpy(golden["pairs"])
    noise_of_pair, timesteps = tensors(golden, "noise", "timesteps", dtype=dtype)
    noise = torch.zeros_like(x0)
    for place, pair in enumerate(golden["pair_perm"]):
        noise[pairs[pair]] = noise_of_pair[0, place]
    policy = StoredLinear(**linear_weights(golden, "W0", "b0", dtype))
    module = stored_module(OnlineDPO, policy, noise[pairs.flatten().sort().values])
    set_copy(module, "reference", **linear_weights(golden, "Wref", "bref", dtype))
    advantages = module.advantages(rewards, groups)
    row = torch.tensor(module.select_samples(rewards, advantages, groups))
    assert row.tolist() == pairs.flatten().sort().values.tolist()
    sigma = timesteps[0, 0].expand(6) / 1000
    loss = mean_loss(module, stored_batch(x0[row], sigma, advantages[row].to(dtype), groups[row], embeds[row]))
    assert loss.item() == pytest.approx(golden["log1|train/loss"].item(), rel=1e-5)
    assert_linear_gradients(module, golden, 1e-6)


def test_the_best_sample_is_chosen_and_the_worst_rejected() -> None:
    module = toy(OnlineDPO, **SMALL)
    rewards, groups = torch.tensor([3.0, 5.0, 4.0, 1.0, 9.0, 2.0]), torch.tensor([0, 1, 0, 0, 1, 1])
    advantages = module.advantages(rewards, groups)
    assert advantages.tolist() == [0.0, 0.0, 1.0, -1.0, 1.0, -1.0]
    assert list(module.select_samples(rewards, advantages, groups)) == [2, 3, 4, 5]


def test_of_equal_samples_the_first_counts_and_a_group_of_equals_has_no_pair() -> None:
    module = toy(OnlineDPO, **SMALL)
    rewards, groups = torch.tensor([2.0, 1.0, 2.0, 1.0, 7.0, 7.0, 7.0]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    advantages = module.advantages(rewards, groups)
    assert advantages.tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert list(module.select_samples(rewards, advantages, groups)) == [0, 1, 4, 5]


def test_kept_rows_are_in_ascending_order_also_where_groups_alternate() -> None:
    module = toy(OnlineDPO, **SMALL)
    rewards, groups = torch.tensor([5.0, 2.0, 6.0, 1.0]), torch.tensor([1, 0, 1, 0])
    assert list(module.select_samples(rewards, module.advantages(rewards, groups), groups)) == [0, 1, 2, 3]


def test_the_order_does_not_depend_on_the_clip_of_advantages() -> None:
    # Both are beyond 5 standard deviations, and the first is only the second best.
    rewards, groups = torch.zeros(100), torch.zeros(100, dtype=torch.int64)
    rewards[0], rewards[1] = 10.0, 11.0
    for reward, given in ((level_reward, rewards), (SEVERAL, rewards[:, None].expand(-1, 2))):
        assert toy(OnlineDPO, reward=reward, **SMALL).advantages(given, groups).argmax() == 1


def test_of_several_rewards_the_sum_of_advantages_decides() -> None:
    rewards, groups = torch.tensor([[0.0, 1.0], [9.0, 0.0], [1.0, 2.0]]), torch.zeros(3, dtype=torch.int64)
    assert toy(OnlineDPO, reward=SEVERAL, **SMALL).advantages(rewards, groups).tolist() == [0.0, -1.0, 1.0]


def test_with_several_rewards_the_std_counts_and_may_be_set() -> None:
    settings: dict[str, Any] = {"reward": SEVERAL, "normalize_by_std": False, "advantage_ddof": 1, **SMALL}
    rewards, groups = torch.tensor([[0.0, 1.0], [9.0, 0.0], [1.0, 2.0]]), torch.zeros(3, dtype=torch.int64)
    assert toy(OnlineDPO, **settings).advantages(rewards, groups).tolist() == [-1.0, 1.0, 0.0]


def test_loss_is_the_mean_over_pairs() -> None:
    module = toy(OnlineDPO, **SMALL)
    move(module.policy)
    batch = timestep_batch(module)
    rows = module.noised(batch)
    margins = {}
    for row, group in enumerate(batch.group_index.tolist()):
        policies = (module.policy, module.policy_copy("reference"))
        velocities = [policy(rows.latents, batch.sigma, batch.condition)[[row]] for policy in policies]
        distance, reference = (mean_square(v - rows.target[[row]]).item() for v in velocities)
        margins[group] = margins.get(group, 0.0) + batch.advantages[row].item() * (distance - reference)
    assert len(margins) == 4, "2 pairs at 2 timesteps"
    expected = pair_loss(torch.tensor(list(margins.values())), beta=5.0).mean()
    torch.testing.assert_close(module.timestep_loss(batch).mean(), expected)
    assert module.num_rows(module.prompt_batch(["low", "top"], step=0)) == len(batch) == 8


def test_groups_of_equals_have_no_loss_and_no_gradient() -> None:
    module = toy(OnlineDPO, reward=constant_reward, **SMALL)
    move(module.policy)
    losses = module.timestep_loss(timestep_batch(module))
    losses.sum().backward()
    assert losses.tolist() == [0.0] * 8
    assert not any(parameter.grad.any() for parameter in module.policy.parameters() if parameter.grad is not None)


def test_a_group_of_equals_counts_in_the_mean_and_leaves_the_others_alone() -> None:
    both = toy(OnlineDPO, reward=half_constant_reward, **SMALL)
    move(both.policy)
    losses = both.timestep_loss(timestep_batch(both))
    alone = both.timestep_loss(timestep_batch(both, texts=("low",)))
    torch.testing.assert_close(losses.sum(), alone.sum())
    assert len(losses) == 2 * len(alone)


def test_the_gradient_with_ties_does_not_depend_on_ranks_and_batching() -> None:
    def weights(strategy: Any) -> dict[str, Tensor]:
        settings: dict[str, Any] = {"group_size": 3, "num_steps": 5, "seed": 0, "lr": 1e-3, **SMALL}
        module = OnlineDPO(ToyPolicy(), half_constant_reward, **settings)
        return fit(strategy, module=module, max_steps=3)[2]

    colocated = weights("auto")
    # A rank's share of 2 rows is one of the pair's each.
    split = DisaggregatedStrategy(2, 2, groups_per_micro_batch=1, trainer_assist="off")
    assert relative_difference(weights(split), colocated) <= 1e-5


def test_a_pair_shares_noise_and_timestep_and_keeps_its_conditions() -> None:
    module = toy(OnlineDPO, **SMALL)
    batch = timestep_batch(module)
    noise = module.noised(batch).target + batch.final_latents
    for group in batch.group_index.unique():
        first, second = (batch.group_index == group).nonzero().flatten().tolist()
        assert batch.timestep_index[first] == batch.timestep_index[second]
        torch.testing.assert_close(noise[first], noise[second])
        assert batch.prompts.texts[first] == batch.prompts.texts[second]
    assert batch.condition.level.unique().numel() == 2


@pytest.mark.parametrize(
    ("density", "expected"),
    # A standard normal's mass between the logits of 0, 1/4, 1/2, 3/4 and 1.
    [("uniform", [0.25, 0.25, 0.25, 0.25]), ("logit_normal", [0.136, 0.364, 0.364, 0.136])],
)
def test_timesteps_of_pairs_have_their_density(density: Any, expected: list[float]) -> None:
    bounds = {"first_trained_timestep": 1, "last_trained_timestep": 4}
    module = OnlineDPO(ToyPolicy(), level_reward, num_steps=6, timestep_density=density, seed=0, **bounds)
    drawn = torch.cat([module.select_timesteps(module.prompt_batch(["low"] * 50, step=step)) for step in range(20)])
    drawn = drawn[::4]
    frequency = torch.bincount(drawn.flatten(), minlength=6)[1:5] / len(drawn)
    assert (len(drawn), drawn.min(), drawn.max()) == (1000, 1, 4)
    assert frequency.tolist() == pytest.approx(expected, abs=0.05)


def test_timesteps_depend_on_seed_step_and_group_alone() -> None:
    module = toy(OnlineDPO, num_steps=20, num_trained_timesteps=5)
    prompts = module.prompt_batch(["low", "top", "high"], step=3)
    timesteps = module.select_timesteps(prompts)
    assert torch.equal(module.select_timesteps(prompts.select([9, 1, 4])), timesteps[[9, 1, 4]])
    assert module.select_timesteps(prompts.select([])).shape == (0, 5)
    assert all(len(set(row)) == 5 for row in timesteps.tolist()), "without replacement"
    assert len({tuple(row) for row in timesteps.tolist()}) == 3, "a draw for each group"
    assert not torch.equal(module.select_timesteps(module.prompt_batch(["low", "top", "high"], step=4)), timesteps)
    module.seed = 1
    assert not torch.equal(module.select_timesteps(prompts), timesteps)


def test_trained_samples_are_two_of_each_group() -> None:
    scored = scored_batch(toy(OnlineDPO, **SMALL))
    assert scored.advantages.sort().values.tolist() == [-1.0, -1.0, 1.0, 1.0]
    chosen, rejected = (scored.rewards[scored.advantages == sign] for sign in (1, -1))
    assert (chosen > rejected).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, r"`beta` .* in \(0, inf\), got 0.0"),
        ({"beta": float("nan")}, "`beta` .* got nan"),
        ({"normalize_by_std": False}, "`normalize_by_std` must be left at True .* got False: only the order"),
        (
            {"advantage_scope": "batch"},
            "`advantage_scope` must be left at group with OnlineDPO, got batch: only the order",
        ),
        ({"advantage_ddof": 1}, "`advantage_ddof` must be left at 0 .* got 1: only the order"),
        ({"advantage_eps": 0.1}, "`advantage_eps` must be left at 0.0001 .* got 0.1: only the order"),
        ({"advantage_clip": 1.0}, "`advantage_clip` must be left at 5.0 .* got 1.0: only the order"),
        ({"advantage_clip": 1.0, "reward": SEVERAL}, "`advantage_clip` must be left at 5.0 .* got 1.0: only the order"),
        ({"timestep_density": "normal"}, "`timestep_density` must be logit_normal or uniform, got 'normal'"),
        ({"num_trained_timesteps": 41}, r"`num_trained_timesteps` .* in \[1, 40\], got 41"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnlineDPO(ToyPolicy(), **{"reward": level_reward, **settings})


def test_where_timesteps_come_from_cannot_be_set() -> None:
    with pytest.raises(TypeError, match="timesteps_of"):
        OnlineDPO(ToyPolicy(), level_reward, timesteps_of="sample")
