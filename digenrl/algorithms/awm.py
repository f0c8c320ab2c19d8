"""Advantage weighted matching."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from digenrl.algorithms.checks import (
    check_clip_range,
    check_guidance_is_used,
    check_has_effect,
    check_kl_weights,
)
from digenrl.algorithms.forward_process import ForwardProcessModule, NoisedRows, make_decay
from digenrl.averaging import NoUpdates
from digenrl.functional import clipped_surrogate, matching_log_prob, mean_square
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import RowLosses, TimestepBatch

Weighting = Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"]
_CLIP_RANGE, _AVERAGE_RATE, _AVERAGE_CAP = 1e-2, 0.001, 0.3
_AVERAGE, _REFERENCE = "average", "reference"


class AWM(ForwardProcessModule):
    """AWM: advantage weighted matching (arXiv:2509.25050).

    The loss of pretraining, weighted by advantages: minus the distance to the target stands for a log-prob in PPO's
    clipped surrogate. In the first update after a rollout the ratio is 1; with `updates_per_rollout` the later ones
    compare with the weights that the round began with. Samples that `staleness` lets be made one step early are trained
    as if the newest weights had made them, with ratio 1.
    """

    advantages_scale_gradient: ClassVar[bool] = True

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 14,
        weighting: Weighting = "ghuber",
        clip_range: float = _CLIP_RANGE,
        kl_beta: float = 0.015,
        average_kl_beta: float = 5.0,
        average_rate: float = _AVERAGE_RATE,
        average_cap: float = _AVERAGE_CAP,
        solver: Literal["euler", "dpm"] = "dpm",
        num_trained_timesteps: int = 6,
        first_trained_timestep: int = 1,
        last_trained_timestep: int | None = None,
        lr: float = 3e-4,
        **settings: Any,
    ) -> None:
        """Defaults are close to the authors' SD3.5-M setting.

        They differ in the advantages' std, which is the group's own, in the solver, and in the clip range: with
        theirs, 1, hardly a ratio is clipped. The authors divide advantages by 5, so that their weights of divergences,
        0.003 and 1, are five times as large here.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            weighting: what a distance counts, see `matching_log_prob`.
            clip_range: how far the ratio may leave 1 before its gradient is cut, with an `updates_per_rollout` above 1.
            kl_beta: weight of the squared difference between the velocity and that of the policy that training started
                from; 0 is without.
            average_kl_beta: the same to an average of the weights, which keeps single steps small; 0 is without.
            average_rate: growth of the average's decay per optimizer step.
            average_cap: largest decay.
            solver: see `ForwardProcessModule`, as for the next three.
            num_trained_timesteps: see there.
            first_trained_timestep: see there.
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
            first_trained_timestep=first_trained_timestep,
            last_trained_timestep=last_trained_timestep,
            noise_of="sample",
            timesteps_of="step",
            lr=lr,
            **settings,
        )
        if weighting not in get_args(Weighting):
            raise ValueError(f"`weighting` must be one of {', '.join(get_args(Weighting))}, got {weighting!r}.")
        check_clip_range(clip_range)
        check_kl_weights(kl_beta=kl_beta, average_kl_beta=average_kl_beta)
        check_guidance_is_used(self, self.guidance_scale)
        if self.updates_per_rollout == 1:
            check_has_effect("`updates_per_rollout` 1", clip_range=(clip_range, _CLIP_RANGE))
        if average_kl_beta == 0:
            rate, cap = (average_rate, _AVERAGE_RATE), (average_cap, _AVERAGE_CAP)
            check_has_effect("`average_kl_beta` 0", average_rate=rate, average_cap=cap)
        self.weighting: Weighting = weighting
        self.clip_range = clip_range
        self.kl_betas = {_REFERENCE: kl_beta, _AVERAGE: average_kl_beta}
        if kl_beta > 0:
            self.add_weight_copy(_REFERENCE, NoUpdates())
        if average_kl_beta > 0:
            self.add_weight_copy(_AVERAGE, make_decay(_AVERAGE, rate=average_rate, cap=average_cap))

    def timestep_loss(self, batch: TimestepBatch) -> Tensor | RowLosses:
        """PPO's clipped surrogate of the distance to the target, and the divergences that have a weight."""
        rows = self.noised(batch)
        velocity = self.velocity(self.policy, rows, batch)
        log_prob = self.log_prob(mean_square(velocity - rows.target), batch)
        old_log_prob = log_prob.detach()
        if self.updates_per_rollout > 1:
            old_log_prob = self.log_prob(self.distance(self.rollout_policy, rows, batch), batch)
        deviation = ((log_prob.detach() - old_log_prob).exp() - 1).abs()
        self.track("ratio/max_abs_dev", deviation, reduction="max")
        self.track("ratio/clip_frac", (deviation > self.clip_range).float())
        losses = clipped_surrogate(
            log_prob, old_log_prob, batch.advantages, clip_range=self.clip_range, advantage_clip=torch.inf
        )
        regularizer = self._regularizer(velocity, rows, batch)
        return losses if regularizer is None else RowLosses(losses, regularizer)

    def log_prob(self, distance: Tensor, batch: TimestepBatch) -> Tensor:
        """Give what stands for the log-prob of samples at these distances [N] from their targets, [N] float64."""
        return matching_log_prob(distance, batch.sigma, weighting=self.weighting)

    def _regularizer(self, velocity: Tensor, rows: NoisedRows, batch: TimestepBatch) -> Tensor | None:
        total: Tensor | None = None
        for name, weight in self.kl_betas.items():
            if weight > 0:
                divergence = self.divergence(velocity, self.policy_copy(name), rows, batch)
                self.track(f"kl/{name}", divergence.detach())
                total = weight * divergence if total is None else total + weight * divergence
        return total
