"""Centered reward distillation."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from digenrl.algorithms.checks import (
    check_finite_advantage_clip,
    check_guidance_is_used,
    check_has_effect,
    check_kl_weights,
)
from digenrl.algorithms.forward_process import ForwardProcessModule, make_decay
from digenrl.averaging import EveryNth, NoUpdates
from digenrl.functional import adaptive_mean_square, crd_kl_weight, crd_loss, mean_square, reward_probability
from digenrl.module import check_guidance
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import TimestepBatch

_OLD, _SAMPLER, _REFERENCE = "old", "sampler", "reference"
_KL_FLOOR = 1e-4  # of the public code: weight of the divergence where a sample is certainly bad


class CRD(ForwardProcessModule):
    """CRD: centered reward distillation (arXiv:2603.14128).

    How much closer than the old policy the policy is to a sample's target says what reward it implies, up to a constant
    of the prompt. Within a group both this and the true reward are centred, which removes the constant, and then
    regressed on each other. Two averages follow the weights apart: `old` in the loss, and `sampler`, which makes the
    samples. The divergence to the guided policy that training started from is the heavier the better a sample is.

    Rows are centred with their group at their timestep. Public code centres over a micro-batch instead, whatever groups
    it holds, so that its gradient depends on how the step is cut; there is no such option here.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 10,
        adaptive_distance: bool = True,
        kl_beta: float = 0.1,
        reference_guidance_scale: float = 1.0,
        old_start: float = 0.25,
        old_rate: float = 0.005,
        old_cap: float = 0.999,
        sampler_rate: float = 0.0075,
        sampler_cap: float = 0.999,
        sampler_flat: int = 75,
        solver: Literal["euler", "dpm"] = "euler",
        num_trained_timesteps: int = 9,
        last_trained_timestep: int | None = None,
        lr: float = 3e-4,
        **settings: Any,
    ) -> None:
        """Defaults are Flow-Factory's SD3.5-M setting, but for updates per rollout, timesteps and the group's own std.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            adaptive_distance: divide the distance to the target by its mean absolute value (`adaptive_mean_square`).
            kl_beta: weight of the squared difference between the velocity and the reference's for a sample that is
                certainly good; 0 is without.
            reference_guidance_scale: classifier-free guidance of the reference in the loss; 1 is without, and
                Flow-Factory has 4.5.
            old_start: first decay of `old`.
            old_rate: growth of `old`'s decay per optimizer step; it changes once per rollout.
            old_cap: largest decay of `old`.
            sampler_rate: growth of the decay of the average that makes the samples, per optimizer step; it changes once
                per rollout.
            sampler_cap: its largest decay.
            sampler_flat: optimizer steps before its decay grows; until then the newest weights make the samples.
            solver: see `ForwardProcessModule`, as for the next two.
            num_trained_timesteps: see there.
            last_trained_timestep: see there.
            lr: see `DiffusionRLModule`.
            **settings: see there. `advantage_clip` is the advantage of a sample that is certainly good.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(
            policy,
            reward,
            group_size=group_size,
            num_steps=num_steps,
            solver=solver,
            num_trained_timesteps=num_trained_timesteps,
            last_trained_timestep=last_trained_timestep,
            noise_of="sample",
            timesteps_of="step",
            lr=lr,
            **settings,
        )
        check_kl_weights(kl_beta=kl_beta)
        if kl_beta == 0:
            check_has_effect("`kl_beta` 0", reference_guidance_scale=(reference_guidance_scale, 1.0))
        check_guidance("reference_guidance_scale", reference_guidance_scale, policy)
        check_finite_advantage_clip(self.advantage_settings.clip)
        self.adaptive_distance = adaptive_distance
        self.kl_beta = kl_beta
        self.reference_guidance_scale = reference_guidance_scale
        check_guidance_is_used(self, self.guidance_scale, reference_guidance_scale)
        old_schedule = make_decay(_OLD, rate=old_rate, cap=old_cap, start=old_start)
        self.add_weight_copy(_OLD, EveryNth(old_schedule, self.updates_per_rollout))
        sampler_schedule = make_decay(_SAMPLER, rate=sampler_rate, cap=sampler_cap, flat=sampler_flat)
        self.add_sampler(_SAMPLER, sampler_schedule)
        if kl_beta > 0:
            self.add_weight_copy(_REFERENCE, NoUpdates())

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        """Those of rollouts, and of the reference."""
        return (*super().guidance_scales, self.reference_guidance_scale)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give c ((rho - mean rho) - (a - mean a))^2 per row, see `crd_loss`, and the distance to the reference."""
        rows = self.noised(batch)
        velocity = self.velocity(self.policy, rows, batch)
        old_velocity = self.velocity(self.policy_copy(_OLD), rows, batch)
        distance_of = adaptive_mean_square if self.adaptive_distance else mean_square
        distance, old_distance = (distance_of(v - rows.target) for v in (velocity, old_velocity))
        self.track("implicit_reward", old_distance - distance.detach())
        probability = reward_probability(batch.advantages, advantage_clip=self.advantage_settings.clip)
        losses = crd_loss(
            distance,
            old_distance,
            probability,
            batch.group_index,
            advantage_clip=self.advantage_settings.clip,
            center_mean=self.group_mean,
        )
        if self.kl_beta == 0:
            return losses
        reference = self.guided(self.policy_copy(_REFERENCE), scale=self.reference_guidance_scale)
        divergence = self.divergence(velocity, reference, rows, batch)
        self.track("kl", divergence.detach())
        weight = crd_kl_weight(probability, kl_beta=self.kl_beta, kl_floor=min(_KL_FLOOR, self.kl_beta))
        return losses + weight * divergence
