"""Media become bytes by one rule, and what is no image in [0, 1] is refused instead of clamped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.rewards.images import to_pil, to_uint8


def test_every_level_comes_back_and_what_lies_between_goes_to_the_nearest() -> None:
    levels = torch.arange(256).float()
    for offset in (-0.49, 0.0, 0.49):
        images = ((levels + offset) / 255).clamp(0, 1).reshape(1, 1, 16, 16)
        assert np.array_equal(to_uint8(images)[0, :, :, 0].ravel(), np.arange(256))


def test_channels_come_last_in_the_order_red_green_blue() -> None:
    images = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    pixels = to_uint8(images)
    assert pixels.shape == (2, 4, 5, 3)
    assert pixels.flags.c_contiguous
    assert pixels[1, 2, 3].tolist() == [round(float(images[1, channel, 2, 3]) * 255) for channel in range(3)]


def test_one_channel_is_repeated() -> None:
    images = torch.rand(2, 1, 4, 5)
    assert np.array_equal(to_uint8(images), to_uint8(images.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_policy_may_decode_in_any_precision(dtype: torch.dtype) -> None:
    images = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=dtype, requires_grad=True).reshape(1, 1, 2, 2)
    assert to_uint8(images)[0, :, :, 0].ravel().tolist() == [0, 64, 128, 255]


def test_images_of_pillow_have_the_same_pixels() -> None:
    images = torch.rand(2, 3, 4, 5)
    assert [image.size for image in to_pil(images)] == [(5, 4)] * 2
    assert np.array_equal(np.stack([np.asarray(image) for image in to_pil(images)]), to_uint8(images))


def test_less_than_half_a_level_outside_is_rounding() -> None:
    assert to_uint8(torch.tensor([-0.001, 1.001]).reshape(2, 1, 1, 1)).ravel().tolist() == [0] * 3 + [255] * 3


@pytest.mark.parametrize("bad", [-0.003, 1.003, 255.0, float("nan"), float("inf")])
def test_a_value_outside_is_an_error_that_names_the_image(bad: float) -> None:
    images = torch.full((4, 3, 2, 2), 0.5)
    images[2, 1, 0, 1] = bad
    with pytest.raises(ValueError, match=r"must be in \[0, 1\], got values from .* in image 2 of 4; let .* `decode`"):
        to_uint8(images)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 2, 2), r"\[N, C, H, W\].*got shape \[3, 2, 2\]"),
        (torch.zeros(1, 4, 2, 2), r"1 or 3 channels, got shape \[1, 4, 2, 2\]"),
        (torch.zeros(1, 2, 3, 2, 2), "got shape"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.uint8), "floats in .*got torch.uint8"),
    ],
)
def test_what_is_no_batch_of_images_is_refused(images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_uint8(images)
