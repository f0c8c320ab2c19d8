"""How a module makes samples: with noise, steps recorded, for training; by the ODE, for validation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from digenrl.diffusion.guidance import classifier_free_guidance
from digenrl.diffusion.kernels import Euler, Kernel
from digenrl.diffusion.sampling import sample_dpm_solver, sample_ode, sample_sde
from digenrl.module.weight_copies import WeightCopies
from digenrl.policies import DiffusionPolicy, VelocityField
from digenrl.types import Condition, PromptBatch, Trajectory

Solver = Literal["euler", "dpm"]
"""How the ODE is solved: Euler's method, or DPM-Solver++ 2M."""


class Rollouts(WeightCopies):
    """The part of `DiffusionRLModule` that makes samples."""

    num_steps: int
    guidance_scale: float
    guidance_rescale: Literal["none", "norm"]
    guidance_batching: Literal["joint", "separate"]
    train_guidance: bool = True
    """Whether `score_step` scores recorded steps under the guided policy; else under the policy without."""

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        """The scales of classifier-free guidance that the algorithm uses anywhere; 1 is none."""
        return (self.guidance_scale,)

    def recorded_steps(self, step: int) -> range:
        """Say which denoising steps the rollouts of a training step record."""
        raise NotImplementedError

    def guided(self, policy: VelocityField, *, scale: float | None = None) -> VelocityField:
        """Give a policy with classifier-free guidance; both conditions go through it as `guidance_batching` says.

        Args:
            policy: the policy, or a copy of it.
            scale: of the guidance; None is the module's own. 1 gives `policy` itself.
        """
        factor = self.guidance_scale if scale is None else scale
        if factor == 1:
            return policy

        def velocity(latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
            alone, empty = replace(condition, negative_condition=None), self.policy.unconditional(condition)
            if self.guidance_batching == "joint":
                both = type(condition).cat([alone, empty])
                halves = policy(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
                conditional, unconditional = halves.chunk(2)
            else:
                conditional, unconditional = policy(latents, sigma, alone), policy(latents, sigma, empty)
            scales = self.policy.guidance_scale_at(factor, sigma)
            if isinstance(scales, Tensor):
                scales = scales.reshape(-1, *[1] * (conditional.ndim - 1))
            return classifier_free_guidance(conditional, unconditional, scales, rescale=self.guidance_rescale)

        return velocity

    def sample_trajectory(
        self,
        prompts: PromptBatch,
        kernel: Kernel,
        *,
        sde_steps: range | None = None,
        tail_sigmas: Tensor | None = None,
        keep_means: bool = False,
        final: Literal["latents", "prediction"] = "latents",
    ) -> Trajectory:
        """Denoise with `kernel` and record `recorded_steps`; the options are those of `sample_sde`."""
        condition = self.policy.encode_batch(prompts)
        sigmas = self.policy.sigmas(self.num_steps).to(self.device)
        recorded = self.recorded_steps(prompts.step)
        policy = self.guided(self.rollout_policy)
        unguided = None
        if self.guidance_scale != 1 and not self.train_guidance:
            sampler = self.rollout_policy

            def unguided(latents: Tensor, sigma: Tensor) -> Tensor:
                return sampler(latents, sigma, condition)

        path = sample_sde(
            lambda x, sigma: policy(x, sigma, condition),
            self.initial_latents(prompts).to(self.device),
            sigmas,
            kernel,
            seeds=prompts.seeds,
            recorded=recorded,
            sde_steps=sde_steps,
            tail_sigmas=tail_sigmas,
            keep_means=keep_means,
            final=final,
            scored_velocity=unguided,
        )
        return Trajectory(
            prompts=prompts,
            condition=condition,
            latents=path.latents,
            final_latents=path.final_latents,
            sigmas=sigmas,
            timestep_indices=tuple(recorded),
            old_log_probs=path.log_probs,
            kernel=kernel,
            old_means=path.means,
        )

    def sample_final_latents(self, prompts: PromptBatch, *, solver: Solver = "euler") -> Trajectory:
        """Denoise with the ODE and keep the final latents only, for losses on the forward process."""
        condition = self.policy.encode_batch(prompts)
        sigmas = self.policy.sigmas(self.num_steps).to(self.device)
        return Trajectory(
            prompts=prompts,
            condition=condition,
            latents=None,
            final_latents=self._solve(self.rollout_policy, self.initial_latents(prompts), condition, sigmas, solver),
            sigmas=sigmas,
            timestep_indices=(),
            old_log_probs=None,
            kernel=Euler(),
        )

    def initial_latents(self, prompts: PromptBatch) -> Tensor:
        """Draw the noise that samples start from, [B, ...] float32; by default each sample's own."""
        return self.policy.initial_latents(prompts.seeds)

    def _solve(
        self, policy: VelocityField, noise: Tensor, condition: Condition, sigmas: Tensor, solver: Solver
    ) -> Tensor:
        guided = self.guided(policy)
        solve = {"euler": sample_ode, "dpm": sample_dpm_solver}[solver]
        return solve(lambda x, sigma: guided(x, sigma, condition), noise.to(self.device), sigmas)


def check_guidance(name: str, scale: float, policy: DiffusionPolicy) -> None:
    """Check a guidance scale that is called `name`.

    Raises:
        ValueError: it is below 1, or the policy has no condition of an empty prompt to compare with.
    """
    if not 1 <= scale < math.inf:
        raise ValueError(f"`{name}` must be at least 1, which is no guidance, got {scale}.")
    if scale != 1 and not policy.has_unconditional:
        raise ValueError(
            f"`{name}` must be 1 with `{type(policy).__name__}`, got {scale}: that policy has no `unconditional`, "
            "the condition of an empty prompt that classifier-free guidance compares with."
        )
