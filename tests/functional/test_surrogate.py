"""Losses of the likelihood ratio, compared with published implementations and with numbers worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from digenrl.diffusion import FlowCPS, FlowSDE
from digenrl.functional import (
    append_dims,
    clipped_surrogate,
    guard_surrogate,
    is_clipped,
    kl_to_reference,
    mean_square,
)
from tests.functional.golden import DTYPES, assert_gradient, assert_value, load, tensors


def test_clipped_surrogate_equals_numbers_worked_out_by_hand():
    log_ratio = torch.tensor([5e-5, 3e-4, -3e-4, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.5, 10.0], dtype=torch.float64)
    old = torch.tensor([-3.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    loss = clipped_surrogate(old + log_ratio, old, advantages, clip_range=1e-4)
    expected = [-math.exp(5e-5), -2 * (1 + 1e-4), 1.5 * (1 - 1e-4), -5.0]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert loss.mean().item() == pytest.approx(-1.6251, abs=2e-6)
    unclamped = clipped_surrogate(old + log_ratio, old, advantages, clip_range=1e-4, advantage_clip=math.inf)
    assert unclamped[3].item() == -10.0


def test_clipping_stops_only_gradients_that_would_move_the_ratio_further_out():
    old = torch.zeros(6, dtype=torch.float64)
    log_probs = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    clipped_surrogate(log_probs, old, advantages, clip_range=0.2).sum().backward()
    expected = [0.0, -2 * math.exp(-0.3), 2 * math.exp(0.3), 0.0, -2.0, 2.0]
    assert log_probs.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_range": 0.0}, "`clip_range` .* got 0.0"),
        ({"clip_range": 1.0}, "`clip_range` .* got 1.0"),
        ({"clip_range": 0.1, "advantage_clip": 0.0}, "`advantage_clip` .* got 0.0"),
    ],
)
def test_surrogate_option_outside_its_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(torch.zeros(1), torch.zeros(1), torch.zeros(1), **options)


def test_kl_equals_numbers_worked_out_by_hand():
    # mean_el(drift^2) is 0.04 in both rows: 0.04 / (2 * 0.5^2) and 0.04 / (2 * 1^2).
    mean = torch.tensor([[0.2, 0.2], [1.2, 1.2]], dtype=torch.float64)
    reference = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    coefficient, dt = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0.25, 0.04]).double()
    std = coefficient * dt.sqrt()
    code = kl_to_reference(mean, reference, std, dt=dt, form="code")
    assert code.tolist() == pytest.approx([0.08, 0.02])
    assert code.mean().item() == pytest.approx(0.05)
    paper = kl_to_reference(mean, reference, std, dt=dt, form="paper")
    assert paper.tolist() == pytest.approx([0.08 / 0.25, 0.02 / 0.04])
    assert torch.equal(kl_to_reference(mean, reference, std, dt=dt), code)
    with pytest.raises(ValueError, match="`form` .* got 'exact'"):
        kl_to_reference(mean, reference, std, dt=dt, form="exact")


def test_paper_kl_is_the_divergence_of_the_two_steps():
    latents, velocity, reference_velocity = torch.randn(3, 2, 5, dtype=torch.float64)
    sigma, next_sigma = torch.tensor([0.8, 0.5]).double(), torch.tensor([0.6, 0.1]).double()
    step, reference = (
        FlowSDE(0.7).step(latents, v, sigma, next_sigma, sigma_max=0.9) for v in (velocity, reference_velocity)
    )
    dt = sigma - next_sigma
    kl = kl_to_reference(step.mean, reference.mean, step.std, dt=dt, form="paper")
    normals = [torch.distributions.Normal(s.mean, append_dims(s.std, 2)) for s in (step, reference)]
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(*normals).mean(dim=1))
    # The closed form in velocities.
    coefficient = step.std / dt.sqrt()
    factor = dt / 2 * (coefficient * (1 - sigma) / (2 * sigma) + 1 / coefficient) ** 2
    torch.testing.assert_close(kl, factor * mean_square(velocity - reference_velocity))


def stored_steps(golden, case, kernel, index, shape, dtype):
    """The steps of a stored loss under its three velocities, all scored at the stored next latents."""
    keys = ("sample", "v_old", "v_ref", "v_new", "noise", f"{case}.prev")
    sample, v_old, v_ref, v_new, noise, prev = (x.reshape(6, *shape) for x in tensors(golden, *keys, dtype=dtype))
    sigmas, advantages = tensors(golden, "sigmas", "advantages", dtype=dtype)
    place = {"sigma": sigmas[index], "next_sigma": sigmas[index + 1], "sigma_max": sigmas[1]}
    velocity = v_new.requires_grad_()
    old, new, reference = (kernel.step(sample, v, **place, next_latents=prev) for v in (v_old, velocity, v_ref))
    rollout = kernel.step(sample, v_old, **place, noise=noise)
    dt = (sigmas[index] - sigmas[index + 1]).expand(6)
    return SimpleNamespace(
        old=old, new=new, reference=reference, rollout=rollout, velocity=velocity, advantages=advantages, dt=dt
    )


# Of each stored loss: kernel, step, clip range, weight of the KL, shape of a row.
LOSSES = {
    "sd3_step0_kl": (FlowSDE(0.7), 0, 1e-4, 0.04, (3, 4, 4)),
    "sd3_step1_kl": (FlowSDE(0.7), 1, 1e-4, 0.04, (3, 4, 4)),
    "sd3_step5_nokl": (FlowSDE(0.7), 5, 1e-4, 0.0, (3, 4, 4)),
    "sd3_step8_wideclip": (FlowSDE(0.7), 8, 0.2, 0.04, (3, 4, 4)),
    "packed_step3_kl": (FlowSDE(0.9), 3, 1e-3, 0.004, (12, 4)),
    "cps_step2": (FlowCPS(0.8), 2, 1e-5, 0.0, (3, 4, 4)),
}


@DTYPES
@pytest.mark.parametrize("case", LOSSES)
def test_rollout_and_ratio_equal_flowgrpos(case, dtype):
    golden = load("flowgrpo_loss")
    kernel, index, _, _, shape = LOSSES[case]
    steps = stored_steps(golden, case, kernel, index, shape, dtype)
    assert_value(steps.rollout.next_latents, golden[f"{case}.prev"].reshape(6, *shape), 2e-5)
    assert_value(steps.rollout.log_prob, golden[f"{case}.old_logp"], 5e-4)
    ratio = (steps.new.log_prob - steps.old.log_prob).exp()
    assert_value(ratio, golden[f"{case}.ratio"], 2e-6 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize(
    ("dtype", "loss_bound", "kl_bound", "gradient_bound"),
    [(torch.float64, 2e-5, 1e-4, 1e-5), (torch.float32, 1e-4, 1e-3, 1e-4)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_equal_flowgrpos(case, dtype, loss_bound, kl_bound, gradient_bound):
    golden = load("flowgrpo_loss")
    kernel, index, clip_range, kl_weight, shape = LOSSES[case]
    steps = stored_steps(golden, case, kernel, index, shape, dtype)
    rows = clipped_surrogate(steps.new.log_prob, steps.old.log_prob, steps.advantages, clip_range=clip_range)
    assert rows.dtype == dtype
    assert_value(rows.mean(), golden[f"{case}.policy_loss"], loss_bound)
    loss = rows.mean()
    if kl_weight:
        kl = kl_to_reference(steps.new.mean, steps.reference.mean, steps.new.std, dt=steps.dt).mean()
        assert kl.item() == pytest.approx(golden[f"{case}.kl_loss"].item(), rel=kl_bound)
        loss = loss + kl_weight * kl
    assert_value(loss, golden[f"{case}.loss"], loss_bound)
    loss.backward()
    assert_gradient(steps.velocity.grad, golden[f"{case}.grad_v"], gradient_bound)


# Of each stored loss: step, clip range, weight of the KL.
GUARD_LOSSES = {
    "step0_kl": (0, 2e-6, 0.04),
    "step1": (1, 2e-6, 0.0),
    "step5": (5, 2e-6, 0.0),
    "step5_wideclip": (5, 0.2, 0.0),
    "step8": (8, 4e-6, 0.0),
}


def guard_rows(steps, *, clip_range):
    return guard_surrogate(
        steps.new.log_prob,
        steps.old.log_prob,
        steps.new.mean,
        steps.old.mean,
        steps.new.std,
        -steps.dt,
        steps.advantages,
        clip_range=clip_range,
    )


@pytest.mark.parametrize(
    ("dtype", "loss_bound", "gradient_bound"),
    [(torch.float64, 1e-5, 1e-5), (torch.float32, 1e-4, 1e-4)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize("case", GUARD_LOSSES)
def test_loss_and_gradient_equal_grpo_guards(case, dtype, loss_bound, gradient_bound):
    golden = load("grpo_guard_loss")
    index, clip_range, kl_weight = GUARD_LOSSES[case]
    steps = stored_steps(golden, case, FlowSDE(0.7), index, (3, 4, 4), dtype)
    rows = guard_rows(steps, clip_range=clip_range)
    assert rows.dtype == dtype
    assert_value(rows.mean(), golden[f"fixed.{case}.policy_loss"], loss_bound)
    kl = kl_to_reference(steps.new.mean, steps.reference.mean, steps.new.std, dt=steps.dt)
    loss = (rows + kl_weight * kl).mean()
    assert_value(loss, golden[f"fixed.{case}.loss"], loss_bound)
    loss.backward()
    expected = golden[f"fixed.{case}.grad_v"]
    assert_gradient(steps.velocity.grad, expected, gradient_bound)
    # One by one too: clipped samples have the gradient of the KL only, 1e-7 of the others' in size, or none.
    for row in range(6):
        assert_gradient(steps.velocity.grad[row], expected[row], 1e-4)


@pytest.mark.parametrize("case", GUARD_LOSSES)
def test_ratio_of_grpo_guard_equals_the_stored_one(case):
    golden = load("grpo_guard_loss")
    index, _, _ = GUARD_LOSSES[case]
    steps = stored_steps(golden, case, FlowSDE(0.7), index, (3, 4, 4), torch.float64)
    # With A = -1 and a clip range that no ratio leaves, a row is its ratio over dt.
    steps.advantages = torch.full((6,), -1.0, dtype=torch.float64)
    ratio = guard_rows(steps, clip_range=0.5) * steps.dt
    assert_value(ratio, golden[f"fixed.{case}.ratio"], 5e-7)


def test_ratio_of_grpo_guard_is_the_exponential_of_noise_times_drift():
    latents, v_old, v_new, noise = torch.randn(4, 3, 2, 5, dtype=torch.float64)
    sigma, next_sigma = torch.tensor([1.0, 0.8, 0.3]).double(), torch.tensor([0.9, 0.5, 0.2]).double()
    place = {"sigma": sigma, "next_sigma": next_sigma, "sigma_max": 0.9}
    old = FlowSDE(0.7).step(latents, v_old, **place, noise=noise)
    new = FlowSDE(0.7).step(latents, v_new, **place, next_latents=old.next_latents)
    steps = SimpleNamespace(old=old, new=new, dt=sigma - next_sigma, advantages=-torch.ones(3, dtype=torch.float64))
    expected = (noise * (new.mean - old.mean)).flatten(1).mean(1).exp()
    torch.testing.assert_close(guard_rows(steps, clip_range=0.999) * steps.dt, expected.clamp(min=0.001))


def test_guard_surrogate_equals_numbers_worked_out_by_hand():
    log_ratio = torch.tensor([5e-5, 3e-4, -3e-4, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.5, 10.0], dtype=torch.float64)
    mean, zero = torch.full((4, 2), 1e-2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    std, minus_dt = torch.full((4,), 0.5 * 0.3, dtype=torch.float64), torch.full((4,), -0.09, dtype=torch.float64)
    loss = guard_surrogate(log_ratio, zero[:, 0], mean, zero, std, minus_dt, advantages, clip_range=2e-6)
    # b = 1e-4 / (2 * 0.15^2) = 1 / 450 outweighs the log-ratios, so all ratios are above 1 + 2e-6.
    unclipped = 1.5 * math.exp((-3e-4 + 1 / 450) * 0.15)
    expected = [-(1 + 2e-6), -2 * (1 + 2e-6), unclipped, -5 * (1 + 2e-6)]
    assert loss.tolist() == pytest.approx([row / 0.09 for row in expected], abs=1e-9)
    assert loss.mean().item() == pytest.approx(-18.0543984, abs=2e-6)


def test_guard_surrogate_of_a_row_does_not_depend_on_other_rows():
    golden = load("grpo_guard_loss")
    steps = stored_steps(golden, "step5", FlowSDE(0.7), 5, (3, 4, 4), torch.float64)
    rows = guard_rows(steps, clip_range=2e-6)
    for row in range(6):
        one = [
            value[row : row + 1]
            for value in (
                steps.new.log_prob,
                steps.old.log_prob,
                steps.new.mean,
                steps.old.mean,
                steps.new.std,
                -steps.dt,
                steps.advantages,
            )
        ]
        torch.testing.assert_close(guard_surrogate(*one, clip_range=2e-6), rows[row : row + 1], rtol=1e-12, atol=0)


def test_ratio_is_clipped_on_the_side_of_its_advantage_only():
    ratio = torch.tensor([1.3, 1.3, 1.3, 0.7, 0.7, 0.7, 1.1, 0.9])
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0])
    expected = [True, False, False, False, True, True, False, False]
    assert is_clipped(ratio, advantages, clip_range=0.2).tolist() == expected


def test_clipped_rows_are_those_without_gradient():
    log_ratio = 0.3 * torch.randn(200, dtype=torch.float64)
    log_ratio.requires_grad_()
    advantages = torch.randn(200, dtype=torch.float64)
    clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, clip_range=0.2).sum().backward()
    clipped = is_clipped(log_ratio.exp(), advantages, clip_range=0.2)
    assert torch.equal(clipped, log_ratio.grad == 0)
    assert 0 < clipped.sum() < 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_range": 0.0}, "`clip_range` .* got 0.0"),
        ({"clip_range": 1.0}, "`clip_range` .* got 1.0"),
        ({"clip_range": 0.1, "advantage_clip": 0.0}, "`advantage_clip` .* got 0.0"),
    ],
)
def test_guard_option_outside_its_range_is_refused(options, message):
    row, element = torch.ones(1), torch.ones(1, 1)
    with pytest.raises(ValueError, match=message):
        guard_surrogate(row, row, element, element, row, -row, row, **options)


def test_clip_range_of_is_clipped_is_checked():
    with pytest.raises(ValueError, match="`clip_range` .* got -0.1"):
        is_clipped(torch.ones(1), torch.ones(1), clip_range=-0.1)
