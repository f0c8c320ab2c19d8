"""CRD: its loss against Flow-Factory's numbers, centring, its two averages, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import CRD
from digenrl.averaging import RampDecay
from digenrl.functional import mean_square
from tests.algorithms.stored_forward import (
    StoredLinear,
    assert_linear_gradients,
    linear_weights,
    mean_loss,
    set_copy,
    stored_module,
    two_timesteps,
)
from tests.algorithms.toy_rows import (
    assert_resumes,
    final_latents_of,
    move,
    rewards_of_run,
    scored_batch,
    timestep_batch,
    toy,
)
from tests.functional.golden import assert_value, load
from tests.toy import ToyPolicy, level_reward

SMALL: dict[str, Any] = {"num_trained_timesteps": 2, "sampler_flat": 1, "sampler_rate": 0.3, "old_rate": 0.1}


@pytest.mark.parametrize(
    ("dtype", "gradient_bound"), [(torch.float64, 1e-5), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
def test_loss_and_gradient_are_flow_factorys(dtype: torch.dtype, gradient_bound: float) -> None:
    golden = load("ff_crd_default")
    batch, noise = two_timesteps(golden, slice(None), dtype)
    policy = StoredLinear(**linear_weights(golden, "W0", "b0", dtype))
    module = stored_module(CRD, policy, noise, reference_guidance_scale=4.5)
    set_copy(module, "old", **linear_weights(golden, "W_old", "b_old", dtype))
    set_copy(module, "reference", **linear_weights(golden, "Wref", "bref", dtype))
    assert_value(mean_loss(module, batch), golden["log0|train/loss"], 1e-6)
    assert_linear_gradients(module, golden, gradient_bound)


def test_rows_are_centred_with_their_group_at_their_timestep() -> None:
    module = toy(CRD, kl_beta=0.0, **SMALL)
    move(module.policy)
    batch = timestep_batch(module)
    rows, losses = module.noised(batch), module.timestep_loss(batch).detach()
    velocities = [module.velocity(p, rows, batch).detach() for p in (module.policy, module.policy_copy("old"))]
    residuals = [(velocity - rows.target).double().flatten(1) for velocity in velocities]
    distance, old_distance = (x.square().mean(1) / x.abs().mean(1) for x in residuals)
    excess = (old_distance - distance) - (batch.advantages / 10 + 0.5)
    assert batch.group_index.unique().numel() == 4, "2 groups at 2 timesteps"
    for group in batch.group_index.unique():
        of_group = excess[batch.group_index == group]
        torch.testing.assert_close(losses[batch.group_index == group], 5 * (of_group - of_group.mean()).square())


def test_the_distance_may_be_the_plain_one() -> None:
    adaptive, plain = (toy(CRD, kl_beta=0.0, adaptive_distance=choice, **SMALL) for choice in (True, False))
    for module in (adaptive, plain):
        move(module.policy)
    batch = timestep_batch(plain)
    rows = plain.noised(batch)
    old_distance, distance = (
        mean_square(plain.velocity(p, rows, batch) - rows.target).detach()
        for p in (plain.policy_copy("old"), plain.policy)
    )
    excess = (old_distance - distance) - (batch.advantages / 10 + 0.5)
    expected = 5 * (excess - plain.group_mean(excess, batch.group_index)).square()
    torch.testing.assert_close(plain.timestep_loss(batch).detach(), expected)
    assert not torch.allclose(adaptive.timestep_loss(batch).float(), expected)


def test_the_divergence_is_to_the_guided_start_and_heavier_for_good_samples() -> None:
    with_kl = toy(CRD, kl_beta=0.5, reference_guidance_scale=3.0, **SMALL)
    without = toy(CRD, kl_beta=0.0, **SMALL)
    for module in (with_kl, without):
        move(module.policy)
    batch = timestep_batch(with_kl)
    rows = with_kl.noised(batch)
    with torch.no_grad():
        conditions = (batch.condition, with_kl.policy.unconditional(batch.condition))
        start = with_kl.policy_copy("reference")
        conditional, unconditional = (start(rows.latents, batch.sigma, condition) for condition in conditions)
        guided = unconditional + 3.0 * (conditional - unconditional)
        divergence = mean_square(with_kl.velocity(with_kl.policy, rows, batch) - guided)
        actual = with_kl.timestep_loss(batch) - without.timestep_loss(batch)
    weight = 1e-4 + (batch.advantages / 10 + 0.5) * (0.5 - 1e-4)
    torch.testing.assert_close(actual.float(), weight * divergence, rtol=1e-4, atol=1e-6)


def test_the_sampler_makes_the_samples() -> None:
    module = toy(CRD, **SMALL)
    move(module.policy_copy("sampler").weights, seed=1)
    move(module.policy_copy("old").weights, seed=2)
    samples = scored_batch(module).trajectory.final_latents
    assert torch.equal(samples, final_latents_of(module, module.policy_copy("sampler")))
    assert not torch.allclose(samples, final_latents_of(module, module.policy))
    assert not torch.allclose(samples, final_latents_of(module, module.policy_copy("old")))


@pytest.mark.parametrize("updates_per_rollout", [1, 2])
def test_both_averages_follow_once_per_rollout(updates_per_rollout: int) -> None:
    module = toy(CRD, updates_per_rollout=updates_per_rollout, **SMALL)
    schedules = {"old": RampDecay(0.1, 0.999, start=0.25), "sampler": RampDecay(0.3, 0.999, 1)}
    expected = {name: module.policy.output.weight.detach().clone() for name in schedules}
    for step in range(3 * updates_per_rollout):
        move(module.policy, seed=step)
        module.update_weight_copies()
        for name, schedule in schedules.items():
            if (step + 1) % updates_per_rollout == 0:
                decay = schedule.decay(step)
                expected[name] = decay * expected[name] + (1 - decay) * module.policy.output.weight.detach()
            torch.testing.assert_close(module.policy_copy(name).weights.output.weight, expected[name])
    assert sorted(module.weight_copies) == ["old", "reference", "sampler"]
    sent = {name.split(".")[1] for name in module.published_weights() if name.startswith("weight_copies.")}
    assert sent == {"sampler"}


def test_the_published_decays_are_the_defaults() -> None:
    schedules = CRD(ToyPolicy(), level_reward)._schedules
    assert [schedules["old"].decay(step) for step in (0, 10, 149, 400)] == pytest.approx([0.25, 0.3, 0.995, 0.999])
    sampler = [schedules["sampler"].decay(step) for step in (0, 75, 76, 400)]
    assert sampler == pytest.approx([0.0, 0.0, 0.0075, 0.999])


def test_generators_make_the_samples_of_a_colocated_run() -> None:
    def rewards(strategy: Any, **settings: Any) -> list[float]:
        options: dict[str, Any] = {"group_size": 4, "num_steps": 5, "seed": 0, "lr": 5e-2, **SMALL, **settings}
        return rewards_of_run(CRD(ToyPolicy(), level_reward, **options), strategy)

    colocated = rewards("auto")
    assert rewards(DisaggregatedStrategy(2, 2)) == pytest.approx(colocated, abs=1e-6)
    assert abs(rewards("auto", sampler_rate=0.0)[-1] - colocated[-1]) > 1e-4


def test_a_resumed_run_continues_its_copies_bit_by_bit(tmp_path: Path) -> None:
    def make() -> CRD:
        return CRD(ToyPolicy(), level_reward, group_size=4, num_steps=5, lr=1e-2, **SMALL)

    assert_resumes(make, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_beta": -0.1}, "`kl_beta` .* got -0.1"),
        ({"reference_guidance_scale": 0.0}, "`reference_guidance_scale` must be at least 1, .* got 0.0"),
        ({"advantage_clip": float("inf")}, "`advantage_clip` must be finite, got inf"),
        ({"old_start": 1.0}, r"`old_start` .* \[0, 0.999\], got 1.0"),
        ({"old_start": -0.1}, "`old_start` .* got -0.1"),
        ({"sampler_cap": 1.5}, "`sampler_cap` .* got 1.5"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CRD(ToyPolicy(), level_reward, **settings)


@pytest.mark.parametrize("kl_beta", [0.0, 1e-6, 0.1])
def test_any_weight_of_the_divergence_can_be_trained_with(kl_beta: float) -> None:
    module = toy(CRD, kl_beta=kl_beta, **SMALL)
    assert module.timestep_loss(timestep_batch(module)).isfinite().all()
    assert ("reference" in module.weight_copies) == (kl_beta > 0)
