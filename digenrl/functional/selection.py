"""Which samples of a group are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.functional.groups import number_groups


def best_of_n(scores: Tensor, group_ids: Tensor | Sequence[int], n: int) -> Tensor:
    """Keep the n // 2 lowest and the n - n // 2 highest scores of each group.

    DanceGRPO (arXiv:2505.07818) trains on such a subset of a larger group; its code selects over the whole batch
    of a rank, this per group. A group whose scores are all equal keeps no sample. Equal scores are ordered by
    index. Advantages are those of the whole group: do not normalize them again.

    Args:
        scores: [B].
        group_ids: [B] integers in any order; rows with equal ids form a group.
        n: how many samples of a group to keep, at least 2 and at most the size of the smallest group.

    Returns:
        Indices of the kept samples, int64, ascending.

    Raises:
        ValueError: `n` is outside its range, a score is not finite, or the lengths differ.
    """
    if n < 2:
        raise ValueError(f"`n` must be at least 2, one lowest and one highest sample of a group, got {n}.")
    group, is_constant = number_groups(scores, group_ids, name="scores")
    group_size = torch.bincount(group, minlength=len(is_constant))  # [G]
    if (group_size < n).any():
        raise ValueError(f"`n` must be at most the size of the smallest group, {group_size.min()}, got {n}.")
    order = _order_by_group(scores, group)
    ordered_group = group[order]
    place = torch.arange(len(order), device=order.device) - _starts(group_size)[ordered_group]
    is_low, is_high = place < n // 2, place >= group_size[ordered_group] - (n - n // 2)
    return order[(is_low | is_high) & ~is_constant[ordered_group]].sort().values


def preference_pairs(scores: Tensor, group_ids: Tensor | Sequence[int]) -> Tensor:
    """Pair the best with the worst sample of each group; a group whose scores are all equal has no preference.

    Args:
        scores: [B].
        group_ids: [B] integers in any order; rows with equal ids form a group.

    Returns:
        [P, 2] int64 indices (best, worst), pairs in the order of the group ids; of equal scores the first counts.

    Raises:
        ValueError: a score is not finite, or the lengths differ.
    """
    group, is_constant = number_groups(scores, group_ids, name="scores")
    starts = _starts(torch.bincount(group, minlength=len(is_constant)))[~is_constant]
    best, worst = (_order_by_group(scores, group, descending=descending)[starts] for descending in (True, False))
    return torch.stack([best, worst], dim=1)


def _order_by_group(scores: Tensor, group: Tensor, *, descending: bool = False) -> Tensor:
    """Sort by group, within a group by score and then by index: indices [B]."""
    order = scores.argsort(descending=descending, stable=True)
    return order[group[order].argsort(stable=True)]


def _starts(group_size: Tensor) -> Tensor:
    """Give the place [G] at which each group starts in rows that are sorted by group."""
    return group_size.cumsum(0) - group_size
