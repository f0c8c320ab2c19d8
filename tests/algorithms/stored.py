"""Rows of published losses as a module is given them: a policy whose velocity is stored, and a batch around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from digenrl import Condition, DiffusionPolicy, Prompt, PromptBatch
from digenrl.diffusion import Kernel
from digenrl.types import TimestepBatch
from tests.functional.golden import tensors


class StoredVelocity(DiffusionPolicy):
    """Predicts its only parameter [N, ...], whatever it is asked."""

    def __init__(self, velocity: Tensor) -> None:
        super().__init__()
        self.stored = (velocity,)
        self.latent_shape = tuple(velocity.shape[1:])

    def build(self) -> None:
        self.value = nn.Parameter(self.stored[0].clone())

    def encode(self, prompts: Sequence[str]) -> Condition:
        return Condition()

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        return self.value

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def sigmas(self, num_steps: int) -> Tensor:
        raise NotImplementedError


def no_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    raise NotImplementedError


def stored_batch(golden: Any, case: str, *, kernel: Kernel, step: int, dtype: torch.dtype, shape: Any) -> TimestepBatch:
    """Six rows of one timestep, with the log-probs and means of the old velocity and clamped advantages."""
    keys = ("sample", "v_old", f"{case}.prev")
    latents, old_velocity, next_latents = (x.reshape(6, *shape) for x in tensors(golden, *keys, dtype=dtype))
    sigmas, advantages = tensors(golden, "sigmas", "advantages", dtype=dtype)
    place = {
        "sigma": sigmas[step].expand(6),
        "next_sigma": sigmas[step + 1].expand(6),
        "sigma_max": sigmas[1].expand(6),
    }
    old = kernel.step(latents, old_velocity, **place, next_latents=next_latents)
    return TimestepBatch(
        prompts=PromptBatch.for_step([Prompt("", 0)], step=0, group_size=6, seed=0),
        latents=latents,
        next_latents=next_latents,
        final_latents=torch.zeros_like(latents),
        **place,
        timestep_index=torch.full((6,), step),
        old_log_probs=old.log_prob,
        advantages=advantages.clamp(-5, 5),
        group_index=torch.zeros(6, dtype=torch.int64),
        condition=Condition(),
        kernel=kernel,
        policy_version=0,
        old_means=old.mean,
    )
