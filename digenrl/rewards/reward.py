"""What a reward is, and what a class of rewards may say of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.rewards.counts import check_count
from digenrl.types import Prompt, PromptBatch

Reward = Callable[[Tensor, PromptBatch], Tensor]
"""(media [B, (F), C, H, W] in [0, 1], prompts of B rows) -> one reward per sample, [B].

A plain function, or an object with `__call__`. Workers receive a copy of the object, made before `setup`. An object may
also have what `RewardTraits` lists, and two methods:

- `setup(device)`, called once in each worker that scores, before its first samples: the place to load weights and to
  look whether a server is there;
- `check_prompts(prompts)`, called before anything is generated, which raises `ValueError` for prompts that it could not
  score.

Where it asks about each sample by itself, it may return a list with an exception in place of a number: only that sample
has failed then.
"""


class JoinedReward:
    """Base of what asks other rewards and gives [B, R]; each is asked, and fails, by itself."""

    rewards: tuple[Reward, ...]
    names: tuple[str, ...]
    """Of the R rewards, in metrics."""
    weights: tuple[float, ...]
    """Relative to each other."""
    sums_raw_rewards: bool
    """Whether samples are compared by the weighted sum, instead of each reward with its own kind."""


class RewardError(RuntimeError):
    """A reward did not give one finite number per sample."""


@dataclass(frozen=True)
class RewardTraits:
    """What a reward says of itself in attributes of these names; all have a default."""

    requires: tuple[str, ...] = ()
    """Metadata columns that every prompt must have; checked before anything is generated."""
    groupwise: bool = False
    """Whether it compares the samples of a prompt: it is then asked about whole groups only."""
    batch_size: int | None = None
    """Most samples it is asked about at a time; None is as many as there are. Of `groupwise` ones, whole groups."""
    offload: bool = False
    """Whether it waits in host memory between two calls; it then has a method `to(device)`, as modules have."""

    @classmethod
    def of(cls, reward: Reward) -> RewardTraits:
        """Read a reward's attributes; several rewards need all that each needs.

        Raises:
            ValueError: an attribute that is not what it should be.
        """
        if isinstance(reward, JoinedReward):
            parts = [cls.of(part) for part in reward.rewards]
            columns = dict.fromkeys(column for part in parts for column in part.requires)
            return cls(tuple(columns), any(part.groupwise for part in parts))
        name = reward_name(reward)
        requires: Any = getattr(reward, "requires", ())
        traits = cls(
            tuple(requires) if isinstance(requires, Sequence) and not isinstance(requires, str) else (requires,),
            getattr(reward, "groupwise", False),
            getattr(reward, "batch_size", None),
            getattr(reward, "offload", False),
        )
        if not all(isinstance(column, str) for column in traits.requires):
            raise ValueError(f"`requires` of reward `{name}` must be names of metadata columns, got {requires!r}.")
        for attribute in ("groupwise", "offload"):
            if not isinstance(getattr(traits, attribute), bool):
                raise ValueError(
                    f"`{attribute}` of reward `{name}` must be a bool, got {getattr(traits, attribute)!r}."
                )
        if traits.batch_size is not None:
            check_count(f"`batch_size` of reward `{name}`", traits.batch_size)
        if traits.offload and not callable(getattr(reward, "to", None)):
            raise ValueError(f"`offload` of reward `{name}` must be false: the reward has no method `to(device)`.")
        return traits


def reward_name(reward: Reward) -> str:
    """Name a reward in metrics and messages: its attribute `name`, or the function's name, or the object's class."""
    own = getattr(reward, "name", None)
    if isinstance(own, str) and own:
        return own
    return reward.__name__ if inspect.isroutine(reward) else type(reward).__name__


def set_up_reward(reward: Reward, device: torch.device) -> None:
    """Let a reward, or each of several, load what it needs.

    Raises:
        RewardError: it could not; the message names the reward.
    """
    if isinstance(reward, JoinedReward):
        for part in reward.rewards:
            set_up_reward(part, device)
        return
    setup = getattr(reward, "setup", None)
    if setup is None:
        return
    try:
        setup(torch.device("cpu") if RewardTraits.of(reward).offload else device)
    except Exception as error:
        raise RewardError(f"reward `{reward_name(reward)}` cannot be set up: {describe_error(error)}.") from error


def check_prompts(reward: Reward, prompts: Sequence[Prompt], *, name: str = "prompts") -> None:
    """Check that a reward can score prompts: that they have the metadata it needs, and what it checks itself.

    Raises:
        ValueError: a prompt lacks a column, or the reward says that it could not score it.
    """
    for part in reward.rewards if isinstance(reward, JoinedReward) else (reward,):
        for column in RewardTraits.of(part).requires:
            lacking = [prompt for prompt in prompts if column not in prompt.metadata]
            if lacking:
                raise ValueError(
                    f"`{name}` must have the column `{column}`, which reward `{reward_name(part)}` needs: "
                    f"{len(lacking)} of {len(prompts)} lack it, the first is {shortened(lacking[0].text)}; "
                    'give a .jsonl file with lines such as {"prompt": "...", "' + column + '": ...}.'
                )
        own_check = getattr(part, "check_prompts", None)
        if own_check is not None:
            own_check(prompts)


def describe_error(error: BaseException) -> str:
    """Say in one line what was raised; an error of ours says all in its message."""
    message = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, RewardError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shortened(text: str, limit: int = 80) -> str:
    """Quote a prompt in a message."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
