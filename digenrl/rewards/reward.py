"""What a reward is, and what a class of rewards may say of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
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

The media are a copy of its own each time, which it may change in place; prompts it must leave alone. Runs ask without
gradients, under `torch.no_grad` or `torch.inference_mode`. A `functools.partial` is asked with its arguments, and has
the name, the traits and the methods of what it wraps.
"""

_NAMES_OF_METRICS = ("mean", "zero_std_group_frac", "dropped_groups")
_MAX_SHOWN = 80  # characters of a prompt or value in a message


class JoinedReward:
    """Base of what asks other rewards and gives [B, R]; each is asked, and fails, by itself."""

    rewards: tuple[Reward, ...]
    names: tuple[str, ...]
    """Of the R rewards, in metrics."""
    weights: tuple[float, ...]
    """Relative to each other."""
    sums_raw_rewards: bool
    """Whether samples are compared by the weighted sum, instead of each reward with its own kind."""
    num_set_up: int = 0
    """Of the rewards, while not all could be: the next try goes on with the one that failed."""

    def __getstate__(self) -> dict[str, Any]:
        """Give what a copy has: each worker sets up all rewards."""
        return {name: value for name, value in vars(self).items() if name != "num_set_up"}


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
            ValueError: an attribute, or a name, that is not what it should be, or a class instead of an instance.
        """
        if isinstance(reward, JoinedReward):
            for name in reward.names:
                _check_name(name)
            parts = [cls.of(part) for part in reward.rewards]
            columns = dict.fromkeys(column for part in parts for column in part.requires)
            return cls(tuple(columns), any(part.groupwise for part in parts))
        _check_instance(reward)
        name = reward_name(reward)
        _check_name(name)
        requires: Any = reward_attribute(reward, "requires", ())
        traits = cls(
            tuple(requires) if isinstance(requires, Sequence) and not isinstance(requires, str) else (requires,),
            reward_attribute(reward, "groupwise", False),
            reward_attribute(reward, "batch_size", None),
            reward_attribute(reward, "offload", False),
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
        if traits.offload and not callable(reward_attribute(reward, "to")):
            raise ValueError(f"`offload` of reward `{name}` must be false: the reward has no method `to(device)`.")
        return traits


def reward_name(reward: Reward) -> str:
    """Name a reward in metrics and messages: its attribute `name`, or the function's name, or the object's class."""
    own = reward_attribute(reward, "name")
    if isinstance(own, str) and own:
        return own
    wrapped = _wrapped(reward)
    if inspect.isroutine(wrapped) or isinstance(wrapped, type):
        return wrapped.__name__
    return type(wrapped).__name__


def reward_attribute(reward: Reward, attribute: str, default: Any = None) -> Any:
    """Read an attribute of a reward; a `functools.partial` has those of what it wraps, and may have its own."""
    while isinstance(reward, partial) and attribute not in vars(reward):
        reward = reward.func
    return getattr(reward, attribute, default)


def _wrapped(reward: Reward) -> Reward:
    while isinstance(reward, partial):
        reward = reward.func
    return reward


def _check_instance(reward: Reward) -> None:
    if isinstance(_wrapped(reward), type):
        name = reward_name(reward)
        raise ValueError(f"`reward` must not be a class, got {name}: give an instance, such as `{name}(...)`.")


def _check_name(name: str) -> None:
    """Check that a name gives metrics of its own, which loggers and tables can show."""
    if name in _NAMES_OF_METRICS or not name.strip() or not name.isprintable() or "/" in name or "," in name:
        raise ValueError(
            f"a reward's name must be printable, without / and commas, and none of {', '.join(_NAMES_OF_METRICS)}, as "
            f"metrics are named after it, got {shortened(name)}: give the reward another `name`."
        )


def set_up_reward(reward: Reward, device: torch.device) -> None:
    """Let a reward, or each of several, load what it needs.

    Raises:
        RewardError: it could not; the message names the reward. Of several, those before it are not set up again by
            the next call.
    """
    if isinstance(reward, JoinedReward):
        for part in reward.rewards[reward.num_set_up :]:
            set_up_reward(part, device)
            reward.num_set_up += 1
        reward.num_set_up = 0
        return
    setup = reward_attribute(reward, "setup")
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
        own_check = reward_attribute(part, "check_prompts")
        if own_check is not None:
            own_check(prompts)


def check_picklable(reward: Reward) -> None:
    """Find out which reward cannot be sent to workers; meant for when pickling a module has failed, as it copies all.

    Raises:
        ValueError: it cannot be pickled.
    """
    for part in (*reward.rewards, reward) if isinstance(reward, JoinedReward) else (reward,):
        try:
            cloudpickle.dumps(part)
        except Exception as error:  # of any class: objects say themselves how they are pickled
            raise ValueError(
                f"reward `{reward_name(part)}` must be picklable, as workers get a copy of it, but has what is not "
                f"({describe_error(error)}): make that in a method `setup(device)`, which workers call."
            ) from error


def describe_error(error: BaseException) -> str:
    """Say in one line what was raised; an error of ours says all in its message."""
    try:
        message = " ".join(str(error).split()).removesuffix(".")
    except Exception:  # an error that cannot say what it is must not hide that it was raised
        message = ""
    if isinstance(error, RewardError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shortened(text: str, limit: int = _MAX_SHOWN) -> str:
    """Quote a prompt in a message."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def shown(value: object) -> str:
    """Show in one line what a reward gave, whatever that is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of an object's own `__repr__`, or of an integer with too many digits
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
