"""Wan 2.1 and 2.2, text to video (arXiv:2503.20314)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from digenrl.diffusion.sigmas import unipc_sigmas
from digenrl.policies.checks import check_is_there
from digenrl.policies.components import Pipeline
from digenrl.policies.embeddings import Embedding
from digenrl.policies.pipeline_schedule import flow_match_schedule
from digenrl.policies.video import VideoPipelinePolicy
from digenrl.types import Condition

_OTHER_SCHEDULES = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_dynamic_shifting",
    "shift_terminal",
)


@dataclass(frozen=True)
class WanCondition(Condition):
    """A prompt as the transformer takes it."""

    embeddings: Tensor  # [B, L, D] UMT5's tokens, zeros after the last


class WanPolicy(VideoPipelinePolicy):
    """Wan 2.1 (1.3B and 14B) and 2.2 (5B, and A14B with two transformers).

    Wan 2.2 A14B has one transformer for high noise and one for low noise. Each row of a batch goes through the one for
    its own noise level, so a batch may have rows of both. The `guidance_scale` of the algorithm is for both, unless the
    second has a `guidance_scale_2`.

    A step is given its timestep as it is, sigma times 1000, where the pipeline's solver cuts it to an integer.
    """

    pipeline_classes = ("WanPipeline",)
    condition_class = WanCondition
    block_lists = ("blocks",)

    def __init__(
        self,
        path: str,
        *,
        num_frames: int = 81,
        height: int = 480,
        width: int = 832,
        max_sequence_length: int = 512,
        flow_shift: float | None = None,
        guidance_scale_2: float | None = None,
        trained_transformers: Sequence[str] | None = None,
        adapter_2: str | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings; the others are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            num_frames: of a video, one more than a multiple of 4.
            height: of media, in pixels.
            width: of media, in pixels.
            max_sequence_length: tokens that a prompt is padded or cut to.
            flow_shift: of the pipeline's schedule, 3 for 480 rows and 5 for 720; None is the pipeline's.
            guidance_scale_2: of classifier-free guidance where Wan 2.2 A14B's `"transformer_2"` computes, in place of
                the algorithm's scale if that is above 1; None leaves that.
            trained_transformers: which of Wan 2.2 A14B's `"transformer"` (high noise) and `"transformer_2"` (low noise)
                are trained; another stays as it is. None trains all that the model has.
            adapter_2: as `adapter`, for `"transformer_2"`: a file that diffusers loads with `load_into_transformer_2`.
            **settings: see there.

        Raises:
            FileNotFoundError: `path` or an adapter is not there.
            ValueError: a setting outside its bounds, or two that do not go together.
        """
        super().__init__(
            path,
            num_frames=num_frames,
            height=height,
            width=width,
            max_sequence_length=max_sequence_length,
            **settings,
        )
        if flow_shift is not None and not 0 < flow_shift < math.inf:
            raise ValueError(f"`flow_shift` must be positive and finite, got {flow_shift}.")
        if flow_shift is not None and self.schedule != "pipeline":
            raise ValueError(
                f"`flow_shift` is of the pipeline's own schedule, got {flow_shift} with another `schedule`: set "
                "`schedule_shift` instead."
            )
        check_is_there("adapter_2", adapter_2)
        if guidance_scale_2 is not None and not 1 <= guidance_scale_2 < math.inf:
            raise ValueError(f"`guidance_scale_2` must be at least 1, which is no guidance, got {guidance_scale_2}.")
        self.flow_shift = flow_shift
        self.guidance_scale_2 = guidance_scale_2
        self.trained_transformers = trained_transformers
        self.adapter_2 = adapter_2
        self._boundary: float | None = None
        self._finish_init()

    def _read_sizes(self) -> tuple[int, ...]:
        index, transformer, vae = (self.files.config(part) for part in ("", "transformer", "vae"))
        if index.get("boundary_ratio") is not None:
            self.transformers = ("transformer", "transformer_2")
            self._boundary = index["boundary_ratio"] * 1000
        elif self.guidance_scale_2 is not None:
            raise ValueError(
                f"`guidance_scale_2` is for models with two transformers, got {self.guidance_scale_2}: leave it out."
            )
        trained = self.transformers if self.trained_transformers is None else tuple(self.trained_transformers)
        if not trained or not set(trained) <= set(self.transformers):
            raise ValueError(
                f"`trained_transformers` must be of {' and '.join(self.transformers)}, which the model has, got "
                f"{', '.join(trained) or 'none'}."
            )
        self._trained = frozenset(trained)
        given = {part for part in ("transformer", "transformer_2") if self._adapter_of(part)[0] is not None}
        if given and given != self._trained:
            raise ValueError(
                "`adapter` is for `transformer` and `adapter_2` for `transformer_2`: give one for each that is trained "
                f"({', '.join(sorted(self._trained))}), got some for {', '.join(sorted(given))}."
            )
        sizes = self._video_sizes(
            pixels=vae.get("scale_factor_spatial", 8),
            frames=vae.get("scale_factor_temporal", 4),
            patch=transformer["patch_size"],
        )
        return (transformer["in_channels"], *sizes)

    def _add_adapter(self, part: str, model: nn.Module) -> None:
        if part in self._trained:
            super()._add_adapter(part, model)
        else:
            model.requires_grad_(False)

    def _adapter_of(self, part: str) -> tuple[str | None, str]:
        return (self.adapter if part == "transformer" else self.adapter_2), "transformer"

    def _encoding_settings(self) -> Mapping[str, Any]:
        from diffusers.utils import is_ftfy_available

        return {"ftfy": is_ftfy_available()}  # the pipeline mends prompts with it where it is installed

    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        embeddings, _ = pipeline.encode_prompt(
            prompt=[prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=device,
        )
        return {"embeddings": embeddings}

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, C, f, h, w], for latents [N, C, f, h, w] at `sigma` [N]."""
        assert isinstance(condition, WanCondition)
        timestep = sigma.float() * 1000
        if self._boundary is None:
            return self._predict("transformer", latents, timestep, condition)
        is_high = self._is_high(sigma)
        places = torch.zeros_like(timestep, dtype=torch.int64)
        predictions, num_rows = [], 0
        for part, chosen in (("transformer", is_high), ("transformer_2", ~is_high)):
            rows = chosen.nonzero().flatten()
            if len(rows) == 0 and self._is_shared:
                rows = rows.new_zeros(1)  # nobody takes what it gives, but ranks gather each block together
            if len(rows) == 0:
                continue
            predictions.append(self._predict(part, latents[rows], timestep[rows], condition[rows]).float())
            places = torch.where(chosen, num_rows + chosen.cumsum(0) - 1, places)
            num_rows += len(rows)
        return torch.cat(predictions)[places]

    def guidance_scale_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        """Give the scale of rows at `sigma` [N]: `guidance_scale_2` for those of the second transformer."""
        if self.guidance_scale_2 is None:
            return scale
        return torch.where(self._is_high(sigma), scale, self.guidance_scale_2)

    def _is_high(self, sigma: Tensor) -> Tensor:
        assert self._boundary is not None, "two transformers"
        return sigma.float() * 1000 >= self._boundary

    @property
    def _is_shared(self) -> bool:
        """Whether ranks hold a part of each block, so that all must call it."""
        return any(isinstance(parameter, DTensor) for parameter in next(iter(self.blocks())).parameters())

    def _predict(self, part: str, latents: Tensor, timestep: Tensor, condition: WanCondition) -> Tensor:
        dtype = self.compute_dtype if part in self._trained else self.dtype
        inputs = {name: value.to(dtype) for name, value in self._inputs(latents, condition).items()}
        prediction: Tensor = self.get_submodule(part)(timestep=timestep, return_dict=False, **inputs)[0]
        return prediction

    def _inputs(self, latents: Tensor, condition: WanCondition) -> dict[str, Tensor]:
        """Give what a transformer is called with beside the timestep."""
        return {"hidden_states": latents, "encoder_hidden_states": condition.embeddings}

    def _unscale(self, latents: Tensor, vae: Any) -> Tensor:
        mean, std = (latents.new_tensor(value) for value in (vae.config.latents_mean, vae.config.latents_std))
        return latents * std.view(-1, 1, 1, 1) + mean.view(-1, 1, 1, 1)

    def pipeline_sigmas(self, num_steps: int) -> Tensor:
        """Give the schedule [num_steps + 1] of the pipeline's UniPC solver, or of Euler's if it has that.

        Raises:
            ValueError: the scheduler is another, or has a setting that has no formula here.
        """
        config = self.files.config("scheduler")
        name = config["_class_name"]
        if name == "FlowMatchEulerDiscreteScheduler":
            euler = config if self.flow_shift is None else {**config, "shift": self.flow_shift}
            return flow_match_schedule(euler, num_steps, sequence_length=1, double_shift=True)
        unknown = [entry for entry in _OTHER_SCHEDULES if config.get(entry)]
        if config.get("final_sigmas_type", "zero") != "zero":
            unknown.append("final_sigmas_type")
        if unknown or name != "UniPCMultistepScheduler" or not config.get("use_flow_sigmas"):
            raise ValueError(
                f"the scheduler of {self.path!r} is a {name} with {', '.join(unknown) or 'no schedule of a flow'}, "
                "which `WanPolicy` has no schedule for: set `schedule`, or give the pipeline Wan's UniPC scheduler."
            )
        return unipc_sigmas(num_steps, shift=self.flow_shift or config.get("flow_shift", 1.0))
