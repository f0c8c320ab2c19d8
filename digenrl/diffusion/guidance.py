"""Guidance: the velocity that points further away from the unconditional one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def classifier_free_guidance(
    conditional: Tensor,
    unconditional: Tensor,
    scale: float | Tensor,
    *,
    rescale: Literal["none", "norm"] = "none",
    detach_unconditional: bool = False,
) -> Tensor:
    """Combine two velocities to unconditional + scale (conditional - unconditional).

    Classifier-free guidance (arXiv:2207.12598, eq. 6, with scale = 1 + w). Scale 1 is the conditional velocity.

    Args:
        conditional: [N, ...] velocity given the prompt.
        unconditional: [N, ...] velocity given the empty or the negative prompt.
        scale: how far to go, a number or one that broadcasts over the velocities; published runs have 1 to 5.
        rescale: `"norm"` gives each vector along the last axis the norm of the conditional one, as Qwen-Image
            does; a vector that is 0 stays 0.
        detach_unconditional: whether to send no gradient into the unconditional velocity, as DGPO's code does
            (arXiv:2510.08425).

    Returns:
        [N, ...].

    Raises:
        ValueError: `rescale` is unknown.
    """
    if rescale not in ("none", "norm"):
        raise ValueError(f"`rescale` must be 'none' or 'norm', got {rescale!r}.")
    if detach_unconditional:
        unconditional = unconditional.detach()
    guided = unconditional + scale * (conditional - unconditional)
    if rescale == "none":
        return guided
    norm: Tensor = torch.linalg.vector_norm(guided, dim=-1, keepdim=True)
    conditional_norm: Tensor = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
    return guided * (conditional_norm / norm.clamp(min=torch.finfo(norm.dtype).tiny))
