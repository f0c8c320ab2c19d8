"""Qwen-Image (arXiv:2508.02324)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from digenrl.policies.checks import check_multiple
from digenrl.policies.components import Pipeline
from digenrl.policies.embeddings import Embedding
from digenrl.policies.lora import JOINT_ATTENTION
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.types import Condition


@dataclass(frozen=True)
class QwenImageCondition(Condition):
    """A prompt as the transformer takes it."""

    embeddings: Tensor  # [B, L, D] Qwen2.5-VL's states, without those of the template before the prompt; 0 after it
    mask: Tensor  # [B, L] bool, which of them are tokens


class QwenImagePolicy(PipelinePolicy):
    """Qwen-Image.

    Latents are packed, [S, 4C]: a token is 2 x 2 latents of the VAE with C channels. Its classifier-free guidance keeps
    the norm of the conditional velocity: Flow-GRPO trains it with `guidance_scale=4, guidance_rescale="norm"` of the
    algorithm, in rollouts and in training (docs/algorithms.md).

    In the last block, the way of the text after attention leads nowhere: six parameters, or the adapters of these
    layers, get no gradient and stay as they are.
    """

    pipeline_classes = ("QwenImagePipeline",)
    condition_class = QwenImageCondition
    transformer: Any
    default_lora_targets = JOINT_ATTENTION

    def __init__(
        self, path: str, *, max_sequence_length: int = 512, negative_prompt: str = " ", **settings: Any
    ) -> None:
        """Check the settings; the others are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            max_sequence_length: tokens that a prompt is padded or cut to, at most 1024. Each step computes with all of
                them, so a number just above the longest prompt's saves time.
            negative_prompt: what classifier-free guidance leads away from; published runs have a space.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(path, max_sequence_length=max_sequence_length, negative_prompt=negative_prompt, **settings)
        if max_sequence_length > 1024:
            raise ValueError(f"`max_sequence_length` must be at most 1024 for Qwen-Image, got {max_sequence_length}.")
        self._finish_init()

    def _read_sizes(self) -> tuple[int, ...]:
        factor = 2 * int(2 ** len(self.files.config("vae")["temperal_downsample"]))
        for name, value in {"height": self.height, "width": self.width}.items():
            check_multiple(name, value, factor)
        self._rows, self._columns = self.height // factor, self.width // factor
        return (self._rows * self._columns, self.files.config("transformer")["in_channels"])

    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        embeddings, _ = pipeline.encode_prompt(
            prompt=[prompt], device=device, max_sequence_length=self.max_sequence_length
        )
        num_tokens = embeddings.shape[1]  # one prompt has no padding
        return {
            "embeddings": functional.pad(embeddings, (0, 0, 0, self.max_sequence_length - num_tokens)),
            "mask": torch.arange(self.max_sequence_length, device=device)[None] < num_tokens,
        }

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, S, 4C], for packed latents [N, S, 4C] at `sigma` [N]."""
        assert isinstance(condition, QwenImageCondition)
        shapes = [[(1, self._rows, self._columns)]] * len(latents)
        self._move_positions(shapes, latents.device)
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(self.compute_dtype),
            timestep=sigma.float(),  # the model multiplies it by 1000
            encoder_hidden_states=condition.embeddings.to(self.compute_dtype),
            encoder_hidden_states_mask=condition.mask,
            img_shapes=shapes,
            return_dict=False,
        )[0]
        return velocity

    def _move_positions(self, shapes: list[list[tuple[int, int, int]]], device: torch.device) -> None:
        """Let the transformer move its position embeddings to the device, where it keeps them.

        It would do so in the first forward, which may be in inference mode, and a later backward cannot use that.
        """
        with torch.inference_mode(False):
            self.transformer.pos_embed(shapes, max_txt_seq_len=self.max_sequence_length, device=device)

    def _unscale(self, latents: Tensor, vae: Any) -> Tensor:
        """Unpack, and turn them into the VAE's latents of one frame, [B, C, 1, 2 rows, 2 columns]."""
        unpacked = latents.unflatten(1, (self._rows, self._columns)).unflatten(-1, (-1, 2, 2))
        frames = unpacked.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3).unsqueeze(2)
        mean, std = (
            torch.tensor(values, device=latents.device)[:, None, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        unscaled: Tensor = frames * std + mean
        return unscaled

    def decode(self, latents: Tensor) -> Tensor:
        """Decode final latents [B, S, 4C] to images [B, 3, H, W] in [0, 1]."""
        return super().decode(latents)[:, :, 0]

    def pipeline_sigmas(self, num_steps: int) -> Tensor:
        """Give the pipeline's schedule [num_steps + 1], whose shift grows with the size of the sample."""
        return self.flow_match_schedule(num_steps, sequence_length=self.latent_shape[0])
