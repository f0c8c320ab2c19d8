"""What the rows of a group have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

GroupReduction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Reduces values [N] over the rows with equal group index [N] and gives each row its group's result, [N].

`sum_per_group` and `mean_per_group` do it over the rows they are given. Where groups are spread over ranks, the
caller passes one that includes the rows of the other ranks.
"""


def sum_per_group(values: Tensor, group_index: Tensor) -> Tensor:
    """Give each row the sum over its group.

    Args:
        values: [N].
        group_index: [N] integers in any order; rows with equal index form a group.

    Returns:
        [N].
    """
    unique, group = torch.unique(group_index, return_inverse=True)
    return sum_per_number(values, group, len(unique))[group]


def sum_per_number(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Sum values [N] over groups that are numbered already; returns [G].

    Args:
        values: [N].
        group: [N] from 0 to G - 1.
        num_groups: G.
    """
    return values.new_zeros(num_groups).index_add_(0, group, values)


def mean_per_group(values: Tensor, group_index: Tensor) -> Tensor:
    """Give each row the mean over its group.

    Args:
        values: [N].
        group_index: [N] integers in any order; rows with equal index form a group.

    Returns:
        [N].
    """
    return sum_per_group(values, group_index) / sum_per_group(torch.ones_like(values), group_index)


def rows_of_whole_groups(is_good: Tensor, group_ids: Tensor) -> Tensor:
    """Say which rows belong to groups all of whose rows are good.

    Args:
        is_good: [N] bool.
        group_ids: [N] integers in any order.

    Returns:
        [N] bool.
    """
    return is_good if is_good.all() else ~torch.isin(group_ids, group_ids[~is_good])


def number_groups(values: Tensor, group_ids: Tensor | Sequence[int], *, name: str) -> tuple[Tensor, Tensor]:
    """Check values and ids that a user gave, and number the groups in the order of their ids.

    Args:
        values: [B], called `name` in messages.
        group_ids: [B] integers in any order.
        name: what the caller calls the values.

    Returns:
        The number of each row's group [B], and whether all values of a group are equal [G].

    Raises:
        ValueError: a value is not finite, or the lengths differ.
    """
    if values.ndim != 1:
        raise ValueError(f"`{name}` must have one entry per sample, [B], got shape {tuple(values.shape)}.")
    ids = torch.as_tensor(group_ids, device=values.device)
    if ids.shape != values.shape:
        raise ValueError(
            f"`group_ids` must have one entry per sample, got shape {tuple(ids.shape)} for {len(values)} {name}."
        )
    is_finite = values.isfinite()
    if not is_finite.all():
        wrong = (~is_finite).nonzero().flatten().tolist()
        raise ValueError(
            f"`{name}` must be finite, got {values[wrong].tolist()} at indices {wrong}; "
            "a reward that failed has to raise an error instead."
        )
    unique, group = torch.unique(ids, return_inverse=True)
    values, empty = values.detach(), values.new_zeros(len(unique))
    lowest = empty.scatter_reduce(0, group, values, "amin", include_self=False)
    highest = empty.scatter_reduce(0, group, values, "amax", include_self=False)
    return group, lowest == highest
