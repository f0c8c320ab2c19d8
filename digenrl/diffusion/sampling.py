"""Samplers: one function over a schedule of sigmas each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.diffusion.kernels import Kernel
from digenrl.diffusion.noise import sample_noise

VelocityFunction = Callable[[Tensor, Tensor], Tensor]
"""(latents [B, ...], sigma [B]) -> velocity [B, ...]"""


@dataclass(frozen=True)
class SampledPath:
    """A stochastic rollout's recorded stretch."""

    latents: Tensor  # [B, K+1, ...] float32
    final_latents: Tensor  # [B, ...] float32
    log_probs: Tensor | None  # [B, K] float32; None if the kernel is deterministic


@torch.no_grad()
def sample_sde(
    velocity: VelocityFunction,
    latents: Tensor,
    sigmas: Tensor,
    kernel: Kernel,
    *,
    seeds: Sequence[int],
    num_recorded: int,
) -> SampledPath:
    """Denoise with `kernel` and record the first `num_recorded` steps (Flow-GRPO, arXiv:2505.05470, eq. 9).

    Args:
        velocity: the policy.
        latents: [B, ...] noise at `sigmas[0]`.
        sigmas: [T+1] falling to 0.
        kernel: the conditional distribution of a step.
        seeds: [B] the samples' seeds; step i uses each sample's own stream `"step i"`.
        num_recorded: K, how many steps to keep, from the first on.
    """
    latents = latents.float()
    recorded, log_probs = [latents], []
    for index in range(len(sigmas) - 1):
        sigma = sigmas[index].expand(len(latents))
        noise = sample_noise(seeds, f"step {index}", latents.shape[1:]).to(latents.device)
        step = kernel.step(
            latents, velocity(latents, sigma), sigma, sigmas[index + 1], sigma_max=sigmas[1], noise=noise
        )
        latents = step.next_latents
        if index < num_recorded:
            recorded.append(latents)
            if step.log_prob is not None:
                log_probs.append(step.log_prob)
    return SampledPath(
        latents=torch.stack(recorded, dim=1),
        final_latents=latents,
        log_probs=torch.stack(log_probs, dim=1) if log_probs else None,
    )


@torch.no_grad()
def sample_ode(velocity: VelocityFunction, latents: Tensor, sigmas: Tensor) -> Tensor:
    """Denoise with Euler's method on the probability-flow ODE; returns final latents [B, ...], float32.

    Equals diffusers' `FlowMatchEulerDiscreteScheduler` on the same sigmas [T+1].
    """
    latents = latents.float()
    for sigma, next_sigma in zip(sigmas[:-1], sigmas[1:], strict=True):
        latents = latents + velocity(latents, sigma.expand(len(latents))).float() * (next_sigma - sigma)
    return latents
