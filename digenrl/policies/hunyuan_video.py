"""HunyuanVideo, text to video (arXiv:2412.03603)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.policies.checks import check_embedded_guidance
from digenrl.policies.components import Pipeline
from digenrl.policies.embeddings import Embedding
from digenrl.policies.lora import JOINT_ATTENTION
from digenrl.policies.video import VideoPipelinePolicy
from digenrl.types import Condition


@dataclass(frozen=True)
class HunyuanVideoCondition(Condition):
    """A prompt as the transformer takes it."""

    embeddings: Tensor  # [B, L, D] Llama's tokens
    mask: Tensor  # [B, L] bool, which of them are the prompt's
    pooled: Tensor  # [B, P] CLIP's


class HunyuanVideoPolicy(VideoPipelinePolicy):
    """HunyuanVideo.

    It is told its guidance as a number, which costs no second pass; a `guidance_scale` of the algorithm other than 1
    comes on top of it. The default size is that of DanceGRPO's run (arXiv:2505.07818).
    """

    pipeline_classes = ("HunyuanVideoPipeline",)
    condition_class = HunyuanVideoCondition
    transformer: Any
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    default_lora_targets = JOINT_ATTENTION

    def __init__(
        self,
        path: str,
        *,
        num_frames: int = 53,
        height: int = 480,
        width: int = 480,
        guidance: float | None = None,
        prompt_template: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings; the others are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            num_frames: of a video, one more than a multiple of 4.
            height: of media, in pixels.
            width: of media, in pixels.
            guidance: that the transformer is told, times 1000; None is 6 for one that is told any.
            prompt_template: what Llama is given: a `template` with `{}` for the prompt, and as `crop_start` how many of
                its first tokens are left out; None is the pipeline's.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds, or `guidance` is given and the model has no place for it.
        """
        super().__init__(path, num_frames=num_frames, height=height, width=width, **settings)
        if prompt_template is not None and (
            set(prompt_template) != {"template", "crop_start"} or "{}" not in prompt_template["template"]
        ):
            raise ValueError(
                "`prompt_template` must have a `template` with {} for the prompt, and a `crop_start`, got "
                f"{prompt_template}."
            )
        self.guidance, self.prompt_template = guidance, prompt_template
        self._finish_init()

    def _read_sizes(self) -> tuple[int, ...]:
        transformer, vae = self.files.config("transformer"), self.files.config("vae")
        self._embedded_guidance = check_embedded_guidance(
            self.guidance, transformer.get("guidance_embeds", False), default=6.0
        )
        patch = (transformer["patch_size_t"], transformer["patch_size"], transformer["patch_size"])
        sizes = self._video_sizes(
            pixels=vae["spatial_compression_ratio"], frames=vae["temporal_compression_ratio"], patch=patch
        )
        self._num_tokens = math.prod(sizes) // math.prod(patch)
        return (transformer["in_channels"], *sizes)

    def _encoding_settings(self) -> Mapping[str, Any]:
        return {"prompt_template": self.prompt_template}

    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        template = {} if self.prompt_template is None else {"prompt_template": self.prompt_template}
        embeddings, pooled, mask = pipeline.encode_prompt(
            prompt=[prompt], device=device, max_sequence_length=self.max_sequence_length, **template
        )
        return {"embeddings": embeddings, "mask": mask.bool(), "pooled": pooled}

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, C, f, h, w], for latents [N, C, f, h, w] at `sigma` [N]."""
        assert isinstance(condition, HunyuanVideoCondition)
        guidance = None
        if self._embedded_guidance is not None:
            guidance = torch.full_like(sigma, self._embedded_guidance * 1000, dtype=torch.float32)
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(self.compute_dtype),
            timestep=sigma.float() * 1000,
            encoder_hidden_states=condition.embeddings.to(self.compute_dtype),
            encoder_attention_mask=condition.mask,
            pooled_projections=condition.pooled.to(self.compute_dtype),
            guidance=guidance,
            return_dict=False,
        )[0]
        return velocity

    def pipeline_sigmas(self, num_steps: int) -> Tensor:
        """Give the pipeline's schedule [num_steps + 1]: even steps, bent by the scheduler's shift."""
        return self.flow_match_schedule(num_steps, sequence_length=self._num_tokens)
