"""The guide's adapters for models with environments of their own, run as written against stand-ins."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from digenrl.rewards import compute_rewards, set_up_reward
from digenrl.types import Prompt, PromptBatch

GUIDE = (Path(__file__).parents[3] / "docs/guide/preference_models.md").read_text()
PROMPTS = PromptBatch.for_step([Prompt("a cat", 0), Prompt("a dog", 1)], step=0, group_size=1, seed=0)


def adapter(name: str) -> Any:
    """Run the guide's block whose class has this name; give the class."""
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if f"class {name}" in code)
    names: dict[str, Any] = {}
    exec(block, names)
    return names[name]


class Inferencer:
    """HPSv3's: a mean and a deviation of each image file; here its brightness, and the length of its prompt."""

    def __init__(self, device: str) -> None:
        assert device == "cpu"

    def reward(self, *, prompts: list[str], image_paths: list[str]) -> torch.Tensor:
        means = [float(Image.open(path).getpixel((0, 0))[0]) for path in image_paths]  # type: ignore[index]
        return torch.tensor([[mean, len(prompt)] for mean, prompt in zip(means, prompts, strict=True)])


class VideoInference:
    """VideoAlign's: a dict for each video file."""

    def __init__(self, checkpoints: str, device: str, dtype: torch.dtype) -> None:
        assert (checkpoints, device, dtype) == ("checkpoints", "cpu", torch.bfloat16)

    def reward(self, paths: list[str], prompts: list[str], use_norm: bool) -> list[dict[str, float]]:
        assert use_norm
        return [
            {"VQ": float(Path(path).read_text()), "Overall": float(len(prompt))}
            for path, prompt in zip(paths, prompts, strict=True)
        ]


def test_hpsv3_is_asked_about_files_and_gives_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("hpsv3")
    package.HPSv3RewardInferencer = Inferencer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpsv3", package)
    reward = adapter("HPSv3")(batch_size=1)
    set_up_reward(reward, torch.device("cpu"))
    media = torch.tensor([51.0, 204.0])[:, None, None, None].expand(2, 3, 4, 4) / 255
    assert compute_rewards(reward, media, PROMPTS).tolist() == [51.0, 204.0]


def test_video_align_is_asked_about_videos_and_gives_a_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("inference")
    package.VideoVLMRewardInference = VideoInference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inference", package)

    def export(video: list[Any], path: str, *, fps: int) -> None:
        assert (len(video), video[0].shape, fps) == (5, (4, 6, 3), 16)
        Path(path).write_text(str(video[-1].mean()))

    monkeypatch.setattr("diffusers.utils.export_to_video", export)
    media = torch.linspace(0, 1, 10).reshape(2, 5, 1, 1, 1).expand(2, 5, 3, 4, 6)
    for dimension, expected in {"VQ": media[:, -1, 0, 0, 0].tolist(), "Overall": [5.0, 5.0]}.items():
        reward = adapter("VideoAlign")(dimension=dimension)
        set_up_reward(reward, torch.device("cpu"))
        assert compute_rewards(reward, media, PROMPTS).tolist() == pytest.approx(expected)
