"""FLUX.1 Kontext: an image is changed as a prompt says (arXiv:2506.15742)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from digenrl.policies.checks import check_multiple
from digenrl.policies.embeddings import Embedding
from digenrl.policies.flux import FluxCondition, FluxPolicy, image_places
from digenrl.policies.image_prompts import ImagePromptPolicy
from digenrl.policies.images import to_pixels
from digenrl.policies.pipeline_files import vae_factor


@dataclass(frozen=True)
class FluxKontextCondition(FluxCondition):
    """A prompt and its image as the transformer takes them."""

    image_latents: Tensor | None = None  # [B, R, 4C] packed; None without an image


class FluxKontextPolicy(FluxPolicy, ImagePromptPolicy):
    """FLUX.1-Kontext-dev.

    The tokens of the image follow those that are denoised; without images it is FLUX.1. All images of a run have one
    size, `height` and `width` unless `image_height` and `image_width` say another; the pipeline gives each one the
    nearest in shape of 17 sizes of about a megapixel, with which the model was trained.
    """

    pipeline_classes = ("FluxKontextPipeline",)
    condition_class = FluxKontextCondition
    image_fields = ("image_latents",)

    def _read_sizes(self) -> tuple[int, ...]:
        latent_shape = super()._read_sizes()  # first: an image has the sizes of media unless it is given others
        factor = 2 * vae_factor(self.files)
        for name, value in {"image_height": self.image_height, "image_width": self.image_width}.items():
            check_multiple(name, value, factor)
        self._image_rows, self._image_columns = self.image_height // factor, self.image_width // factor
        return latent_shape

    def _image_counts(self) -> Collection[int]:
        return (0, 1)

    @property
    def num_image_tokens(self) -> int:
        """Tokens of a prompt's image."""
        return self._image_rows * self._image_columns

    def _encode_images(self, images: Sequence[Image.Image], device: torch.device) -> Embedding:
        pixels = to_pixels(images[0], self.image_height, self.image_width).to(device)
        with self._decoding.on(device) as vae:
            latents = vae.encode(pixels).latent_dist.mode()
            scaled = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
        return {"image_latents": _pack(scaled)}

    def _tokens(self, latents: Tensor, condition: Any) -> tuple[Tensor, Tensor]:
        tokens, places = super()._tokens(latents, condition)
        if condition.image_latents is None:
            return tokens, places
        image = image_places(1, self._image_rows, self._image_columns, latents.device)
        return torch.cat([tokens, condition.image_latents], dim=1), torch.cat([places, image])


def _pack(latents: Tensor) -> Tensor:
    """Turn latents [B, C, 2 rows, 2 columns] into tokens [B, rows columns, 4C]."""
    squares = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, C, rows, 2, columns, 2]
    tokens: Tensor = squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return tokens
