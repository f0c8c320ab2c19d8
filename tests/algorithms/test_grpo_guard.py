"""GRPO-Guard against its published losses, and what it asks of rollouts and kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from digenrl.algorithms import GRPOGuard
from digenrl.types import RowLosses, ScoredBatch
from tests.algorithms.stored import StoredVelocity, no_reward, stored_batch
from tests.algorithms.test_flow_grpo import assert_close, stored_rollout
from tests.algorithms.toy_rows import total_loss
from tests.functional.golden import assert_gradient, assert_value, load, tensors
from tests.toy import WORDS, ToyPolicy, level_reward

# Of each stored loss: step and settings.
LOSSES: dict[str, tuple[int, dict[str, Any]]] = {
    "step0_kl": (0, {"kl_beta": 0.04}),
    "step1": (1, {}),
    "step5": (5, {}),
    "step5_wideclip": (5, {"clip_range": 0.2}),
    "step8": (8, {"clip_range": 4e-6}),
}


def stored_module(golden: Any, dtype: torch.dtype, **settings: Any) -> GRPOGuard:
    velocity, reference = tensors(golden, "v_new", "v_ref", dtype=dtype)
    module = GRPOGuard(StoredVelocity(velocity), no_reward, **settings)
    module.configure_model()
    if module.kl_beta > 0:
        module.policy_copy("reference").weights.value.copy_(reference)
    return module


@pytest.mark.parametrize(
    ("dtype", "loss_bound", "gradient_bound"),
    [(torch.float64, 1e-5, 1e-5), (torch.float32, 1e-4, 1e-4)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_equal_the_published_ones(
    case: str, dtype: torch.dtype, loss_bound: float, gradient_bound: float
) -> None:
    golden = load("grpo_guard_loss")
    step, settings = LOSSES[case]
    module = stored_module(golden, dtype, **settings)
    batch = stored_batch(golden, case, kernel=module.kernel, step=step, dtype=dtype, shape=(3, 4, 4))
    losses = module.timestep_loss(batch)
    policy_loss = losses.policy if isinstance(losses, RowLosses) else losses
    assert_value(policy_loss.mean(), golden[f"fixed.{case}.policy_loss"], loss_bound)
    loss = total_loss(losses) / 6
    assert_value(loss, golden[f"fixed.{case}.loss"], loss_bound)
    loss.backward()
    expected = golden[f"fixed.{case}.grad_v"]
    assert_gradient(module.policy.value.grad, expected, gradient_bound)
    # One by one too: clipped samples have the gradient of the KL only, or none.
    for row in range(6):
        assert_gradient(module.policy.value.grad[row], expected[row], 1e-4)


def test_the_reported_ratios_are_the_published_ones() -> None:
    golden = load("grpo_guard_loss")
    module = stored_module(golden, torch.float64, clip_range=2e-6)
    batch = stored_batch(golden, "step5", kernel=module.kernel, step=5, dtype=torch.float64, shape=(3, 4, 4))
    module.timestep_loss(batch)
    metrics = module.take_metrics()
    deviation = abs(torch.from_numpy(golden["fixed.step5.ratio"]).double() - 1)
    assert metrics["ratio/max_abs_dev"].value == pytest.approx(deviation.max().item(), abs=5e-7)
    assert metrics["ratio/clip_frac"].value == pytest.approx((deviation > 2e-6).double().mean().item())


def test_a_rollout_keeps_the_published_means(monkeypatch: pytest.MonkeyPatch) -> None:
    case, settings = "full_sde_cfg4.5_N10", {"timestep_fraction": 1.0, "guidance_scale": 4.5}
    golden, trajectory = stored_rollout(GRPOGuard, case, settings, range(10), monkeypatch)
    assert_close(trajectory.latents, golden[f"{case}.all_latents"], 2e-5)
    assert_close(trajectory.old_means, golden[f"{case}.means"], 2e-5)


def small_batch(**settings: Any) -> tuple[GRPOGuard, Any]:
    defaults = {"group_size": 4, "num_steps": 5, "timestep_fraction": 0.8, "seed": 0}
    module = GRPOGuard(ToyPolicy(), level_reward, **{**defaults, **settings})
    module.configure_model()
    prompts = module.prompt_batch(WORDS)
    trajectory = module.rollout(prompts)
    rewards = module.score(trajectory)
    advantages = module.advantages(rewards, torch.tensor(prompts.group_ids))
    scored = ScoredBatch.of_groups(trajectory, rewards, advantages)
    return module, scored.timestep_batch(module.select_timesteps(prompts))


@pytest.mark.parametrize(
    "settings", [{}, {"kernel": "dance"}, {"sde_window": 2, "sde_window_range": (1, 4), "timestep_fraction": None}]
)
def test_the_policy_that_made_the_samples_has_ratio_1_at_every_step(settings: dict[str, Any]) -> None:
    module, batch = small_batch(**settings)
    losses = module.timestep_loss(batch)
    expected = -batch.advantages / (batch.sigma - batch.next_sigma)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    assert module.take_metrics()["ratio/max_abs_dev"].value <= 1e-6


def test_the_means_that_ratios_are_centred_at_are_the_rollouts() -> None:
    module, batch = small_batch(clip_range=0.5)
    moved = replace(batch, old_means=batch.old_means + 0.1)
    # b = 0.1^2 / (2 std^2), so that the ratio is exp(b std).
    std = module.score_step(batch).std
    expected = -batch.advantages * (0.005 / std).exp() / (batch.sigma - batch.next_sigma)
    torch.testing.assert_close(module.timestep_loss(moved), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"noise_level": 0.8}, {"timestep_fraction": 1.0}, {"noise_level": 2.0}])
def test_cps_is_refused_first_with_the_reason_and_the_remedy(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`kernel` must be flow, dance or wan with GRPOGuard, got cps.*take FlowGRPO"):
        GRPOGuard(ToyPolicy(), level_reward, kernel="cps", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_level": 0.0}, "`noise_level` must be above 0, got 0.0"),
        ({"kernel": "euler"}, "`kernel` must be one of .* got 'euler'"),
        ({"clip_range": 0.0}, "`clip_range` .* got 0.0"),
        ({"kl_beta": -0.1}, "`kl_beta` .* got -0.1"),
    ],
)
def test_settings_outside_their_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOGuard(ToyPolicy(), level_reward, **settings)
