"""DGPO: its loss against the authors' numbers, which weights make samples, resuming, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import DGPO
from digenrl.averaging import RampDecay
from digenrl.functional import mean_per_group
from tests.algorithms.stored_forward import StoredVelocities, mean_loss, set_copy, stored_batch, stored_module
from tests.algorithms.toy_rows import assert_resumes, final_latents_of, move, rewards_of_run, scored_batch, toy
from tests.functional.golden import assert_gradient, assert_value, load, tensors
from tests.functional.ranks import on_two_ranks
from tests.toy import ToyPolicy, level_reward

# Of each stored loss: settings of the class. "noclip" has no old policy, so `old` is the policy itself there.
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"beta": 100.0, "clip_range": 1e-2, "kl_beta": 0.02},
    "tightclip": {"beta": 100.0, "clip_range": 1e-3, "kl_beta": 1e-3},
    "noclip": {"beta": 10.0, "clip_range": 0.5, "kl_beta": 0.0},
    "emaref": {"beta": 2000.0, "clip_range": 1e-5, "kl_beta": 1e-3, "reference": "old"},
    "clipkl": {"beta": 100.0, "clip_range": 1e-3, "kl_beta": 0.02, "clips_kl": True},
}
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS)
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "loss_bound", "gradient_bound"),
    [(torch.float64, 2e-5, 5e-5), (torch.float32, 1e-4, 1e-4)],
    ids=["float64", "float32"],
)
SMALL: dict[str, Any] = {"num_trained_timesteps": 3, "beta": 10.0}


def stored(layout: str, config: str, dtype: torch.dtype, rows: Any = slice(None)) -> Any:
    """The class with the stored weights, and its batch of some of the 8 samples."""
    golden = load("dgpo_loss")
    noise_key, sigma_key = f"{layout}.noise_per_sample", f"{layout}.sigma_t"
    x0, noise, sigma, advantages = tensors(golden, "x0", noise_key, sigma_key, "advantages", dtype=dtype)
    velocity, reference, old = tensors(golden, "model_v", "ref_v", "old_v", dtype=dtype)
    module = stored_module(DGPO, StoredVelocities(velocities=velocity), noise[rows], **CONFIGS[config])
    set_copy(module, "old", velocities=velocity if config == "noclip" else old)
    if "reference" in module.weight_copies:
        set_copy(module, "reference", velocities=reference)
    groups = torch.from_numpy(golden[f"{layout}.group_labels"])
    row = torch.arange(8)[rows]
    return module, stored_batch(
        x0[rows], sigma[rows], module.advantage_settings.clamp(advantages[rows]), groups[rows], row
    )


@PRECISIONS
@EVERY_CONFIG
@pytest.mark.parametrize("layout", ["contig", "interleaved"])
def test_loss_and_gradient_are_the_authors(
    layout: str, config: str, dtype: torch.dtype, loss_bound: float, gradient_bound: float
) -> None:
    golden = load("dgpo_loss")
    module, batch = stored(layout, config, dtype)
    assert_value(mean_loss(module, batch), golden[f"{layout}.{config}.loss"], loss_bound)
    assert_gradient(module.policy.velocities.grad, golden[f"{layout}.{config}.grad_v"], gradient_bound)


@pytest.mark.parametrize("layout", ["contig", "interleaved"])
def test_the_divergence_where_old_is_the_reference_is_the_authors(layout: str) -> None:
    # Within the whole loss it is too small to be told from the divergence to `old`, an eleventh of it.
    golden = load("dgpo_loss")
    module, batch = stored(layout, "emaref", torch.float64)
    losses = []
    for module.kl_beta in (1e-3, 0.0):
        losses.append(module.timestep_loss(batch).mean().item())
    expected = golden[f"{layout}.emaref.loss"].item() - golden[f"{layout}.emaref.dgpo_loss"].item()
    assert losses[0] - losses[1] == pytest.approx(expected, rel=0.02)


@PRECISIONS
@EVERY_CONFIG
def test_loss_and_gradient_on_two_ranks_are_the_authors(
    config: str, dtype: torch.dtype, loss_bound: float, gradient_bound: float
) -> None:
    golden = load("dgpo_loss_2ranks")
    gradients = {}

    def loss_of_rank(rank: int, group_mean: Any) -> torch.Tensor:
        module, batch = stored("interleaved", config, dtype, slice(4 * rank, 4 * rank + 4))
        module.group_mean = group_mean
        loss = mean_loss(module, batch)
        gradients[rank] = module.policy.velocities.grad[4 * rank : 4 * rank + 4]
        return loss

    losses = torch.stack(on_two_ranks(loss_of_rank, mean_per_group))
    assert_value(losses, golden[f"{config}.loss"], loss_bound)
    assert_gradient(torch.stack([gradients[0], gradients[1]]), golden[f"{config}.grad_v"], gradient_bound)


@pytest.mark.parametrize(("old_rollout_from", "num_steps_before"), [(0, 0), (2, 2), (None, 9)])
def test_old_makes_the_samples_from_its_step_on(old_rollout_from: int | None, num_steps_before: int) -> None:
    module = toy(DGPO, old_rollout_from=old_rollout_from, **SMALL)
    for _ in range(num_steps_before):
        assert module.rollout_policy is module.policy
        module.update_weight_copies()
    made_by = module.policy if old_rollout_from is None else module.policy_copy("old")
    assert module.rollout_policy is made_by
    move(module.policy_copy("old").weights)
    samples = scored_batch(module).trajectory.final_latents
    assert torch.equal(samples, final_latents_of(module, made_by))
    assert not torch.allclose(samples, final_latents_of(module, module.policy)) or old_rollout_from is None


def test_old_follows_the_weights_by_its_schedule() -> None:
    module = toy(DGPO, old_rate=0.2, old_cap=0.5, **SMALL)
    expected = module.policy.output.weight.detach().clone()
    for step in range(5):
        move(module.policy, seed=step)
        module.update_weight_copies()
        decay = RampDecay(rate=0.2, cap=0.5).decay(step)
        expected = decay * expected + (1 - decay) * module.policy.output.weight.detach()
        torch.testing.assert_close(module.policy_copy("old").weights.output.weight, expected)


def test_validation_samples_are_the_policys() -> None:
    module = toy(DGPO, old_rollout_from=0, **SMALL)
    move(module.policy_copy("old").weights)
    expected = final_latents_of(module, module.policy)
    module.validation_solver = module.solver
    assert torch.equal(module.sample(module.prompt_batch(["low", "top"], step=0)), module.policy.decode(expected))


@pytest.mark.parametrize(("old_rollout_from", "is_sent"), [(3, True), (None, False)])
def test_generators_receive_old_only_if_it_makes_samples(old_rollout_from: int | None, is_sent: bool) -> None:
    sent = toy(DGPO, old_rollout_from=old_rollout_from, **SMALL).published_weights()
    assert any(name.startswith("weight_copies.old.") for name in sent) is is_sent
    assert not any(name.startswith("weight_copies.reference.") for name in sent)


def test_generators_make_the_samples_of_a_colocated_run() -> None:
    settings: dict[str, Any] = {"lr": 5e-2, "old_rate": 0.5, "old_cap": 0.9, **SMALL}

    def rewards(strategy: Any, old_rollout_from: int | None) -> list[float]:
        module = DGPO(
            ToyPolicy(), level_reward, group_size=4, num_steps=5, seed=0, old_rollout_from=old_rollout_from, **settings
        )
        return rewards_of_run(module, strategy)

    by_old = rewards("auto", 2)
    assert rewards(DisaggregatedStrategy(2, 2), 2) == pytest.approx(by_old, abs=1e-6)
    by_policy = rewards("auto", None)
    # `old` is the policy after its first update, and behind it after its second: the samples of step 2 differ.
    assert by_policy[:2] == by_old[:2]
    assert abs(by_policy[3] - by_old[3]) > 1e-4


@pytest.mark.parametrize("colocated", [False, True])
def test_a_resumed_run_continues_its_copies_bit_by_bit(tmp_path: Path, colocated: bool) -> None:
    def make() -> DGPO:
        settings: dict[str, Any] = {"old_rate": 0.2, "old_rollout_from": 1, "kl_beta": 0.1, "lr": 1e-2, **SMALL}
        return DGPO(ToyPolicy(), level_reward, group_size=4, num_steps=5, **settings)

    assert_resumes(make, tmp_path, colocated=colocated)


def test_the_divergence_is_to_the_start_also_where_old_is_the_reference() -> None:
    assert sorted(toy(DGPO, reference="old", kl_beta=0.1, **SMALL).weight_copies) == ["old", "reference"]
    assert sorted(toy(DGPO, reference="old", **SMALL).weight_copies) == ["old"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, r"`beta` .* in \(0, inf\), got 0.0"),
        ({"clip_range": 1.0}, "`clip_range` .* got 1.0"),
        ({"kl_beta": -1.0}, "`kl_beta` .* got -1.0"),
        ({"reference": "ema"}, "`reference` must be start or old, got 'ema'"),
        ({"reference_guidance_scale": 0.5}, "`reference_guidance_scale` .* got 0.5"),
        ({"old_rollout_from": -1}, "`old_rollout_from` .* got -1"),
        ({"updates_per_rollout": 2}, "`updates_per_rollout` must be 1 where `old` makes the samples, got 2"),
        ({"old_cap": 1.5}, "`old_cap` .* got 1.5"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DGPO(ToyPolicy(), level_reward, **settings)
