"""Rewards of images that compute on the CPU wherever the samples are."""

from __future__ import annotations

from digenrl.rewards.frames import FrameReward, Frames


class CPUReward(FrameReward):
    """Base of rewards of images that hold nothing on a device, so that there is nothing to `offload`."""

    def __init__(
        self, *, frames: Frames = "mean", num_frames: int | None = None, batch_size: int | None = None
    ) -> None:
        """Say how videos and batches are taken apart.

        Args:
            frames: see `FrameReward`.
            num_frames: see `FrameReward`.
            batch_size: see `FrameReward`.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(frames=frames, num_frames=num_frames, batch_size=batch_size)
