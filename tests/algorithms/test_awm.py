"""AWM: its loss against Flow-Factory's numbers, the ratio, its divergences, refusals."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from digenrl.algorithms import AWM
from digenrl.algorithms.awm import Weighting
from digenrl.averaging import RampDecay
from digenrl.functional import matching_log_prob, mean_square
from digenrl.types import RowLosses
from tests.algorithms.stored_forward import (
    StoredLinear,
    assert_linear_gradients,
    linear_weights,
    mean_loss,
    stored_module,
    two_timesteps,
)
from tests.algorithms.toy_rows import final_latents_of, move, scored_batch, timestep_batch, toy
from tests.functional.golden import DTYPES, load
from tests.toy import ToyPolicy, level_reward

ALONE: dict[str, Any] = {"kl_beta": 0.0, "average_kl_beta": 0.0}
SMALL: dict[str, Any] = {"num_trained_timesteps": 3}


@DTYPES
def test_loss_and_gradient_are_flow_factorys(dtype: torch.dtype) -> None:
    golden = load("ff_awm_t")
    batch, noise = two_timesteps(golden, torch.from_numpy(golden["perm"]), dtype)
    policy = StoredLinear(**linear_weights(golden, "W0", "b0", dtype))
    module = stored_module(AWM, policy, noise, weighting="sigma", **ALONE)
    # Advantages have mean 0 and ratios are 1, so the loss is rounding of float32.
    assert mean_loss(module, batch).item() == pytest.approx(golden["log0|train/loss"].item(), abs=1e-7)
    assert_linear_gradients(module, golden, 1e-6)


@pytest.mark.parametrize("weighting", get_args(Weighting))
def test_gradient_is_that_of_the_weighted_distance_times_the_advantage(weighting: Any) -> None:
    module = toy(AWM, weighting=weighting, **ALONE, **SMALL)
    batch = timestep_batch(module)
    module.timestep_loss(batch).mean().backward()
    actual = module.policy.output.weight.grad.clone()
    module.policy.zero_grad()
    rows = module.noised(batch)
    distance = mean_square(module.policy(rows.latents, batch.sigma, batch.condition) - rows.target)
    (-batch.advantages * matching_log_prob(distance, batch.sigma, weighting=weighting)).mean().backward()
    torch.testing.assert_close(actual, module.policy.output.weight.grad)


def test_the_ratio_of_the_first_update_is_one_and_needs_no_copy() -> None:
    module = toy(AWM, **ALONE, **SMALL)
    move(module.policy)
    batch = timestep_batch(module)
    assert len(module.weight_copies) == 0
    torch.testing.assert_close(module.timestep_loss(batch).float(), -batch.advantages)
    assert module.take_metrics()["ratio/max_abs_dev"].value == 0.0


def test_later_updates_compare_with_the_weights_that_made_the_samples() -> None:
    module = toy(AWM, updates_per_rollout=2, weighting="uniform", clip_range=0.9, **ALONE, **SMALL)
    batch = timestep_batch(module)
    rows = module.noised(batch)
    with torch.no_grad():
        before = module.distance(module.policy, rows, batch)
        assert torch.equal(module.timestep_loss(batch).float(), -batch.advantages)  # the copy is the policy, bit by bit
        move(module.policy)
        ratio = (before - module.distance(module.policy, rows, batch)).exp()
        clipped = ratio.clamp(0.1, 1.9)
        expected = torch.maximum(-batch.advantages * ratio, -batch.advantages * clipped)
        torch.testing.assert_close(module.timestep_loss(batch).float(), expected)
    assert module.take_metrics()["ratio/max_abs_dev"].value > 0.1
    samples = scored_batch(module).trajectory.final_latents
    assert torch.equal(samples, final_latents_of(module, module.policy_copy("rollout")))


def test_a_row_beyond_the_clip_range_has_no_gradient() -> None:
    module = toy(AWM, updates_per_rollout=2, clip_range=1e-6, **ALONE, **SMALL)
    move(module.policy)
    batch = timestep_batch(module)
    rows = module.noised(batch)
    # What is good has come nearer already, what is bad has gone further: PPO lets these be.
    old_distance = module.distance(module.rollout_policy, rows, batch)
    distance = module.distance(module.policy, rows, batch)
    is_free = batch.advantages * (old_distance - distance) < 0
    assert 0 < is_free.sum() < len(is_free)
    ratio = (module.log_prob(distance, batch) - module.log_prob(old_distance, batch)).exp()
    (expected,) = torch.autograd.grad((-batch.advantages * ratio)[is_free].sum(), module.policy.output.weight)
    (actual,) = torch.autograd.grad(module.timestep_loss(batch).sum(), module.policy.output.weight)
    torch.testing.assert_close(actual, expected)


def test_divergences_are_apart_from_what_advantages_scale() -> None:
    module = toy(AWM, kl_beta=0.3, average_kl_beta=2.0, **SMALL)
    move(module.policy_copy("reference").weights, seed=1)
    move(module.policy_copy("average").weights, seed=2)
    batch = timestep_batch(module)
    losses = module.timestep_loss(batch)
    assert isinstance(losses, RowLosses)
    rows = module.noised(batch)
    with torch.no_grad():
        velocity = module.velocity(module.policy, rows, batch)
        others = [module.policy_copy(name)(rows.latents, batch.sigma, batch.condition) for name in module.kl_betas]
    expected = 0.3 * mean_square(velocity - others[0]) + 2.0 * mean_square(velocity - others[1])
    torch.testing.assert_close(losses.regularizer, expected)
    torch.testing.assert_close(losses.policy.float(), -batch.advantages)


def test_the_average_follows_every_optimizer_step() -> None:
    module = toy(AWM, updates_per_rollout=2, average_rate=0.2, average_cap=0.5, **SMALL)
    expected = module.policy.output.weight.detach().clone()
    for step in range(5):
        move(module.policy, seed=step)
        module.update_weight_copies()
        decay = RampDecay(rate=0.2, cap=0.5).decay(step)
        expected = decay * expected + (1 - decay) * module.policy.output.weight.detach()
        torch.testing.assert_close(module.policy_copy("average").weights.output.weight, expected)


def test_the_noisiest_timestep_is_not_trained_by_default() -> None:
    module = AWM(ToyPolicy(), level_reward, seed=0)
    drawn = {index for step in range(50) for index in timesteps_of_step(module, step)}
    assert drawn == set(range(1, 14))


def timesteps_of_step(module: AWM, step: int) -> list[int]:
    timesteps = module.select_timesteps(module.prompt_batch(["low"], step=step))
    assert (timesteps == timesteps[0]).all(), "the samples of a step share them"
    assert len(set(timesteps[0].tolist())) == 6
    return timesteps[0].tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "t"}, "`weighting` must be one of uniform, .*, ghuber, got 't'"),
        ({"clip_range": 1.0}, r"`clip_range` .* in \(0, 1\), got 1.0"),
        ({"kl_beta": -1.0}, "`kl_beta` .* got -1.0"),
        ({"average_kl_beta": float("inf")}, "`average_kl_beta` .* got inf"),
        ({"average_cap": 2.0}, "`average_cap` .* got 2.0"),
        ({"first_trained_timestep": 9}, r"`num_trained_timesteps` are drawn from steps 9 to 13 .* \[1, 5\], got 6"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AWM(ToyPolicy(), level_reward, **settings)
