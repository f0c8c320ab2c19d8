"""What algorithms have in common that train on the forward process: noised samples instead of recorded steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.algorithms.checks import check_schedule
from digenrl.averaging import RampDecay
from digenrl.diffusion.windows import random_timesteps, shared_timesteps
from digenrl.functional import mean_square, noised_latents
from digenrl.module import DiffusionRLModule, Solver
from digenrl.policies import DiffusionPolicy, VelocityField
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, TimestepBatch, Trajectory


@dataclass(frozen=True)
class NoisedRows:
    """Final latents of N rows, noised to each row's sigma."""

    latents: Tensor  # [N, ...] at sigma
    target: Tensor  # [N, ...] the velocity there that leads back to the sample, noise - final latents


class ForwardProcessModule(DiffusionRLModule):
    """Base of algorithms whose loss needs a sample's final latents only.

    Rollouts solve the ODE, keep no steps and no log-probs. In training a sample is noised anew to some sigmas of the
    schedule, and the policy is asked for the velocity there.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        solver: Solver = "euler",
        timesteps_of: Literal["step", "sample"] = "step",
        num_trained_timesteps: int = 4,
        first_trained_timestep: int = 0,
        last_trained_timestep: int | None = None,
        noise_of: Literal["group", "sample"] = "sample",
        **settings: Any,
    ) -> None:
        """Check the settings.

        Args:
            policy: see `DiffusionRLModule`, as for `settings`.
            reward: see there.
            solver: of the ODE in rollouts: `"euler"`, or `"dpm"` for DPM-Solver++ 2M.
            timesteps_of: whether trained timesteps are drawn for the training `"step"`, shared by its samples, or for
                each `"sample"`.
            num_trained_timesteps: timesteps that a sample is trained at, drawn without replacement.
            first_trained_timestep: index of the first that may be drawn; 0 is the noisiest.
            last_trained_timestep: index of the last that may be drawn; None is the last of the schedule.
            noise_of: whether the samples of a `"group"` share the noise at a timestep, or each `"sample"` has its own.
            **settings: see there, all but `timestep_fraction`.

        Raises:
            ValueError: a setting outside its bounds.
        """
        if "timestep_fraction" in settings:
            raise ValueError(
                f"`timestep_fraction` {settings['timestep_fraction']} does not apply to {type(self).__name__}: set "
                "`num_trained_timesteps`."
            )
        super().__init__(policy, reward, timestep_fraction=1.0, **settings)
        check_schedule(self)
        if solver not in ("euler", "dpm"):
            raise ValueError(f"`solver` must be euler or dpm, got {solver!r}.")
        if timesteps_of not in ("step", "sample"):
            raise ValueError(f"`timesteps_of` must be step or sample, got {timesteps_of!r}.")
        if noise_of not in ("group", "sample"):
            raise ValueError(f"`noise_of` must be group or sample, got {noise_of!r}.")
        last = self.num_steps - 1 if last_trained_timestep is None else last_trained_timestep
        if not 0 <= last < self.num_steps:
            raise ValueError(
                f"`last_trained_timestep` must be one of the {self.num_steps} steps, in [0, {self.num_steps - 1}], "
                f"got {last}."
            )
        if not 0 <= first_trained_timestep <= last:
            raise ValueError(
                f"`first_trained_timestep` must not be after the last that may be drawn, in [0, {last}], "
                f"got {first_trained_timestep}."
            )
        num_available = last + 1 - first_trained_timestep
        if not 1 <= num_trained_timesteps <= num_available:
            raise ValueError(
                f"`num_trained_timesteps` are drawn from steps {first_trained_timestep} to {last} and must be in "
                f"[1, {num_available}], got {num_trained_timesteps}."
            )
        self.solver: Solver = solver
        self.timesteps_of = timesteps_of
        self.noise_of: Literal["group", "sample"] = noise_of
        self.num_trained_timesteps = num_trained_timesteps
        self.first_trained_timestep = first_trained_timestep
        self._num_available_timesteps = num_available

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Solve the ODE and keep the final latents."""
        return self.sample_final_latents(prompts, solver=self.solver)

    def select_timesteps(self, prompts: PromptBatch) -> Tensor:
        """Draw the trained timesteps, uniformly and without replacement: [B, k]."""
        draw = {"num_available": self._num_available_timesteps, "num_chosen": self.num_trained_timesteps}
        if self.timesteps_of == "sample":
            drawn = random_timesteps(prompts.seeds, **draw)
        else:
            drawn = shared_timesteps(prompts.step, seed=self.seed, **draw).expand(len(prompts), -1)
        return self.first_trained_timestep + drawn

    def noised(self, batch: TimestepBatch) -> NoisedRows:
        """Noise the samples to the rows' sigmas."""
        noise = self.training_noise(batch, shared=self.noise_of)
        latents = noised_latents(batch.final_latents, noise, batch.sigma)
        return NoisedRows(latents, noise - batch.final_latents)

    def velocity(self, policy: VelocityField, rows: NoisedRows, batch: TimestepBatch) -> Tensor:
        """Ask a policy, or a copy of one, for its velocity at the noised samples: [N, ...] in float32 or wider."""
        velocity = policy(rows.latents, batch.sigma, batch.condition)
        return velocity.to(torch.promote_types(velocity.dtype, torch.float32))

    def distance(self, policy: VelocityField, rows: NoisedRows, batch: TimestepBatch) -> Tensor:
        """Give the mean square between a policy's velocity and the target, [N]."""
        return mean_square(self.velocity(policy, rows, batch) - rows.target)

    def divergence(self, velocity: Tensor, policy: VelocityField, rows: NoisedRows, batch: TimestepBatch) -> Tensor:
        """Give the mean square between a velocity [N, ...] and another policy's, [N], a KL divergence in kind."""
        return mean_square(velocity - self.velocity(policy, rows, batch))


def make_decay(prefix: str, **fields: Any) -> RampDecay:
    """Make a schedule from a constructor's arguments, which are named by a prefix and the field.

    Raises:
        ValueError: a field outside its bounds, by the name of the argument.
    """
    try:
        return RampDecay(**fields)
    except ValueError as error:
        raise ValueError(str(error).replace("`", f"`{prefix}_", 1)) from error
