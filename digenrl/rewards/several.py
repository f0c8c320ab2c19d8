"""Several rewards for one sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from digenrl.rewards.reward import JoinedReward, Reward, RewardTraits, reward_name
from digenrl.rewards.scoring import compute_rewards
from digenrl.types import PromptBatch


class SeveralRewards(JoinedReward):
    """Asks several rewards and keeps them apart: [B, R].

    By default each reward is compared with its own kind and their advantages are added up, so that no reward outweighs
    the others by its scale, and one that is the same for a whole group says nothing instead of hiding the others.
    DanceGRPO keeps the advantages apart and adds up a surrogate of each.

    Example:
        >>> def bright(media, prompts): return media.flatten(1).mean(1)
        >>> def calm(media, prompts): return -media.flatten(1).std(1)
        >>> SeveralRewards([bright, calm], weights=[1.0, 0.5]).names
        ('bright', 'calm')
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        weights: Sequence[float] | None = None,
        *,
        mode: Literal["normalize_then_sum", "sum"] = "normalize_then_sum",
    ) -> None:
        """Join `rewards`.

        Args:
            rewards: two or more; names must differ, as metrics are named after them.
            weights: one per reward, at least 0 and not all 0; they count relative to each other. None is equal ones.
            mode: `"normalize_then_sum"` compares each reward with its own kind, `"sum"` compares samples by the
                weighted sum of their rewards as they are: then scales count, and no algorithm keeps them apart.

        Raises:
            ValueError: too few rewards, one that cannot be joined, two of one name, or weights that do not fit.
        """
        weights = [1.0] * len(rewards) if weights is None else list(weights)
        self.rewards = tuple(rewards)
        self.names = tuple(reward_name(reward) for reward in rewards)
        self.weights = tuple(float(weight) for weight in weights)
        self.sums_raw_rewards = mode == "sum"
        if len(self.rewards) < 2:
            raise ValueError(f"`rewards` must be at least two, got {len(self.rewards)}; give a single one as it is.")
        for reward in self.rewards:
            if not callable(reward):
                raise ValueError(f"`rewards` must be callable as reward(media, prompts), got {reward!r}.")
            if isinstance(reward, JoinedReward):
                raise ValueError(
                    f"`rewards` must be single ones, got {reward_name(reward)} of {', '.join(reward.names)}: put all "
                    "into one list, with their weights."
                )
            RewardTraits.of(reward)
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"`rewards` must have names of their own, got `{twice[0]}` twice: give one a `name`.")
        if len(self.weights) != len(self.rewards):
            raise ValueError(f"`weights` must be one per reward, {len(self.rewards)}, got {len(self.weights)}.")
        if any(not 0 <= weight < math.inf for weight in self.weights) or not any(self.weights):
            raise ValueError(f"`weights` must be finite, at least 0 and not all 0, got {list(self.weights)}.")
        if mode not in ("normalize_then_sum", "sum"):
            raise ValueError(f"`mode` must be normalize_then_sum or sum, got {mode!r}.")

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        """Ask each reward about B samples: [B, R]."""
        return compute_rewards(self, media, prompts)
