"""Samplers: one function over a schedule of sigmas each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from digenrl.diffusion.kernels import Euler, Kernel, KernelStep
from digenrl.diffusion.noise import sample_noise

VelocityFunction = Callable[[Tensor, Tensor], Tensor]
"""(latents [B, ...], sigma [B]) -> velocity [B, ...]"""


@dataclass(frozen=True)
class SampledPath:
    """A stochastic rollout's recorded stretch."""

    latents: Tensor  # [B, K+1, ...] float32
    final_latents: Tensor  # [B, ...] float32
    log_probs: Tensor | None  # [B, K] float32; None if the kernel is deterministic
    means: Tensor | None = None  # [B, K, ...] float32 of the next latents; None if they were not asked for


@torch.no_grad()
def sample_sde(
    velocity: VelocityFunction,
    latents: Tensor,
    sigmas: Tensor,
    kernel: Kernel,
    *,
    seeds: Sequence[int],
    recorded: range,
    sde_steps: range | None = None,
    tail_sigmas: Tensor | None = None,
    keep_means: bool = False,
    final: Literal["latents", "prediction"] = "latents",
    scored_velocity: VelocityFunction | None = None,
) -> SampledPath:
    """Denoise with `kernel`, everywhere or in a window of steps, and record some consecutive steps.

    Everywhere is Flow-GRPO (arXiv:2505.05470, eq. 9) and DanceGRPO (arXiv:2505.07818); Euler's steps around
    a window are Flow-GRPO-Fast and MixGRPO (arXiv:2507.21802), and `tail_sigmas` is MixGRPO-Flash.

    Args:
        velocity: the policy.
        latents: [B, ...] noise at `sigmas[0]`.
        sigmas: [T+1] falling to 0.
        kernel: the conditional distribution of a step in `sde_steps`.
        seeds: [B] the samples' seeds; step i uses each sample's own stream `"step i"`.
        recorded: the K steps to keep, consecutive; all in `sde_steps` unless the kernel is deterministic.
        sde_steps: the consecutive steps that `kernel` makes, the others are Euler's; None is all T.
        tail_sigmas: [M+1] from `sigmas[sde_steps.stop]` to 0, a schedule that replaces the rest of `sigmas`
            and is solved by `sample_dpm_solver` (`compress_sigmas` makes one); None keeps `sigmas`.
        keep_means: whether to record the steps' means, which GRPO-Guard compares with those of the trainer.
        final: what `final_latents` are: the `"latents"` at sigma 0, or the last step's `"prediction"` of the
            data, latents - sigma velocity, which leaves out the noise of that step. DanceGRPO decodes it.
        scored_velocity: another velocity, under which the recorded steps have their log-probs and means: that of the
            policy without guidance, where it is trained so; None is `velocity`.

    Raises:
        ValueError: a range of steps or `tail_sigmas` does not fit `sigmas`, a recorded step has no log-prob,
            or `final` is unknown.
    """
    num_steps = len(sigmas) - 1
    sde_steps = range(num_steps) if sde_steps is None else sde_steps
    _check_steps("sde_steps", sde_steps, num_steps)
    num_kernel_steps = num_steps if tail_sigmas is None else sde_steps.stop
    _check_steps("recorded", recorded, num_kernel_steps)
    if not kernel.is_deterministic and not (recorded.start in sde_steps and recorded[-1] in sde_steps):
        raise ValueError(
            f"`recorded` steps need log-probs and must be in `sde_steps`, {sde_steps}, got {recorded}; "
            "the other steps are Euler's and have none."
        )
    if tail_sigmas is not None:
        _check_tail(tail_sigmas, sigmas[sde_steps.stop])
    if final not in ("latents", "prediction"):
        raise ValueError(f"`final` must be 'latents' or 'prediction', got {final!r}.")
    latents = latents.float()
    before: list[Tensor] = []
    steps: list[KernelStep] = []
    for index in range(num_kernel_steps):
        predicted = velocity(latents, sigmas[index].expand(len(latents))).float()
        chosen = kernel if index in sde_steps else Euler()
        is_scored = index in recorded and scored_velocity is None
        step = _step(latents, predicted, sigmas, index, chosen, seeds, needs_log_prob=is_scored)
        if index in recorded:
            if scored_velocity is not None:
                scored = scored_velocity(latents, sigmas[index].expand(len(latents))).float()
                step = _score(latents, scored, sigmas, index, kernel, step.next_latents)
            before.append(latents)
            steps.append(step)
        if index == num_steps - 1:
            prediction = latents - sigmas[index] * predicted
        latents = step.next_latents
    if tail_sigmas is not None:
        # The solver's last step goes to its prediction of the data.
        latents = prediction = sample_dpm_solver(velocity, latents, tail_sigmas)
    log_probs = [step.log_prob for step in steps if step.log_prob is not None]
    return SampledPath(
        latents=torch.stack([*before, steps[-1].next_latents], dim=1),
        final_latents=latents if final == "latents" else prediction,
        log_probs=torch.stack(log_probs, dim=1) if log_probs else None,
        means=torch.stack([step.mean for step in steps], dim=1) if keep_means else None,
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


@torch.no_grad()
def sample_dpm_solver(velocity: VelocityFunction, latents: Tensor, sigmas: Tensor) -> Tensor:
    """Denoise with DPM-Solver++ 2M (arXiv:2211.01095, algorithm 2); returns final latents [B, ...], float32.

    A deterministic multistep solver of second order that asks the policy once a step. With
    lambda = log((1 - sigma) / sigma), h = next lambda - lambda and h' = lambda - last lambda, a step is Euler's
    plus (1 - next_sigma / sigma) / 2 * h / h' * (predicted data - data predicted one step before). The first
    step and the one to sigma 0 are Euler's.

    Equals diffusers' `DPMSolverMultistepScheduler` with `use_flow_sigmas` (order 2, "dpmsolver++", "midpoint",
    `final_sigmas_type="zero"`) on the same sigmas [T+1].
    """
    latents = latents.float()
    log_snr = torch.logit(1 - sigmas.double())
    last_prediction: Tensor | None = None
    for index, (sigma, next_sigma) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        predicted = velocity(latents, sigma.expand(len(latents))).float()
        prediction = latents - sigma * predicted
        latents = latents + predicted * (next_sigma - sigma)
        if last_prediction is not None and next_sigma > 0:
            ratio = (log_snr[index + 1] - log_snr[index]) / (log_snr[index] - log_snr[index - 1])
            latents = latents + (1 - next_sigma / sigma) / 2 * ratio.float() * (prediction - last_prediction)
        last_prediction = prediction
    return latents


def _step(
    latents: Tensor,
    velocity: Tensor,
    sigmas: Tensor,
    index: int,
    kernel: Kernel,
    seeds: Sequence[int],
    *,
    needs_log_prob: bool,
) -> KernelStep:
    """Make one step of `kernel` with the samples' own noise."""
    noise = None
    if not kernel.is_deterministic:
        noise = sample_noise(seeds, f"step {index}", latents.shape[1:]).to(latents.device)
    sigma, next_sigma = sigmas[index : index + 2]
    return kernel.step(
        latents, velocity, sigma, next_sigma, sigma_max=sigmas[1], noise=noise, needs_log_prob=needs_log_prob
    )


def _score(
    latents: Tensor, velocity: Tensor, sigmas: Tensor, index: int, kernel: Kernel, next_latents: Tensor
) -> KernelStep:
    """Score a step that another velocity made."""
    sigma, next_sigma = sigmas[index : index + 2]
    return kernel.step(latents, velocity, sigma, next_sigma, sigma_max=sigmas[1], next_latents=next_latents)


def _check_steps(name: str, steps: range, stop: int) -> None:
    if not steps or steps.step != 1 or steps.start < 0 or steps.stop > stop:
        raise ValueError(
            f"`{name}` must be at least one step, consecutive and in range(0, {stop}), got {steps}; "
            "steps that `tail_sigmas` replaces do not count."
        )


def _check_tail(tail_sigmas: Tensor, first: Tensor) -> None:
    if len(tail_sigmas) < 2 or tail_sigmas[0] != first or tail_sigmas[-1] != 0 or (tail_sigmas.diff() >= 0).any():
        raise ValueError(
            f"`tail_sigmas` must fall from the sigma after `sde_steps`, {first:g}, to 0, got {tail_sigmas.tolist()}; "
            "`compress_sigmas` makes such a schedule."
        )
