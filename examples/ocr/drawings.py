"""Images of two digits, drawn with fonts that come with matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TEXTS = tuple(f"{number:02d}" for number in range(100))
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif")
FONT_SIZE = 14
OFFSETS = (-1, 0, 1)
"""Pixels to the right of the middle."""
HEIGHT, WIDTH = 16, 32


def draw_all() -> tuple[Tensor, list[str]]:
    """Draw each text with each font at each offset.

    Returns:
        images [1200, 1, 16, 32] in [0, 1], black on white, and the text in each.
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images, texts = [], []
    for name in FONTS:
        font = ImageFont.truetype(folder / f"{name}.ttf", FONT_SIZE)
        for text in TEXTS:
            for offset in OFFSETS:
                images.append(draw(text, font, offset))
                texts.append(text)
    return torch.from_numpy(np.stack(images))[:, None], texts


def draw(text: str, font: ImageFont.FreeTypeFont, offset: int) -> NDArray[np.float32]:
    """Draw a text `offset` pixels to the right of the middle: [16, 32] in [0, 1], black on white."""
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    canvas = ImageDraw.Draw(image)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    # Whole pixels: at a fraction of one, Pillow cuts the topmost line of the digits off.
    x, y = round((WIDTH - left - right) / 2), round((HEIGHT - top - bottom) / 2)
    canvas.text((x + offset, y), text, font=font, fill=0)
    return np.asarray(image, dtype=np.float32) / 255
