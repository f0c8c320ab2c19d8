"""Several rewards for one sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.rewards.reward import JoinedReward, Reward, compute_rewards, reward_name
from digenrl.types import PromptBatch


class SeveralRewards(JoinedReward):
    """Asks several rewards and keeps them apart: [B, R].

    What becomes of them is the algorithm's: by default each reward is compared with its own kind and their advantages
    are added up, so that no reward outweighs the others by its scale.

    Example:
        >>> def bright(media, prompts): return media.flatten(1).mean(1)
        >>> def calm(media, prompts): return -media.flatten(1).std(1)
        >>> SeveralRewards([bright, calm], weights=[1.0, 0.5]).names
        ('bright', 'calm')
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
        """Join `rewards`.

        Args:
            rewards: two or more; names must differ, as metrics are named after them.
            weights: one per reward, at least 0 and not all 0; they count relative to each other. None is equal ones.

        Raises:
            ValueError: too few rewards, two of one name, or weights that do not fit.
        """
        weights = [1.0] * len(rewards) if weights is None else list(weights)
        self.rewards = tuple(rewards)
        self.names = tuple(reward_name(reward) for reward in rewards)
        self.weights = tuple(float(weight) for weight in weights)
        if len(self.rewards) < 2:
            raise ValueError(f"`rewards` must be at least two, got {len(self.rewards)}; give a single one as it is.")
        for reward in self.rewards:
            if not callable(reward):
                raise ValueError(f"`rewards` must be callable as reward(media, prompts), got {reward!r}.")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"`rewards` must have names of their own, got `{twice[0]}` twice.")
        if len(self.weights) != len(self.rewards):
            raise ValueError(f"`weights` must be one per reward, {len(self.rewards)}, got {len(self.weights)}.")
        if any(not 0 <= weight < math.inf for weight in self.weights) or not any(self.weights):
            raise ValueError(f"`weights` must be finite, at least 0 and not all 0, got {list(self.weights)}.")

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        """Ask each reward about B samples: [B, R]."""
        return torch.stack([compute_rewards(reward, media, prompts) for reward in self.rewards], dim=1)
