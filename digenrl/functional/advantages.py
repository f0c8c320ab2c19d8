"""Advantages: how much better a sample is than the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from digenrl.functional.groups import number_groups, sum_per_number


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
    _check_ddof(ddof)
    _check_eps(eps)
    group, is_constant = number_groups(rewards, group_ids, name="rewards")
    values = rewards.detach().double()
    sizes = sum_per_number(torch.ones_like(values), group, len(is_constant))
    advantages = values - (sum_per_number(values, group, len(sizes)) / sizes)[group]
    if normalize_by_std and scope == "group":
        squares = sum_per_number(advantages.square(), group, len(sizes))
        advantages = advantages / ((squares / (sizes - ddof).clamp(min=1)).sqrt() + eps)[group]
    elif normalize_by_std:
        advantages = advantages / (batch_std(values, ddof=ddof) + eps)
    return advantages.masked_fill(is_constant[group], 0.0).to(_floating_type(rewards))


def per_reward_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    *,
    scope: Literal["group", "batch"] = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    normalize_by_std: bool = True,
) -> Tensor:
    """Compute the `group_advantages` of several rewards, each reward compared with its own kind only.

    `weighted_sum` of them is the advantage of MixGRPO's code (arXiv:2507.21802), in which no reward outweighs
    the others by its scale. Where scales are meant to count, take `group_advantages` of the weighted sum of the
    rewards instead.

    Args:
        rewards: [B, R].
        group_ids: see `group_advantages`, as for the other options.
        scope: see there.
        ddof: see there.
        eps: see there.
        normalize_by_std: see there.

    Returns:
        [B, R].

    Raises:
        ValueError: `rewards` has not two axes; and as `group_advantages` does.
    """
    if rewards.ndim != 2:
        raise ValueError(f"`rewards` must be [B, R], one column per reward, got shape {tuple(rewards.shape)}.")
    columns = [
        group_advantages(column, group_ids, scope=scope, ddof=ddof, eps=eps, normalize_by_std=normalize_by_std)
        for column in rewards.unbind(dim=1)
    ]
    return torch.stack(columns, dim=1)


def weighted_sum(values: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    """Add up a sample's rewards, or advantages, with weights that are first scaled to sum to 1.

    Args:
        values: [B, R].
        weights: [R], at least 0 each and above 0 together.

    Returns:
        [B] in the type of `values`, or in float32 if they are integers.

    Raises:
        ValueError: the number of weights differs from R, or the weights are outside their range.
    """
    weights = torch.as_tensor(weights, dtype=torch.float64, device=values.device)
    if values.ndim != 2 or weights.shape != values.shape[1:]:
        raise ValueError(
            f"`weights` must have one entry per column of `values`, [B, R], got shape {tuple(weights.shape)} "
            f"for values of shape {tuple(values.shape)}."
        )
    if not ((weights >= 0).all() and 0 < weights.sum() < torch.inf):
        raise ValueError(f"`weights` must be finite, not negative and not all 0, got {weights.tolist()}.")
    return (values.double() @ (weights / weights.sum())).to(_floating_type(values))


def zero_std_groups(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> int:
    """Count the groups whose rewards are all equal: `group_advantages` gives them 0, so they teach nothing.

    Args:
        rewards: [B].
        group_ids: [B] integers in any order; rows with equal ids form a group.

    Raises:
        ValueError: a reward is not finite, or the lengths differ.
    """
    return int(number_groups(rewards, group_ids, name="rewards")[1].sum())


def batch_std(rewards: Tensor, *, ddof: int = 0) -> float:
    """Compute the std that `group_advantages` with `scope="batch"` divides by, in float64.

    It is known only when the last reward of a step is. A surrogate that is homogeneous in the advantages, as
    `clipped_surrogate` is, need not wait for it: train with r - mean of the group (`normalize_by_std=False`,
    `advantage_clip=math.inf`) as groups arrive, and multiply the gradient by 1 / (std + eps) at the end. That
    gradient is exact if `exceeds_advantage_clip` is False.

    Args:
        rewards: [B] of the whole step, groups with equal rewards included.
        ddof: see `group_advantages`.

    Raises:
        ValueError: `ddof` is outside its range.
    """
    _check_ddof(ddof)
    values = rewards.detach().double()
    return ((values - values.mean()).square().sum() / max(len(values) - ddof, 1)).sqrt().item()


def exceeds_advantage_clip(
    centered_rewards: Tensor, std: float, *, eps: float = 1e-4, advantage_clip: float = 5.0
) -> bool:
    """Tell whether dividing by std + eps would take any advantage beyond the clip.

    If so, a gradient accumulated from unclipped rewards is not the clipped one's multiple; see `batch_std`.

    Args:
        centered_rewards: [B], r - mean of the group.
        std: of the batch.
        eps: see `group_advantages`.
        advantage_clip: see `clamp_advantages`.

    Raises:
        ValueError: `eps` or `advantage_clip` is outside its range.
    """
    _check_eps(eps)
    _check_advantage_clip(advantage_clip)
    return bool((centered_rewards.abs() > advantage_clip * (std + eps)).any())


def clamp_advantages(advantages: Tensor, advantage_clip: float) -> Tensor:
    """Bound advantages [N] by +- `advantage_clip`, so that no single sample dominates; inf leaves them alone.

    Raises:
        ValueError: `advantage_clip` is not positive.
    """
    _check_advantage_clip(advantage_clip)
    return advantages.clamp(-advantage_clip, advantage_clip)


def _floating_type(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.float32


def _check_ddof(ddof: int) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"`ddof` must be 0 (population std) or 1 (sample std), got {ddof}.")


def _check_eps(eps: float) -> None:
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"`eps` is added to the std and must be in [0, inf), got {eps}.")


def _check_advantage_clip(advantage_clip: float) -> None:
    if not advantage_clip > 0.0:
        raise ValueError(
            f"`advantage_clip` bounds |advantage| and must be positive, got {advantage_clip}; use inf for no bound."
        )
