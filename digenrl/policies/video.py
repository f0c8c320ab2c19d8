"""What policies for videos have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from digenrl.policies.checks import check_multiple
from digenrl.policies.pipeline import PipelinePolicy


class VideoPipelinePolicy(PipelinePolicy):
    """A pipeline whose samples are videos: latents [B, C, f, h, w], media [B, F, C, H, W]."""

    def __init__(self, path: str, *, num_frames: int = 81, **settings: Any) -> None:
        """Check the settings; the others are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            num_frames: of a video, one more than a multiple of what the VAE makes a latent frame of.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(path, **settings)
        if num_frames < 1:
            raise ValueError(f"`num_frames` must be at least 1, got {num_frames}.")
        self.num_frames = num_frames

    def _video_sizes(self, *, pixels: int, frames: int, patch: Sequence[int]) -> tuple[int, int, int]:
        """Give the latent frames, rows and columns of a video.

        Args:
            pixels: along a side of a latent.
            frames: that a latent frame has after the first, which has one.
            patch: latent frames, rows and columns of a token.

        Raises:
            ValueError: a size does not suit the model.
        """
        if (self.num_frames - 1) % frames:
            below = (self.num_frames - 1) // frames * frames + 1
            raise ValueError(
                f"`num_frames` must be one more than a multiple of {frames} for this model, got {self.num_frames}; "
                f"near are {below} and {below + frames}."
            )
        num_latent_frames = (self.num_frames - 1) // frames + 1
        if num_latent_frames % patch[0]:
            raise ValueError(
                f"`num_frames` {self.num_frames} gives {num_latent_frames} latent frames, but this model takes "
                f"{patch[0]} of them together."
            )
        for name, value, tokens in (("height", self.height, patch[1]), ("width", self.width, patch[2])):
            check_multiple(name, value, pixels * tokens)
        return num_latent_frames, self.height // pixels, self.width // pixels

    def decode(self, latents: Tensor) -> Tensor:
        """Decode final latents [B, C, f, h, w] to videos [B, F, C, H, W] in [0, 1]."""
        return super().decode(latents).transpose(1, 2).contiguous()
