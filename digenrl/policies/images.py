"""Image files that prompts name, as a policy's VAE and image encoder take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from digenrl.types import Prompt

_MAX_STRETCH = 1.05
"""By how much an image may be stretched in one direction: the sizes of FLUX Kontext lie about as far apart."""
_MORE_THAN_8_BITS = ("I", "F")  # modes of Pillow
_ORIENTATION, _FIRST_ON_ITS_SIDE = 0x0112, 5  # of EXIF


def image_paths(prompt: Prompt) -> tuple[str, ...]:
    """Give the files under `image` or `images` in a prompt's metadata, none if it has neither."""
    if "image" in prompt.metadata:
        return (prompt.metadata["image"],)
    return tuple(prompt.metadata.get("images", ()))


def check_image(path: str, height: int, width: int, *, crop: bool) -> None:
    """Check by its first bytes that a file is an image of the right shape.

    Args:
        path: of the file.
        height: that it is scaled to.
        width: that it is scaled to.
        crop: whether it may be of any shape.

    Raises:
        ValueError: it is not there, no image of 8 bits a channel, or would be stretched by more than 5 %.
    """
    with _opened(path) as image:
        columns, rows = image.size
        if image.getexif().get(_ORIENTATION, 1) >= _FIRST_ON_ITS_SIDE:
            columns, rows = rows, columns
    stretch = (columns / rows) / (width / height)
    if not crop and max(stretch, 1 / stretch) > _MAX_STRETCH:
        raise ValueError(
            f"image `{path}` is {columns} x {rows} and would be stretched to {width} x {height}: cut it to that shape, "
            "set the policy's sizes, or set `crop_images` to cut its sides off."
        )


def read_image(path: str, height: int, width: int, *, crop: bool) -> Image.Image:
    """Read an image in RGB and upright, in its own resolution; with `crop`, the middle of the shape height : width.

    Raises:
        ValueError: the file is not there, or no image.
    """
    with _opened(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    if not crop:
        return image
    columns = min(image.width, round(image.height * width / height))
    rows = min(image.height, round(image.width * height / width))
    left, top = (image.width - columns) // 2, (image.height - rows) // 2
    return image.crop((left, top, left + columns, top + rows))


def to_pixels(image: Image.Image, height: int, width: int) -> Tensor:
    """Scale an image as pipelines do, and give its pixels, [1, 3, height, width] in [-1, 1]."""
    scaled = image.resize((width, height), Image.Resampling.LANCZOS)
    levels = np.asarray(scaled, dtype=np.float32) / 255
    return 2 * torch.from_numpy(levels).permute(2, 0, 1)[None] - 1


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    """Open an image of 8 bits a channel, and name it in whatever goes wrong with it, as far as it is read inside."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(_MORE_THAN_8_BITS):
                raise ValueError(
                    f"image `{path}` has more than 8 bits a channel ({image.mode}), which would be cut off and not "
                    "scaled: save it with 8."
                )
            yield image
    except FileNotFoundError as error:
        raise ValueError(f"image `{path}` is not there; relative paths begin at {Path.cwd()}.") from error
    except OSError as error:
        raise ValueError(f"`{path}` cannot be read as an image: {error}.") from error
