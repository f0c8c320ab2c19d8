"""Between a value per row and the elements of a row."""

from __future__ import annotations

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
