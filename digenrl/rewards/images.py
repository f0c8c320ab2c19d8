"""Media as the bytes that models, encoders and servers of images take."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


def to_uint8(images: Tensor) -> NDArray[np.uint8]:
    """Round images to bytes: value v becomes the level nearest to 255 v, a half the even one.

    Args:
        images: [N, C, H, W] floats in [0, 1], C being 1 or 3, on any device. One channel is repeated to three.

    Returns:
        [N, H, W, 3] in RGB, contiguous, on the CPU.

    Raises:
        ValueError: images of another shape or type, or a value whose nearest level is not one of 0 to 255. Such values
            are not clamped: they say that a policy's `decode` gives another range than rewards are promised.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"`images` must be [N, C, H, W] with 1 or 3 channels, got shape {list(images.shape)}.")
    if not images.is_floating_point():
        raise ValueError(f"`images` must be floats in [0, 1], got {images.dtype}.")
    levels = (images.detach().float() * 255).round()
    inside = ((levels >= 0) & (levels <= 255)).flatten(1).all(dim=1)  # false for nan
    if not inside.all():
        first = int(inside.logical_not().nonzero()[0])
        low, high = images[first].float().aminmax()
        raise ValueError(
            f"`images` must be in [0, 1], got values from {low:.4g} to {high:.4g} in image {first} of {len(images)}; "
            "let the policy's `decode` map or clamp them."
        )
    pixels = levels.to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return pixels.contiguous().cpu().numpy()


def to_pil(images: Tensor) -> list[Image.Image]:
    """Give N images, [N, C, H, W] in [0, 1], as RGB images of Pillow; rounding and errors are those of `to_uint8`."""
    return [Image.fromarray(pixels) for pixels in to_uint8(images)]
