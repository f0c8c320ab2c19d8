"""The mathematics of the losses and advantages: pure functions over tensors, unreduced.

Letters in shapes: B samples, N rows (one row is one sample at one timestep), G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def append_dims(x: Tensor, ndim: int) -> Tensor:
    """View `x` with trailing axes of length 1, so that it broadcasts against a tensor of `ndim` axes.

    Args:
        x: [N] or of any shape with at most `ndim` axes.
        ndim: number of axes of the result.

    Raises:
        ValueError: `x` has more than `ndim` axes.
    """
    if x.ndim > ndim:
        raise ValueError(f"`ndim` must be at least the {x.ndim} axes that `x` has, got {ndim}.")
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def mean_square(x: Tensor) -> Tensor:
    """Average the squares of a row's elements.

    Args:
        x: [N, ...] with at least one axis after the rows.

    Returns:
        [N] in float32, or in float64 if `x` is: half precision would lose the small differences it serves.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.square().flatten(start_dim=1).mean(dim=1)


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    *,
    scope: Literal["group", "batch"] = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    normalize_by_std: bool = True,
) -> Tensor:
    """Compare each reward with those of its group: (r - mean of the group) / (std + eps).

    The mean is always the group's; the std is the group's or the batch's. A group whose rewards are all
    equal, and so a group of one, gets exactly 0, where the rounding of its mean over a small std would give
    noise. Computed in float64. GRPO (arXiv:2402.03300, section 4.1.2), used by Flow-GRPO (arXiv:2505.05470).

    Args:
        rewards: [B].
        group_ids: [B] integers in any order; rows with equal ids form a group.
        scope: whose rewards the std is taken over. The batch's std includes the groups with equal rewards.
        ddof: the std divides by (number of rewards - ddof). Flow-GRPO's code has 0, DanceGRPO's 1.
        eps: added to the std. Flow-GRPO's code has 1e-4, DanceGRPO's 1e-8.
        normalize_by_std: False gives r - mean of the group, whatever the other options are.

    Returns:
        [B] in the type of `rewards`, or in float32 if they are integers.

    Raises:
        ValueError: a reward is not finite, the lengths differ, or an option is outside its range.
    """
    if scope not in ("group", "batch"):
        raise ValueError(f"`scope` is whose std divides and must be 'group' or 'batch', got {scope!r}.")
    if ddof not in (0, 1):
        raise ValueError(f"`ddof` must be 0 (population std) or 1 (sample std), got {ddof}.")
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"`eps` is added to the std and must be in [0, inf), got {eps}.")
    group, is_constant = _groups(rewards, group_ids)
    values = rewards.detach().double()
    group_size = torch.bincount(group, minlength=len(is_constant))  # [G]
    centered = values - (_group_sums(values, group, len(is_constant)) / group_size)[group]
    if not normalize_by_std:
        advantages = centered
    elif scope == "group":
        variance = _group_sums(centered.square(), group, len(is_constant)) / (group_size - ddof).clamp(min=1)
        advantages = centered / (variance.sqrt()[group] + eps)
    else:
        variance = (values - values.mean()).square().sum() / max(len(values) - ddof, 1)
        advantages = centered / (variance.sqrt() + eps)
    advantages = advantages.masked_fill(is_constant[group], 0.0)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def zero_std_groups(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> int:
    """Count the groups whose rewards are all equal: `group_advantages` gives them 0, so they teach nothing.

    Args:
        rewards: [B].
        group_ids: [B] integers in any order; rows with equal ids form a group.

    Raises:
        ValueError: a reward is not finite, or the lengths differ.
    """
    return int(_groups(rewards, group_ids)[1].sum())


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
    if not 0.0 < clip_range < 1.0:
        raise ValueError(f"`clip_range` bounds |ratio - 1| and must be in (0, 1), got {clip_range}.")
    if not advantage_clip > 0.0:
        raise ValueError(
            f"`advantage_clip` bounds |advantage| and must be positive, got {advantage_clip}; use inf for no bound."
        )
    advantages = advantages.clamp(-advantage_clip, advantage_clip)
    ratio = (log_probs - old_log_probs).exp()
    clipped_ratio = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


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


def _groups(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Check what was given and number the groups: (group of each row [B], has it equal rewards [G])."""
    if rewards.ndim != 1:
        raise ValueError(f"`rewards` must have one entry per sample, [B], got shape {tuple(rewards.shape)}.")
    ids = torch.as_tensor(group_ids, device=rewards.device)
    if ids.shape != rewards.shape:
        raise ValueError(
            f"`group_ids` must have one entry per reward, got shape {tuple(ids.shape)} for {len(rewards)} rewards."
        )
    wrong = (~rewards.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"`rewards` must be finite, got {rewards[wrong].tolist()} at indices {wrong}; "
            "a reward that failed has to raise an error instead."
        )
    unique, group = torch.unique(ids, return_inverse=True)
    values, empty = rewards.detach(), rewards.new_zeros(len(unique))
    lowest = empty.scatter_reduce(0, group, values, "amin", include_self=False)
    highest = empty.scatter_reduce(0, group, values, "amax", include_self=False)
    return group, lowest == highest


def _group_sums(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Add the values [B] of each group to [G]."""
    return values.new_zeros(num_groups).index_add(0, group, values)
