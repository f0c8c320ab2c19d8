"""FLUX.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.policies.checks import check_embedded_guidance, check_multiple
from digenrl.policies.components import Pipeline
from digenrl.policies.embeddings import Embedding
from digenrl.policies.lora import JOINT_ATTENTION
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.policies.pipeline_files import vae_factor
from digenrl.types import Condition


@dataclass(frozen=True)
class FluxCondition(Condition):
    """A prompt as the transformer takes it."""

    embeddings: Tensor  # [B, L, D] T5's tokens
    pooled: Tensor  # [B, P] CLIP's


class FluxPolicy(PipelinePolicy):
    """FLUX.1-dev and FLUX.1-schnell.

    Latents are packed, [S, 4C]: a token is 2 x 2 latents of the VAE with C channels. FLUX.1-dev is told its guidance as
    a number, which costs no second pass; a `guidance_scale` of the algorithm other than 1 comes on top of it.
    """

    pipeline_classes = ("FluxPipeline",)
    condition_class = FluxCondition
    transformer: Any
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    default_lora_targets = JOINT_ATTENTION

    def __init__(
        self, path: str, *, guidance: float | None = None, max_sequence_length: int = 512, **settings: Any
    ) -> None:
        """Check the settings; the others are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            guidance: that the transformer is told; None is 3.5 for one that is told any.
            max_sequence_length: tokens that a prompt is padded or cut to, at most 512.
            **settings: see there.

        Raises:
            ValueError: `guidance` is given and the model has no place for it.
        """
        super().__init__(path, max_sequence_length=max_sequence_length, **settings)
        if max_sequence_length > 512:
            raise ValueError(f"`max_sequence_length` must be at most 512 for FLUX.1, got {max_sequence_length}.")
        self.guidance = guidance
        self._finish_init()

    def _read_sizes(self) -> tuple[int, ...]:
        transformer = self.files.config("transformer")
        self._embedded_guidance = check_embedded_guidance(
            self.guidance, transformer.get("guidance_embeds", False), default=3.5
        )
        factor = 2 * vae_factor(self.files)
        for name, value in {"height": self.height, "width": self.width}.items():
            check_multiple(name, value, factor)
        self._rows, self._columns = self.height // factor, self.width // factor
        return (self._rows * self._columns, transformer["in_channels"])

    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        embeddings, pooled, _ = pipeline.encode_prompt(
            prompt=[prompt], prompt_2=None, device=device, max_sequence_length=self.max_sequence_length
        )
        return {"embeddings": embeddings, "pooled": pooled}

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, S, 4C], for packed latents [N, S, 4C] at `sigma` [N]."""
        assert isinstance(condition, FluxCondition)
        guidance = None
        if self._embedded_guidance is not None:
            guidance = torch.full_like(sigma, self._embedded_guidance, dtype=torch.float32)
        tokens, places = self._tokens(latents, condition)
        velocity: Tensor = self.transformer(
            hidden_states=tokens.to(self.compute_dtype),
            timestep=sigma.float(),  # the model multiplies it by 1000
            guidance=guidance,
            pooled_projections=condition.pooled.to(self.compute_dtype),
            encoder_hidden_states=condition.embeddings.to(self.compute_dtype),
            txt_ids=torch.zeros(condition.embeddings.shape[1], 3, device=latents.device),
            img_ids=places,
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]

    def _tokens(self, latents: Tensor, condition: FluxCondition) -> tuple[Tensor, Tensor]:
        """Give the tokens of images, [N, S, 4C], those to be denoised first, and their places, [S, 3]."""
        return latents, image_places(0, self._rows, self._columns, latents.device)

    def _unscale(self, latents: Tensor, vae: Any) -> Tensor:
        """Unpack, and turn them into the VAE's latents [B, C, 2 rows, 2 columns]."""
        unpacked = latents.unflatten(1, (self._rows, self._columns)).unflatten(-1, (-1, 2, 2))
        return super()._unscale(unpacked.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3), vae)

    def pipeline_sigmas(self, num_steps: int) -> Tensor:
        """Give the pipeline's schedule [num_steps + 1], whose shift grows with the size of the sample."""
        return self.flow_match_schedule(num_steps, sequence_length=self.latent_shape[0])


def image_places(image: int, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Give the place of each token of an image, [S, 3]: number of the image, row, column."""
    rows, columns = torch.arange(num_rows, device=device), torch.arange(num_columns, device=device)
    return torch.cartesian_prod(torch.full((1,), image, device=device), rows, columns).float()
