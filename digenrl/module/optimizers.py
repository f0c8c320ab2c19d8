"""The optimizers that a setting can name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

import torch

OptimizerName: TypeAlias = Literal["adamw", "fused_adamw", "adamw_8bit"]


def check_optimizer(name: str) -> None:
    """Check that an optimizer is one of ours, and its package here.

    Raises:
        ValueError: it is not.
    """
    if name not in get_args(OptimizerName):
        raise ValueError(f"`optimizer` must be one of {', '.join(get_args(OptimizerName))}, got {name!r}.")
    if name == "adamw_8bit":
        try:
            import torchao.optim  # noqa: F401 (its import also lets checkpoints with its tensors be read)
        except ImportError as error:
            raise ValueError(f"`optimizer` adamw_8bit is torchao's ({error}): pip install torchao") from error


def make_optimizer(
    name: OptimizerName, parameters: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Make an optimizer over parameters, which may be on the meta device."""
    if name == "adamw_8bit":
        from torchao.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=lr, weight_decay=weight_decay)
        return optimizer
    fused = True if name == "fused_adamw" else None
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused)
