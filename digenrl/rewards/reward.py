"""What a reward is, and the check that stands between a reward and the advantages."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from digenrl.types import PromptBatch

Reward = Callable[[Tensor, PromptBatch], Tensor]
"""(media [B, (F), C, H, W] in [0, 1], prompts of B rows) -> one reward per sample, [B].

A plain function, or an object with `__call__`. Workers receive a copy of the object, so it may hold a model.
"""


class JoinedReward:
    """Base of what asks other rewards and returns [B, R], each column checked."""

    names: tuple[str, ...]
    """Of the R rewards, in metrics."""
    weights: tuple[float, ...]
    """Relative to each other."""


class RewardError(RuntimeError):
    """A reward did not return one finite number per sample."""


def reward_name(reward: Reward) -> str:
    """Name a reward in metrics and messages: the function's name, or the object's class."""
    return reward.__name__ if inspect.isroutine(reward) else type(reward).__name__


def compute_rewards(reward: Reward, media: Tensor, prompts: PromptBatch) -> Tensor:
    """Call `reward` and check what it gives; a bad value is an error, never a zero.

    Returns:
        [B] float32 on the CPU, or [B, R] of `SeveralRewards`, which has each of them checked.

    Raises:
        RewardError: not a tensor, another shape than [B], or a value that is NaN or infinite.
    """
    rewards = reward(media, prompts)
    if isinstance(reward, JoinedReward):
        return rewards
    name = reward_name(reward)
    if not isinstance(rewards, Tensor):
        raise RewardError(
            f"reward `{name}` must return a tensor of {len(prompts)} values, got {type(rewards).__name__}."
        )
    if rewards.shape != (len(prompts),):
        raise RewardError(
            f"reward `{name}` must return one value per sample, shape [{len(prompts)}], got {list(rewards.shape)}."
        )
    rewards = rewards.detach().float().cpu()
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"reward `{name}` returned {rewards[bad[0]].item()} for {len(bad)} of {len(prompts)} samples, "
            f"the first for prompt {prompts.texts[bad[0]]!r}; rewards must be finite."
        )
    return rewards
