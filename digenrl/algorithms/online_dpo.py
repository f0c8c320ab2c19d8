"""Online direct preference optimization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.algorithms.checks import check_beta, check_guidance_is_used
from digenrl.algorithms.forward_process import ForwardProcessModule
from digenrl.averaging import NoUpdates
from digenrl.functional import mean_square, pair_preference_loss, preference_pairs
from digenrl.module import AdvantageSettings
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import JoinedReward, Reward
from digenrl.types import PromptBatch, TimestepBatch, derive_seed

_REFERENCE = "reference"
_PAIR = 2
# By the names of the constructor: what changes the size of advantages, but not the order of one reward.
_SCALES = {
    "normalize_by_std": "normalize_by_std",
    "advantage_scope": "scope",
    "advantage_ddof": "ddof",
    "advantage_eps": "eps",
}


class OnlineDPO(ForwardProcessModule):
    """Online DPO: the loss of Diffusion-DPO (arXiv:2311.12908) on pairs that the policy has made itself.

    Of each group the best sample is preferred to the worst. Both are noised alike, and their timestep is drawn for each
    pair. A group whose samples are all worth the same has no pair; it counts in the mean over pairs, with loss 0.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 4,
        num_steps: int = 40,
        beta: float = 2000.0,
        timestep_density: Literal["logit_normal", "uniform"] = "logit_normal",
        solver: Literal["euler", "dpm"] = "euler",
        num_trained_timesteps: int = 1,
        first_trained_timestep: int = 0,
        last_trained_timestep: int | None = None,
        lr: float = 1e-5,
        **settings: Any,
    ) -> None:
        """Defaults are Flow-Factory's SD3.5-M setting; beta is Diffusion-DPO's order of magnitude.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            beta: sharpness of the preference; 50 to 2000 are used.
            timestep_density: how often a place of the schedule is drawn: `"logit_normal"` prefers its middle, as SD3's
                training does, where place i of n has the probability that sigmoid(z) n is in [i, i + 1) for a standard
                normal z; `"uniform"` draws all alike.
            solver: see `ForwardProcessModule`, as for the next three.
            num_trained_timesteps: see there; drawn for each pair, without replacement.
            first_trained_timestep: see there.
            last_trained_timestep: see there.
            lr: see `DiffusionRLModule`.
            **settings: see there. `guidance_scale` is the rollouts'; policy and reference run without in the loss. Only
                with several rewards do `normalize_by_std` and `advantage_*` count, and `advantage_clip` never.

        Raises:
            ValueError: a setting outside its bounds, or one that would change nothing.
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
            noise_of="group",
            timesteps_of="step",  # not read: `select_timesteps` draws for each group
            lr=lr,
            **settings,
        )
        self._check_advantages_are_an_order()
        check_beta(beta, "how sharp a preference is")
        check_guidance_is_used(self, self.guidance_scale)
        if timestep_density not in ("logit_normal", "uniform"):
            raise ValueError(f"`timestep_density` must be logit_normal or uniform, got {timestep_density!r}.")
        self.beta = beta
        self.timestep_density = timestep_density
        self.add_weight_copy(_REFERENCE, NoUpdates())

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Give 1 to the best sample of each group, -1 to the worst, and 0 to the others: only the order counts, [B].

        Of several rewards, the sum of the advantages decides. Of equal samples the first counts, and where all of a
        group are equal, all have 0.
        """
        scores = rewards = self.compared_rewards(rewards)
        if rewards.ndim == 2:
            scores = self.join_advantages(self.advantage_settings.compare(rewards, group_ids))
        pairs = preference_pairs(scores, group_ids)
        signs = torch.zeros(len(rewards), device=scores.device)
        signs[pairs[:, 0]], signs[pairs[:, 1]] = 1.0, -1.0
        return signs

    @property
    def num_trained_samples(self) -> int:
        """The two of a pair."""
        return _PAIR

    def select_samples(self, rewards: Tensor, advantages: Tensor, group_ids: Tensor) -> Sequence[int]:
        """Keep the pair of each group, or its first two samples if it has none."""
        rows = []
        for group in group_ids.unique():
            members = (group_ids == group).nonzero().flatten()
            pair = members[advantages[members] != 0]
            rows += (pair if len(pair) else members[:_PAIR]).tolist()
        return sorted(rows)

    def select_timesteps(self, prompts: PromptBatch) -> Tensor:
        """Draw the timesteps of each group, [B, k]."""
        drawn = {group: self._draw(prompts.step, group) for group in sorted(set(prompts.group_ids))}
        timesteps = [drawn[group] for group in prompts.group_ids]
        return torch.tensor(timesteps, dtype=torch.int64).reshape(-1, self.num_trained_timesteps)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give each row its share of -log sigmoid(-beta / 2 margin), so that the mean over rows is that over pairs."""
        rows = self.noised(batch)
        distance = mean_square(self.velocity(self.policy, rows, batch) - rows.target)
        reference_distance = self.distance(self.policy_copy(_REFERENCE), rows, batch)
        self.track("preference/margin", batch.advantages * (reference_distance - distance.detach()))
        return _PAIR * pair_preference_loss(
            distance,
            reference_distance,
            batch.advantages,
            batch.group_index,
            beta=self.beta,
            group_sum=self.group_sum,
        )

    def _check_advantages_are_an_order(self) -> None:
        unread = {"advantage_clip": "clip"}
        if not isinstance(self.reward, JoinedReward):
            unread |= _SCALES
        for name, field in unread.items():
            value, default = (getattr(settings, field) for settings in (self.advantage_settings, AdvantageSettings()))
            if value != default:
                raise ValueError(
                    f"`{name}` must be left at {default} with OnlineDPO, got {value}: only the order of a group's "
                    "samples counts, which it does not change."
                )

    def _draw(self, step: int, group: int) -> list[int]:
        num_available = self._num_available_timesteps
        bounds = torch.linspace(0, 1, num_available + 1, dtype=torch.float64)
        if self.timestep_density == "logit_normal":
            bounds = torch.special.ndtr(bounds.logit())
        rng = torch.Generator().manual_seed(derive_seed(self.seed, "timesteps", step, group))
        chosen = torch.multinomial(bounds.diff(), self.num_trained_timesteps, generator=rng)
        return (self.first_trained_timestep + chosen).tolist()
