"""Stable Diffusion 3 and 3.5 (arXiv:2403.03206)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from digenrl.policies.checks import check_multiple
from digenrl.policies.components import Pipeline
from digenrl.policies.embeddings import Embedding
from digenrl.policies.lora import JOINT_ATTENTION
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.policies.pipeline_files import vae_factor
from digenrl.types import Condition


@dataclass(frozen=True)
class StableDiffusion3Condition(Condition):
    """A prompt as the transformer takes it."""

    embeddings: Tensor  # [B, L, D] CLIP's tokens and then T5's
    pooled: Tensor  # [B, P] of both CLIP encoders


class StableDiffusion3Policy(PipelinePolicy):
    """Stable Diffusion 3, 3.5-medium and 3.5-large.

    Flow-GRPO and DGPO train it with a `guidance_scale` of 4.5 in rollouts (docs/algorithms.md).
    """

    pipeline_classes = ("StableDiffusion3Pipeline",)
    condition_class = StableDiffusion3Condition
    transformer: Any
    default_lora_targets = JOINT_ATTENTION

    def __init__(self, path: str, **settings: Any) -> None:
        """Check the settings, which are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            **settings: see there.
        """
        super().__init__(path, **settings)
        self._finish_init()

    def _read_sizes(self) -> tuple[int, ...]:
        transformer = self.files.config("transformer")
        factor, patch = vae_factor(self.files), transformer["patch_size"]
        rows = []
        for name, value in {"height": self.height, "width": self.width}.items():
            check_multiple(name, value, factor * patch)
            largest = transformer["pos_embed_max_size"] * patch * factor
            if value > largest:
                raise ValueError(f"`{name}` must be at most {largest} for this model, got {value}.")
            rows.append(value // factor)
        return (transformer["in_channels"], *rows)

    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        if pipeline.text_encoder_3 is None:  # a pipeline without T5 has zeros in its place, as wide as this says
            config = SimpleNamespace(**self.files.config("transformer"))
            object.__setattr__(pipeline, "transformer", SimpleNamespace(config=config))
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            prompt=[prompt],
            prompt_2=None,
            prompt_3=None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeddings": embeddings, "pooled": pooled}

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, C, h, w], for latents [N, C, h, w] at `sigma` [N]."""
        assert isinstance(condition, StableDiffusion3Condition)
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(self.compute_dtype),
            timestep=sigma.float() * 1000,
            encoder_hidden_states=condition.embeddings.to(self.compute_dtype),
            pooled_projections=condition.pooled.to(self.compute_dtype),
            return_dict=False,
        )[0]
        return velocity

    def pipeline_sigmas(self, num_steps: int) -> Tensor:
        """Give the pipeline's schedule [num_steps + 1]; a fixed shift acts twice, as it does there."""
        channels, height, width = self.latent_shape
        patch = self.files.config("transformer")["patch_size"]
        return self.flow_match_schedule(
            num_steps, sequence_length=(height // patch) * (width // patch), double_shift=True
        )
