"""Rewards of images that compute on the CPU wherever the samples are."""

from __future__ import annotations

from typing import Any

from digenrl.rewards.frames import FrameReward


class CPUReward(FrameReward):
    """Base of rewards of images that hold nothing on a device."""

    def __init__(self, *, offload: bool = False, **settings: Any) -> None:
        """Say how videos and batches are taken apart.

        Args:
            offload: must be left out: it is for rewards with networks on a device.
            settings: the others of `FrameReward`.

        Raises:
            ValueError: a setting outside its bounds.
        """
        if offload:
            raise ValueError(f"`offload` must be left out: {type(self).__name__} runs on the CPU anyway.")
        super().__init__(**settings)
