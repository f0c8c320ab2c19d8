"""DiffusionNFT."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from digenrl.algorithms.checks import (
    check_beta,
    check_finite_advantage_clip,
    check_guidance_is_used,
    check_kl_weights,
)
from digenrl.algorithms.forward_process import ForwardProcessModule, make_decay
from digenrl.averaging import NoUpdates
from digenrl.functional import mean_square, nft_loss, reward_probability
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import TimestepBatch

_OLD, _REFERENCE = "old", "reference"


class DiffusionNFT(ForwardProcessModule):
    """DiffusionNFT: negative-aware fine-tuning on the forward process (arXiv:2509.16117).

    Two velocities lie on the line through the old policy's and the policy's: one is drawn to good samples, the other,
    on the far side of the old policy, to bad ones. `old`, an average that follows the weights, makes the samples too.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 10,
        beta: float = 1.0,
        kl_beta: float = 1e-4,
        old_rate: float = 0.001,
        old_cap: float = 0.5,
        old_flat: int = 0,
        solver: Literal["euler", "dpm"] = "dpm",
        num_trained_timesteps: int = 9,
        last_trained_timestep: int | None = None,
        lr: float = 3e-4,
        **settings: Any,
    ) -> None:
        """Defaults are the authors' SD3.5-M setting, but for the advantages' std, which is the group's own.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            beta: how far the two velocities are from the old policy's; published ones are 1 and 0.1.
            kl_beta: weight of the squared difference between the velocity and that of the policy that training started
                from; 0 is without.
            old_rate: growth of `old`'s decay per optimizer step; it changes once per rollout.
            old_cap: largest decay.
            old_flat: optimizer steps before the decay grows. Another published setting is 75 with rate 0.0075 and cap
                0.999.
            solver: see `ForwardProcessModule`, as for the next two.
            num_trained_timesteps: see there; each sample has its own.
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
            timesteps_of="sample",
            lr=lr,
            **settings,
        )
        check_beta(beta, "the distance from the old policy")
        check_kl_weights(kl_beta=kl_beta)
        check_guidance_is_used(self, self.guidance_scale)
        check_finite_advantage_clip(self.advantage_settings.clip)
        self.beta = beta
        self.kl_beta = kl_beta
        self.add_sampler(_OLD, make_decay(_OLD, rate=old_rate, cap=old_cap, flat=old_flat))
        if kl_beta > 0:
            self.add_weight_copy(_REFERENCE, NoUpdates())

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give c (p L(v+) + (1 - p) L(v-)) / beta per row, see `nft_loss`, and the distance to the reference."""
        rows = self.noised(batch)
        velocity = self.velocity(self.policy, rows, batch)
        old_velocity = self.velocity(self.policy_copy(_OLD), rows, batch)
        self.track("old/divergence", mean_square(velocity.detach() - old_velocity))
        losses = nft_loss(
            velocity,
            old_velocity,
            rows.latents,
            batch.sigma,
            batch.final_latents,
            reward_probability(batch.advantages, advantage_clip=self.advantage_settings.clip),
            beta=self.beta,
            advantage_clip=self.advantage_settings.clip,
        )
        if self.kl_beta == 0:
            return losses
        divergence = self.divergence(velocity, self.policy_copy(_REFERENCE), rows, batch)
        self.track("kl", divergence.detach())
        return losses + self.kl_beta * divergence
