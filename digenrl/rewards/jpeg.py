"""Rewards by how well an image compresses: they need no model, and show in minutes whether training works."""

from __future__ import annotations

from io import BytesIO
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards.cpu import CPUReward
from digenrl.rewards.images import to_pil
from digenrl.types import PromptBatch


def jpeg_kilobytes(image: Image.Image, quality: int) -> float:
    """Encode an image with Pillow's defaults, 4:2:0 chroma among them, and measure it in units of 1000 bytes."""
    with BytesIO() as file:
        image.save(file, format="JPEG", quality=quality)
        return file.tell() / 1000


class _JpegReward(CPUReward):
    """Judges images by the size of their JPEG, times `sign`."""

    needs = "nothing"
    sign: ClassVar[float]

    def __init__(self, *, quality: int = 95, **settings: Any) -> None:
        """Set how images are encoded.

        Args:
            quality: of the JPEG, 1 to 100; 95 is DDPO's.
            settings: `frames`, `num_frames` and `batch_size` of `FrameReward`.

        Raises:
            ValueError: an argument outside its bounds.
        """
        super().__init__(**settings)
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 100:
            raise ValueError(f"`quality` must be an integer from 1 to 100, got {quality!r}.")
        self.quality = quality

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Measure N images, [N, C, H, W] in [0, 1], each value rounded to the nearest of 256 levels: [N]."""
        return self.sign * torch.tensor([jpeg_kilobytes(image, self.quality) for image in to_pil(images)])


class JpegCompressibility(_JpegReward):
    """Wants images that compress well: minus the size of the JPEG in kB (of 1000 bytes).

    DDPO (Black et al., 2023, https://arxiv.org/abs/2305.13301), section 5.2. flow_grpo divides it by 500, which no
    group-normalized advantage sees.
    """

    sign = -1.0


class JpegIncompressibility(_JpegReward):
    """Wants images that compress badly: the size of the JPEG in kB (of 1000 bytes), as in DDPO."""

    sign = 1.0
