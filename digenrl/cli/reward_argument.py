"""`--reward NAME --reward.setting value`: one reward, made as a run would make it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from digenrl.cli.arguments import read_arguments
from digenrl.cli.check import check_reward
from digenrl.cli.classes import accepted_names
from digenrl.cli.errors import SettingError, UsageError, nearest
from digenrl.cli.input_errors import INPUT_ERRORS, say_input_error
from digenrl.cli.lightning_cli import ConstructorError, instantiate
from digenrl.cli.merge import merge
from digenrl.cli.settings import check_names
from digenrl.cli.sources import Source, explain
from digenrl.cli.usage import describe_reward
from digenrl.rewards import Reward


def make_reward(words: Sequence[str]) -> tuple[Reward, list[str]]:
    """Make the reward that `--reward NAME`, `--reward.key value` and `--config FILE` describe.

    The configuration is a mapping with `reward` as its only key. The reward is not set up.

    Returns:
        the reward, and all other words as they are.

    Raises:
        UsageError: no reward, one that is not known, or settings that it refuses; one line.
    """
    own, rest = _split(words)
    sources = read_arguments(own).sources
    with _explained(sources):
        given = _given(sources)
        if given is None:
            raise UsageError(_missing(rest))
        return _make({"reward": check_reward(given)}, sources), rest


def reward_usage(words: Sequence[str]) -> list[str]:
    """Describe the settings of the reward that the words name, for `--help`; empty if they name none."""
    sources = read_arguments(_split(words)[0]).sources
    with _explained(sources):
        return list(describe_reward(_given(sources)))


def _given(sources: Sequence[Source]) -> Any:
    config = merge(sources, accepted_names)
    check_names(config, ("reward",), (), "a key of a reward's configuration")
    return config.get("reward")


@contextmanager
def _explained(sources: Sequence[Source]) -> Iterator[None]:
    try:
        yield
    except SettingError as error:
        raise UsageError(explain(error, sources)) from error


def _missing(others: Sequence[str]) -> str:
    for name in (word.partition("=")[0] for word in others):
        if name.startswith("--") and nearest(name, ["--reward"]) is not None:
            return f"`{name}` is not an option; did you mean `--reward`?"
    return "`--reward` is missing; `digenrl rewards list` shows what there is."


def _make(config: dict[str, Any], sources: Sequence[Source]) -> Reward:
    try:
        reward: Reward = instantiate(Reward, config["reward"])
    except ConstructorError as error:
        if not isinstance(error.error, INPUT_ERRORS):
            raise error.error from None
        raise UsageError(say_input_error(error.error, config, sources, name=error.name)) from error
    return reward


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take a reward's own options and their values out of the words."""
    own: list[str] = []
    rest = list(words)
    others: list[str] = []
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0]
        if name not in ("--reward", "-c", "--config") and not name.startswith("--reward."):
            others.append(word)
            continue
        own.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            own.append(rest.pop(0))
    return own, others
