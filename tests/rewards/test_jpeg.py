"""Rewards by the size of the JPEG, against files that Pillow writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards import compute_rewards
from digenrl.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from digenrl.types import Prompt, PromptBatch


def prompts(num_rows: int) -> PromptBatch:
    return PromptBatch.for_validation([Prompt("a cat", uid) for uid in range(num_rows)], seed=0)


def media(num_rows: int = 5) -> Tensor:
    noise = torch.rand(num_rows, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    return noise * torch.linspace(0, 1, num_rows)[:, None, None, None]  # the first is black


@pytest.mark.parametrize("quality", [95, 20])
def test_the_reward_is_the_size_in_kilobytes_of_the_file_that_pillow_writes(tmp_path: Path, quality: int) -> None:
    images = media()
    sizes = []
    for row, image in enumerate(images):
        pixels = np.round(image.numpy().transpose(1, 2, 0) * 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{row}.jpg", quality=quality)
        sizes.append((tmp_path / f"{row}.jpg").stat().st_size / 1000)
    rewards = compute_rewards(JpegIncompressibility(quality=quality), images, prompts(5))
    assert rewards.tolist() == pytest.approx(sizes)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert torch.equal(compute_rewards(JpegCompressibility(quality=quality), images, prompts(5)), -rewards)


def test_the_quality_is_that_of_ddpo_if_not_said() -> None:
    rewards = [compute_rewards(reward, media(), prompts(5)) for reward in (JpegIncompressibility(),)]
    assert torch.equal(rewards[0], compute_rewards(JpegIncompressibility(quality=95), media(), prompts(5)))


def test_a_reward_does_not_depend_on_the_batch() -> None:
    together = compute_rewards(JpegCompressibility(), media(), prompts(5))
    assert torch.equal(compute_rewards(JpegCompressibility(batch_size=2), media(), prompts(5)), together)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_reward_of_a_video_is_the_mean_of_its_frames(channels: int) -> None:
    images = media(6)[:, :channels]
    of_images = compute_rewards(JpegCompressibility(), images, prompts(6))
    of_videos = compute_rewards(JpegCompressibility(), images.unflatten(0, (2, 3)), prompts(2))
    torch.testing.assert_close(of_videos, of_images.reshape(2, 3).mean(1))


def test_workers_receive_a_copy() -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(JpegCompressibility(quality=50)))
    assert torch.equal(copy(media(), prompts(5)), JpegCompressibility(quality=50)(media(), prompts(5)))


@pytest.mark.parametrize("quality", [0, 101, 95.0, None])
def test_a_quality_that_jpeg_does_not_have_is_refused(quality: Any) -> None:
    with pytest.raises(ValueError, match=f"`quality` must be an integer from 1 to 100, got {quality}"):
        JpegCompressibility(quality=quality)
