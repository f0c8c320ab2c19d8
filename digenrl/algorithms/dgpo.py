"""Direct group preference optimization."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.algorithms.checks import (
    check_beta,
    check_clip_range,
    check_guidance_is_used,
    check_has_effect,
    check_kl_weights,
)
from digenrl.algorithms.forward_process import ForwardProcessModule, make_decay
from digenrl.averaging import NoUpdates
from digenrl.functional import group_preference_loss, is_clipped, mean_square
from digenrl.module import check_guidance
from digenrl.policies import DiffusionPolicy, VelocityField
from digenrl.rewards import Reward
from digenrl.types import TimestepBatch

_OLD, _REFERENCE = "old", "reference"


class DGPO(ForwardProcessModule):
    """DGPO: direct group preference optimization (arXiv:2510.08425).

    The better part of a group is preferred to the worse part, weighted by advantages, with no log-probs and so with a
    deterministic sampler. `old`, an average that follows the weights closely, clips the loss and makes the samples from
    some step on; the reference is the policy that training started from, or `old`.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 10,
        beta: float = 100.0,
        clip_range: float = 1e-2,
        kl_beta: float = 0.0,
        clips_kl: bool = False,
        reference: Literal["start", "old"] = "start",
        reference_guidance_scale: float = 1.0,
        old_rate: float = 0.001,
        old_cap: float = 0.3,
        old_rollout_from: int | None = 200,
        solver: Literal["euler", "dpm"] = "dpm",
        num_trained_timesteps: int = 4,
        last_trained_timestep: int | None = None,
        lr: float = 3e-4,
        **settings: Any,
    ) -> None:
        """Defaults are close to the authors' SD3.5-M settings.

        These differ in the group size, mostly 16, in the guidance, 4.5, in `kl_beta`, 0.02 and 0.001, in
        `last_trained_timestep`, 4 and 6, in the average that is validated, of `ema_decay` 0.9, and some in the
        advantages' std, which is the step's.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            beta: sharpness of the preference.
            clip_range: how far exp(old distance - distance) may leave 1 before a row's gradient is cut.
            kl_beta: weight of the squared difference between the velocity and that of the policy that training started
                from, whatever the reference is; 0 is without.
            clips_kl: let rows whose gradient is cut have no gradient from that term either.
            reference: the policy that training started from, or the `"old"` average; `beta` is then 2000 and more.
            reference_guidance_scale: classifier-free guidance of the reference in the loss; 1 is without.
            old_rate: growth of `old`'s decay per optimizer step.
            old_cap: largest decay.
            old_rollout_from: optimizer step from which on `old` makes the samples; None is never.
            solver: see `ForwardProcessModule`, as for the next two.
            num_trained_timesteps: see there.
            last_trained_timestep: see there.
            lr: see `DiffusionRLModule`.
            **settings: see there. `guidance_scale` is the rollouts'; the trained policy runs without.

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
            noise_of="group",
            timesteps_of="step",
            lr=lr,
            **settings,
        )
        check_beta(beta, "how sharp a preference is")
        check_clip_range(clip_range)
        check_kl_weights(kl_beta=kl_beta)
        if kl_beta == 0:
            check_has_effect("`kl_beta` 0", clips_kl=(clips_kl, False))
        if reference not in ("start", "old"):
            raise ValueError(f"`reference` must be start or old, got {reference!r}.")
        check_guidance("reference_guidance_scale", reference_guidance_scale, policy)
        if old_rollout_from is not None and old_rollout_from < 0:
            raise ValueError(f"`old_rollout_from` is a step and must be at least 0, got {old_rollout_from}.")
        if old_rollout_from is not None and self.updates_per_rollout > 1:
            raise ValueError(
                f"`updates_per_rollout` must be 1 where `old` makes the samples, got {self.updates_per_rollout}: it "
                "changes with every step; or set `old_rollout_from` to null."
            )
        self.beta = beta
        self.clip_range = clip_range
        self.kl_beta = kl_beta
        self.clips_kl = clips_kl
        self.reference_guidance_scale = reference_guidance_scale
        check_guidance_is_used(self, self.guidance_scale, reference_guidance_scale)
        self.old_rollout_from = old_rollout_from
        self._reference_name = _OLD if reference == "old" else _REFERENCE
        old_schedule = make_decay(_OLD, rate=old_rate, cap=old_cap)
        self.add_weight_copy(_OLD, old_schedule, for_rollout=old_rollout_from is not None)
        if reference == "start" or kl_beta > 0:
            self.add_weight_copy(_REFERENCE, NoUpdates())

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        """Those of rollouts, and of the reference."""
        return (*super().guidance_scales, self.reference_guidance_scale)

    @property
    def rollout_policy(self) -> VelocityField:
        """The policy, and from `old_rollout_from` on the old one."""
        old = self.policy_copy(_OLD)
        if self.old_rollout_from is not None and int(old.num_steps) >= self.old_rollout_from:
            return old
        return super().rollout_policy

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give sigmoid(S) A d per row, with the margin S of its group, and the distance to the reference."""
        rows = self.noised(batch)
        velocity = self.velocity(self.policy, rows, batch)
        distance = mean_square(velocity - rows.target)
        reference_velocity = self.velocity(self._guided_copy(self._reference_name), rows, batch)
        old_distance = self.distance(self.policy_copy(_OLD), rows, batch)
        clipped = is_clipped((old_distance - distance.detach()).exp(), batch.advantages, clip_range=self.clip_range)
        self.track("ratio/clip_frac", clipped.float())
        losses = group_preference_loss(
            distance,
            mean_square(reference_velocity - rows.target),
            old_distance,
            batch.advantages,
            batch.group_index,
            beta=self.beta,
            clip_range=self.clip_range,
            advantage_clip=torch.inf,
            group_mean=self.group_mean,
        )
        if self.kl_beta == 0:
            return losses
        if self._reference_name != _REFERENCE:
            reference_velocity = self.velocity(self._guided_copy(_REFERENCE), rows, batch)
        divergence = mean_square(velocity - reference_velocity)
        self.track("kl", divergence.detach())
        if self.clips_kl:
            divergence = torch.where(clipped, divergence.detach(), divergence)
        return losses + self.kl_beta * divergence

    def _guided_copy(self, name: str) -> VelocityField:
        return self.guided(self.policy_copy(name), scale=self.reference_guidance_scale)
