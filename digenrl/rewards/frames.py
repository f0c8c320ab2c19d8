"""Rewards of single images, and how those of a video's frames become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from digenrl.rewards.counts import check_count
from digenrl.types import PromptBatch

Frames = Literal["mean", "min", "max", "first", "middle", "last"]
"""Which frames of a video are judged, or how the rewards of all of them become one."""

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "min": torch.amin, "max": torch.amax}
_SINGLE_FRAMES = ("first", "middle", "last")


class FrameReward(ABC):
    """Base of rewards that judge images. A subclass is `score_images`, and `setup` if it loads something.

    A video is judged frame by frame; `frames` says which, or how their rewards are reduced.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    """What it can judge."""
    needs: ClassVar[str] = ""
    """What a user must have for it, in a few words: weights, a server, metadata columns."""
    extra: ClassVar[str | None] = None
    """The extra of this package that installs what it imports."""
    requires: tuple[str, ...] = ()
    groupwise: bool = False

    def __init__(
        self,
        *,
        frames: Frames = "mean",
        num_frames: int | None = None,
        batch_size: int | None = None,
        offload: bool = False,
    ) -> None:
        """Say how videos and batches are taken apart.

        Args:
            frames: of a video: `"mean"`, `"min"` or `"max"` of its frames' rewards, or the `"first"`, `"middle"` or
                `"last"` frame's.
            num_frames: judge so many frames at even distances, first and last included, instead of all.
            batch_size: most images judged at a time; None is all at once.
            offload: keep the reward's networks in host memory between two calls.

        Raises:
            ValueError: a setting outside its bounds.
        """
        if frames not in (*_REDUCTIONS, *_SINGLE_FRAMES):
            raise ValueError(f"`frames` must be one of {', '.join((*_REDUCTIONS, *_SINGLE_FRAMES))}, got {frames!r}.")
        for name, value in {"num_frames": num_frames, "batch_size": batch_size}.items():
            if value is not None:
                check_count(f"`{name}`", value)
        if num_frames is not None and frames in _SINGLE_FRAMES:
            raise ValueError(f"`num_frames` must be left out with `frames` {frames}, got {num_frames}.")
        self.frames = frames
        self.num_frames = num_frames
        self.batch_size = batch_size
        self.offload = offload
        self.device = torch.device("cpu")

    def setup(self, device: torch.device) -> None:
        """Load what is needed to judge; called once in each worker that scores."""
        self.device = device

    @abstractmethod
    def score_images(self, images: Tensor, prompts: PromptBatch) -> Any:
        """Judge N images, [N, C, H, W] in [0, 1], of N rows of prompts: [N].

        Called under `torch.no_grad`. The images may be changed in place, the prompts not.
        """

    def to(self, device: torch.device) -> None:
        """Move the networks that this object holds."""
        self.device = device
        for value in vars(self).values():
            if isinstance(value, nn.Module):
                value.to(device)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
        """Judge B samples: [B]."""
        if media.ndim == 4:
            return self._score(media, prompts)
        indices = self._frame_indices(media.shape[1])
        images = media[:, indices].flatten(0, 1)  # sample-major
        rows = [row for row in range(len(prompts)) for _ in indices]
        rewards = self._score(images, prompts.select(rows))
        if isinstance(rewards, Tensor):
            return self._reduce(rewards.reshape(len(prompts), len(indices)))
        return [self._join(rewards[start : start + len(indices)]) for start in range(0, len(rewards), len(indices))]

    def _reduce(self, rewards: Tensor) -> Tensor:
        return _REDUCTIONS.get(self.frames, torch.mean)(rewards.float(), dim=-1)

    def _join(self, rewards: list[Any]) -> Any:
        """Reduce one video's rewards; if it failed for a frame, it failed for the video."""
        failed = [reward for reward in rewards if isinstance(reward, Exception)]
        return failed[0] if failed else self._reduce(torch.tensor(rewards))

    def _score(self, images: Tensor, prompts: PromptBatch) -> Any:
        size = self.batch_size or len(images)
        if len(images) <= size:
            return self.score_images(images, prompts)
        parts = [slice(start, start + size) for start in range(0, len(images), size)]
        given = [self.score_images(images[part], prompts.select(part)) for part in parts]
        if all(isinstance(rewards, Tensor) for rewards in given):
            return torch.cat(given)
        return [reward for rewards in given for reward in rewards]

    def _frame_indices(self, num_frames: int) -> list[int]:
        single = {"first": 0, "middle": num_frames // 2, "last": num_frames - 1}
        if self.frames in single:
            return [single[self.frames]]
        if self.num_frames is None or self.num_frames >= num_frames:
            return list(range(num_frames))
        return torch.linspace(0, num_frames - 1, self.num_frames).round().int().tolist()
