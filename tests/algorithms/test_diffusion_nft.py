"""DiffusionNFT: its loss against the authors' numbers, its old policy, resuming, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import DiffusionNFT
from digenrl.averaging import RampDecay
from digenrl.functional import mean_square
from tests.algorithms.stored_forward import StoredVelocities, mean_loss, set_copy, stored_batch, stored_module
from tests.algorithms.toy_rows import (
    assert_resumes,
    final_latents_of,
    move,
    rewards_of_run,
    scored_batch,
    timestep_batch,
    toy,
)
from tests.functional.golden import DTYPES, assert_gradient, assert_value, load, tensors
from tests.functional.test_forward_process import ADVANTAGE_MODES, NFT_CASES
from tests.integration.toy_runs import fit, largest_difference
from tests.toy import ToyPolicy, level_reward

SMALL: dict[str, Any] = {"num_trained_timesteps": 3, "old_rate": 0.2, "old_cap": 0.7}


@DTYPES
@NFT_CASES
def test_loss_and_gradient_are_the_authors(case: str, dtype: torch.dtype) -> None:
    golden = load("diffusion_nft_loss")
    x0, noise, sigma, advantages = tensors(golden, "x0", "noise", "t", "advantages", dtype=dtype)
    velocity, old, reference = tensors(golden, "v_new", "v_old", "v_ref", dtype=dtype)
    kl_beta = 0.0 if case == "b1.0_one" else 1e-4
    policy = StoredVelocities(velocities=velocity)
    module = stored_module(DiffusionNFT, policy, noise, beta=float(case[1:4]), kl_beta=kl_beta)
    set_copy(module, "old", velocities=old)
    if kl_beta > 0:
        set_copy(module, "reference", velocities=reference)
    advantages = ADVANTAGE_MODES[case.split("_")[1]](module.advantage_settings.clamp(advantages))
    row = torch.arange(6)
    loss = mean_loss(module, stored_batch(x0, sigma, advantages, row, row))
    assert_value(loss, golden[f"{case}.loss"], 1e-5)
    # The last sample's residual is rounding only.
    assert_gradient(policy.velocities.grad[:5], golden[f"{case}.grad_v"][:5], 1e-4)


def test_the_divergence_to_the_start_has_its_weight_in_value_and_gradient() -> None:
    # The published weight, 1e-4, is too small to be seen in the stored losses.
    with_kl, without = (toy(DiffusionNFT, kl_beta=kl_beta, **SMALL) for kl_beta in (0.5, 0.0))
    for module in (with_kl, without):
        move(module.policy)
    batch = timestep_batch(with_kl)
    rows = with_kl.noised(batch)
    reference = with_kl.policy_copy("reference")(rows.latents, batch.sigma, batch.condition)
    expected = 0.5 * mean_square(with_kl.velocity(with_kl.policy, rows, batch) - reference)
    losses = [module.timestep_loss(batch) for module in (with_kl, without)]
    torch.testing.assert_close(losses[0] - losses[1], expected.double(), rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(loss.sum(), module.policy.output.weight)[0]
        for loss, module in ((losses[0], with_kl), (losses[1], without), (expected, with_kl))
    ]
    torch.testing.assert_close(gradients[0] - gradients[1], gradients[2], rtol=1e-4, atol=1e-4)


def test_old_makes_the_samples_from_the_first_step_on() -> None:
    module = toy(DiffusionNFT, **SMALL)
    move(module.policy_copy("old").weights)
    samples = scored_batch(module).trajectory.final_latents
    assert torch.equal(samples, final_latents_of(module, module.policy_copy("old")))
    assert not torch.allclose(samples, final_latents_of(module, module.policy))


@pytest.mark.parametrize("updates_per_rollout", [1, 2, 3])
def test_old_follows_the_weights_once_per_rollout(updates_per_rollout: int) -> None:
    module = toy(DiffusionNFT, old_flat=1, updates_per_rollout=updates_per_rollout, **SMALL)
    expected = module.policy.output.weight.detach().clone()
    for step in range(3 * updates_per_rollout):
        move(module.policy, seed=step)
        module.update_weight_copies()
        if (step + 1) % updates_per_rollout == 0:
            decay = RampDecay(rate=0.2, cap=0.7, flat=1).decay(step)
            expected = decay * expected + (1 - decay) * module.policy.output.weight.detach()
        torch.testing.assert_close(module.policy_copy("old").weights.output.weight, expected)


def test_the_published_decays_are_the_defaults_and_a_setting() -> None:
    default = DiffusionNFT(ToyPolicy(), level_reward)._schedules["old"]
    assert [default.decay(step) for step in (0, 100, 499, 900)] == pytest.approx([0.0, 0.1, 0.499, 0.5])
    other = DiffusionNFT(ToyPolicy(), level_reward, old_flat=75, old_rate=0.0075, old_cap=0.999)
    decays = [other._schedules["old"].decay(step) for step in (0, 75, 76, 100, 300)]
    assert decays == pytest.approx([0.0, 0.0, 0.0075, 0.1875, 0.999])


@pytest.mark.parametrize("updates_per_rollout", [1, 2])
def test_generators_receive_old_and_no_other_copy(updates_per_rollout: int) -> None:
    module = toy(DiffusionNFT, updates_per_rollout=updates_per_rollout, **SMALL)
    copies = {name.split(".")[1] for name in module.published_weights() if name.startswith("weight_copies.")}
    assert copies == {"old"}
    assert sorted(module.weight_copies) == ["old", "reference"]


@pytest.mark.parametrize("updates_per_rollout", [1, 2])
def test_generators_make_the_samples_of_a_colocated_run(updates_per_rollout: int) -> None:
    class ByThePolicy(DiffusionNFT):
        @property
        def rollout_policy(self) -> Any:
            return self.policy

    def rewards(cls: type[DiffusionNFT], strategy: Any) -> list[float]:
        settings: dict[str, Any] = {"updates_per_rollout": updates_per_rollout, "lr": 5e-2, **SMALL}
        return rewards_of_run(cls(ToyPolicy(), level_reward, group_size=4, num_steps=5, seed=0, **settings), strategy)

    colocated = rewards(DiffusionNFT, "auto")
    assert rewards(DiffusionNFT, DisaggregatedStrategy(2, 2)) == pytest.approx(colocated, abs=1e-6)
    assert abs(rewards(ByThePolicy, "auto")[-1] - colocated[-1]) > 1e-4


def test_rounds_of_two_updates_equal_the_colocated_run() -> None:
    def weights(strategy: Any) -> dict[str, torch.Tensor]:
        settings: dict[str, Any] = {"updates_per_rollout": 2, "lr": 1e-3, **SMALL}
        module = DiffusionNFT(ToyPolicy(), level_reward, group_size=4, num_steps=5, seed=0, **settings)
        return fit(strategy, module=module, max_steps=5)[2]

    assert largest_difference(weights(DisaggregatedStrategy(2, 2)), weights("auto")) <= 1e-5


@pytest.mark.parametrize(("updates_per_rollout", "colocated"), [(1, False), (1, True), (2, False)])
def test_a_resumed_run_continues_its_copies_bit_by_bit(
    tmp_path: Path, updates_per_rollout: int, colocated: bool
) -> None:
    def make() -> DiffusionNFT:
        settings: dict[str, Any] = {"updates_per_rollout": updates_per_rollout, "lr": 1e-2, **SMALL}
        return DiffusionNFT(ToyPolicy(), level_reward, group_size=4, num_steps=5, **settings)

    assert_resumes(make, tmp_path, colocated=colocated)


def test_each_sample_has_timesteps_of_its_own() -> None:
    module = toy(DiffusionNFT, **SMALL)
    timesteps = module.select_timesteps(module.prompt_batch(["low", "top"], step=0))
    assert timesteps.shape == (8, 3)
    assert len({tuple(row) for row in timesteps.tolist()}) > 1
    assert all(len(set(row)) == 3 for row in timesteps.tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, r"`beta` .* in \(0, inf\), got 0.0"),
        ({"beta": float("inf")}, "`beta` .* got inf"),
        ({"kl_beta": -1e-4}, r"`kl_beta` .* in \[0, inf\), got -0.0001"),
        ({"advantage_clip": float("inf")}, "`advantage_clip` must be finite, got inf"),
        ({"old_rate": -0.1}, "`old_rate` .* got -0.1"),
        ({"old_cap": 1.1}, "`old_cap` .* got 1.1"),
        ({"old_flat": -1}, "`old_flat` .* got -1"),
        ({"num_steps": 5}, r"`num_trained_timesteps` .* in \[1, 5\], got 9"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionNFT(ToyPolicy(), level_reward, **settings)
