"""Losses of the likelihood ratio between the policy in training and the one that made the samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from digenrl.functional.advantages import clamp_advantages
from digenrl.functional.rows import mean_square


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    advantage_clip: float = 5.0,
) -> Tensor:
    """Compute max(-A r, -A clip(r, 1 - c, 1 + c)) with r = exp(log_probs - old_log_probs), a loss per row.

    The term inside GRPO's objective (arXiv:2402.03300, eq. 3), negated, as Flow-GRPO (arXiv:2505.05470) uses
    it. Our log-probs are means over the D elements of a row, so r is the D-th root of the density ratio, and
    clip ranges are 1e-6 to 1e-3 where language models have 0.2.

    Args:
        log_probs: [N] of the policy in training; the gradient flows through them.
        old_log_probs: [N] of the policy that made the samples.
        advantages: [N].
        clip_range: c, in (0, 1).
        advantage_clip: A is first clamped to +- this value; `math.inf` leaves it alone.

    Returns:
        [N], to be minimized.

    Raises:
        ValueError: `clip_range` or `advantage_clip` is outside its range.
    """
    _check_clip_range(clip_range)
    advantages = clamp_advantages(advantages, advantage_clip)
    ratio = (log_probs - old_log_probs).exp()
    clipped_ratio = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def guard_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """Compute the logarithm of the ratio that `guard_surrogate` clips, [N]; the arguments are explained there."""
    bias = mean_square(mean - old_mean) / (2 * std.square())
    return (log_probs - old_log_probs + bias) * std


def guard_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    next_sigma_minus_sigma: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    advantage_clip: float = 5.0,
) -> Tensor:
    """Compute the clipped surrogate of a ratio that is centred and scaled alike at every step, over dt.

        r = exp((log_probs - old_log_probs + b) std),  b = mean_el((mean - old_mean)^2) / (2 std^2)

    which is exp(mean_el(noise (mean - old_mean))) for the noise that made the sample: b takes back the drop of
    the log-prob that any change of the mean brings, and the factor std its scale, so that the clip range acts on
    both sides and at all sigmas. Division by dt = sigma - next_sigma evens out the gradients of the steps.
    GRPO-Guard (arXiv:2510.22319); b is each row's own, where the published code takes its mean over the batch.
    The steps must be stochastic, with a normal log-prob: Flow-CPS and Euler have none.

    Args:
        log_probs: [N] of the policy in training.
        old_log_probs: [N] of the policy that made the samples.
        mean: [N, ...] of the step under the policy in training; gradients flow through it and `log_probs`.
        old_mean: [N, ...] under the policy that made the samples.
        std: [N] conditional standard deviation of the step, its sqrt(dt) included (`KernelStep.std`).
        next_sigma_minus_sigma: [N] -dt, so negative.
        advantages: [N].
        clip_range: in (0, 1); published ones are 2e-6 and 4e-6.
        advantage_clip: see `clipped_surrogate`.

    Returns:
        [N], to be minimized.

    Raises:
        ValueError: `clip_range` or `advantage_clip` is outside its range.
    """
    log_ratio = guard_log_ratio(log_probs, old_log_probs, mean, old_mean, std)
    surrogate = clipped_surrogate(
        log_ratio, torch.zeros_like(log_ratio), advantages, clip_range=clip_range, advantage_clip=advantage_clip
    )
    return surrogate / -next_sigma_minus_sigma


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_range: float) -> Tensor:
    """Tell which ratios are beyond the clip range on the side to which their advantage pushes them.

    Those are the rows that a clipped loss keeps from moving further.

    Args:
        ratio: [N].
        advantages: [N].
        clip_range: in (0, 1).

    Returns:
        [N] bool.

    Raises:
        ValueError: `clip_range` is outside its range.
    """
    _check_clip_range(clip_range)
    return torch.where(advantages > 0, ratio > 1.0 + clip_range, ratio < 1.0 - clip_range)


def kl_to_reference(
    mean: Tensor,
    reference_mean: Tensor,
    std: Tensor,
    *,
    dt: Tensor | float,
    form: Literal["code", "paper"] = "code",
) -> Tensor:
    """Compute the KL divergence of two steps that share a std, averaged over the elements of a row.

    `"paper"` is the divergence of the two Gaussians, mean_el((mean - reference_mean)^2) / (2 std^2), the KL
    term of Flow-GRPO (arXiv:2505.05470). `"code"` is dt times that: Flow-GRPO's published code divides by the
    noise coefficient without its sqrt(dt), and the published KL weights (0.04 for SD3.5) belong to it.
    The steps must be stochastic: coefficients-preserving steps have no noise at the end of the schedule, and
    their authors take `mean_square(mean - reference_mean)` instead.

    Args:
        mean: [N, ...] of the step under the policy in training.
        reference_mean: [N, ...] under the reference.
        std: [N] conditional standard deviation of the step, its sqrt(dt) included (`KernelStep.std`).
        dt: [N] or one number, sigma - next_sigma > 0; the paper form does not depend on it.
        form: which of the two.

    Returns:
        [N].

    Raises:
        ValueError: `form` is unknown.
    """
    if form not in ("code", "paper"):
        raise ValueError(f"`form` must be 'code' (times dt) or 'paper', got {form!r}.")
    divergence = mean_square(mean - reference_mean) / (2 * std.square())
    return divergence * dt if form == "code" else divergence


def _check_clip_range(clip_range: float) -> None:
    if not 0.0 < clip_range < 1.0:
        raise ValueError(f"`clip_range` bounds |ratio - 1| and must be in (0, 1), got {clip_range}.")
