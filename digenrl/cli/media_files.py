"""Files of images and videos as a reward gets them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence
from torch import Tensor

from digenrl.cli.errors import UsageError, nearest, one_line

_LARGEST_UINT16 = 65535


def read_image(path: str) -> Tensor:
    """Read an image: [3, H, W] in [0, 1].

    Of any mode: transparent pixels become white, grey ones get three channels, and a photograph is turned upright.

    Raises:
        UsageError: there is no such file, or it is not an image.
    """
    with _opened(path, "--image") as image:
        return _pixels(image, path)


def read_video(path: str) -> Tensor:
    """Read the frames of a folder of images, in the order of their names, or of an animated image: [F, 3, H, W].

    Numbers in names count as numbers: `frame2.png` stands before `frame10.png`.

    Raises:
        UsageError: there is no such folder or file, it holds no images, or they differ in size.
    """
    if Path(path).is_dir():
        files = sorted((file for file in Path(path).iterdir() if _is_image(file)), key=_natural_order)
        frames = [read_image(str(file)) for file in files]
    else:
        with _opened(path, "--video") as image:
            frames = [_pixels(frame, path) for frame in ImageSequence.Iterator(image)]
    if not frames:
        raise UsageError(f"`--video` is `{path}`, a folder without images.")
    sizes = sorted({f"{frame.shape[2]} x {frame.shape[1]}" for frame in frames})
    if len(sizes) > 1:
        raise UsageError(f"`--video` is `{path}`, whose frames must be of one size, got {' and '.join(sizes)}.")
    return torch.stack(frames)


@contextmanager
def _opened(path: str, option: str) -> Iterator[Image.Image]:
    """Open an image; what Pillow cannot read, at once or while it is used, is said in one line."""
    file = Path(path)
    if not file.exists():
        close = nearest(path, [str(entry) for entry in file.parent.glob("*")])
        hint = f"did you mean `{close}`?" if close is not None else f"paths are relative to {Path.cwd()}."
        raise UsageError(f"`{option}`: there is no file `{path}`; {hint}")
    try:
        with Image.open(file) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"`{option}` is `{path}`, which is not an image: {one_line(error).rstrip('.')}.") from error


def _pixels(image: Image.Image, path: str) -> Tensor:
    if image.mode == "F":
        raise UsageError(f"`{path}` holds floats, whose range is not known; save it with 8 or 16 bits.")
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion clips them to 255
        levels = torch.from_numpy(np.asarray(image).astype(np.float32))
        if levels.max() > _LARGEST_UINT16 or levels.min() < 0:
            raise UsageError(f"`{path}` holds integers of more than 16 bits; save it with 8 or 16 bits.")
        return (levels / _LARGEST_UINT16).expand(3, -1, -1)
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    pixels = torch.from_numpy(np.array(upright.convert("RGB")))
    return pixels.permute(2, 0, 1).float() / 255


def _is_image(file: Path) -> bool:
    return file.is_file() and file.suffix.lower() in Image.registered_extensions()


def _natural_order(file: Path) -> list[tuple[int, str]]:
    return list(_numbered(file.name))


def _numbered(name: str) -> Iterator[tuple[int, str]]:
    for digits, text in re.findall(r"(\d+)|(\D+)", name):
        yield (int(digits), "") if digits else (-1, text)
