"""Asking a reward, and what happens when it fails: between a reward and the advantages stand these checks."""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.rewards.counts import check_count
from digenrl.rewards.reward import (
    JoinedReward,
    Reward,
    RewardError,
    RewardTraits,
    describe_error,
    reward_attribute,
    reward_name,
    shortened,
    shown,
)
from digenrl.types import PromptBatch

log = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max  # rewards are kept in float32
_MAX_RETRIES = 1000
_MAX_WAIT_S = 30.0

_POLL_S = 0.2  # how long a signal may go unnoticed

OnRewardError = Literal["raise", "retry", "drop_group"]


@dataclass(frozen=True, kw_only=True)
class ErrorPolicy:
    """What is done about samples whose reward failed: it raised, or gave no finite number."""

    on_error: OnRewardError = "raise"
    """`"retry"` asks again and raises at last, `"drop_group"` asks again and leaves the sample's group out at last.

    A reward that raises does so for all samples it was asked about together. Before groups are dropped it is therefore
    asked about each sample, or group, by itself the last time, so that only what cannot be scored is lost, however
    samples were batched. With no retries that is one more time, at once, for those that did not fail by themselves.
    """
    num_retries: int = 2
    """How often it is asked again, at most 1000 times."""
    wait_s: float = 0.5
    """Before the first time; each next wait is twice as long, up to 30 s."""

    def __post_init__(self) -> None:
        """Check them, by the names that modules have for them."""
        if self.on_error not in ("raise", "retry", "drop_group"):
            raise ValueError(f"`on_reward_error` must be raise, retry or drop_group, got {self.on_error!r}.")
        check_count("`reward_retries`", self.num_retries, least=0)
        if self.num_retries > _MAX_RETRIES:
            hours = _MAX_RETRIES * _MAX_WAIT_S / 3600
            raise ValueError(
                f"`reward_retries` must be at most {_MAX_RETRIES}, which take {hours:.0f} hours of waits, got "
                f"{self.num_retries}."
            )
        if not 0 <= self.wait_s < math.inf:
            raise ValueError(f"`wait_s` is in seconds and must be in [0, inf), got {self.wait_s}.")

    def retries(self) -> Iterator[tuple[float, bool]]:
        """Give, for each time a reward is asked again, the wait in s, and whether samples are asked one by one."""
        if self.on_error == "raise":
            return
        drops, wait_s = self.on_error == "drop_group", self.wait_s
        for left in reversed(range(self.num_retries)):
            wait_s = min(wait_s, _MAX_WAIT_S)
            yield wait_s, drops and left == 0
            wait_s *= 2
        if drops and self.num_retries == 0:
            yield 0.0, True


@dataclass(frozen=True)
class RewardFailure:
    """A sample that one reward has failed for, at last."""

    reward: str
    row: int
    prompt: str
    reason: str

    def __str__(self) -> str:
        return f"reward `{self.reward}` for prompt {shortened(self.prompt)} {self.reason}"


@dataclass(frozen=True)
class RewardBatch:
    """Rewards of B samples."""

    rewards: Tensor  # [B] or [B, R] float32 on the CPU; NaN where a reward failed
    failures: tuple[RewardFailure, ...]
    """Empty unless the policy is `"drop_group"`."""


def compute_rewards(reward: Reward, media: Tensor, prompts: PromptBatch) -> Tensor:
    """Ask `reward` once and check what it gives; a bad value is an error, never a zero.

    Args:
        reward: what to ask; of several, each is asked.
        media: [B, (F), C, H, W] in [0, 1].
        prompts: of B rows.

    Returns:
        [B] float32 on the CPU, or [B, R] of `SeveralRewards`.

    Raises:
        RewardError: it raised, or did not give one finite number per sample.
    """
    return score_samples(reward, media, prompts, ErrorPolicy()).rewards


def score_samples(
    reward: Reward,
    media: Tensor,
    prompts: PromptBatch,
    policy: ErrorPolicy,
    *,
    poll: Callable[[], None] | None = None,
) -> RewardBatch:
    """Ask `reward` about B samples and do what `policy` says about those it fails for.

    Args:
        reward: what to ask; of several, each is asked.
        media: [B, (F), C, H, W] in [0, 1].
        prompts: of B rows.
        policy: what is done about failures.
        poll: called at least every 0.2 s of a wait; may raise to end it.

    Raises:
        RewardError: a reward has failed and its groups are not to be dropped; the message names reward and prompt.
    """
    if not isinstance(reward, JoinedReward):
        return _ask(reward, media, prompts, policy, poll)
    parts = [_ask(part, media, prompts, policy, poll) for part in reward.rewards]
    return RewardBatch(
        torch.stack([part.rewards for part in parts], dim=1),
        tuple(failure for part in parts for failure in part.failures),
    )


def _ask(
    reward: Reward, media: Tensor, prompts: PromptBatch, policy: ErrorPolicy, poll: Callable[[], None] | None
) -> RewardBatch:
    name, traits = reward_name(reward), RewardTraits.of(reward)
    answer = _ask_once(reward, media, prompts, list(range(len(prompts))), traits)
    num_asked = 1
    for wait_s, one_by_one in policy.retries():
        failed = answer.reasons.keys() if policy.num_retries > 0 else answer.together
        if not failed:
            break
        rows = _whole_groups(failed, prompts) if traits.groupwise else sorted(failed)
        log.warning(
            "reward `%s` %s; asking again about %d of %d samples%s in %g s.",
            *(name, answer.reasons[min(failed)], len(rows), len(prompts), ", one by one," * one_by_one, wait_s),
        )
        _sleep(wait_s, poll)
        answer.replace(
            rows, _ask_once(reward, media, prompts, rows, replace(traits, batch_size=1) if one_by_one else traits)
        )
        num_asked += 1
    failures = tuple(
        RewardFailure(name, row, prompts.texts[row], str(reason)) for row, reason in sorted(answer.reasons.items())
    )
    if not failures or policy.on_error == "drop_group":
        return RewardBatch(answer.rewards, failures)
    first, reason = failures[0], answer.reasons[failures[0].row]
    where = f"for {len(failures)} of {len(prompts)} samples, the first for prompt {shortened(first.prompt)}"
    if num_asked > 1:
        where += f", asked {num_asked} times"
    raise RewardError(f"reward `{name}` {reason.at(where)}.") from answer.error


def _sleep(wait_s: float, poll: Callable[[], None] | None) -> None:
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        if poll is not None:
            poll()
        time.sleep(min(left_s, _POLL_S))


@dataclass(frozen=True)
class Reason:
    """Why there is no reward for a sample."""

    verb: str
    """What the reward did: returned nan, failed."""
    detail: str = ""
    """The error it raised, in its own words, which may end with a remedy."""

    def at(self, where: str) -> str:
        """Say it of some samples."""
        if self.detail:
            return f"{self.verb} {where}: {self.detail}"
        return f"{self.verb} {where}; it must give one finite number per sample"

    def __str__(self) -> str:
        return f"{self.verb}: {self.detail}" if self.detail else self.verb


@dataclass
class _Answer:
    """What asking about some of B rows gave."""

    rewards: Tensor  # [B], NaN where nothing good came
    reasons: dict[int, Reason] = field(default_factory=dict)
    """Why it is not good, of the rows asked about."""
    together: set[int] = field(default_factory=set)
    """Those of them that failed with others, of which any may be to blame."""
    error: Exception | None = None
    """The last one that the reward raised."""

    def fail(self, rows: Sequence[int], reason: Reason, error: Exception | None, *, are_together: bool) -> None:
        """Note that nothing good came for some rows."""
        self.rewards[rows] = math.nan
        self.reasons.update(dict.fromkeys(rows, reason))
        self.together.update(rows if are_together else ())
        self.error = self.error if error is None else error

    def replace(self, rows: Sequence[int], newer: _Answer) -> None:
        """Take what asking again about some rows gave."""
        self.rewards[rows] = newer.rewards[rows]
        asked = set(rows)
        self.reasons = {row: reason for row, reason in self.reasons.items() if row not in asked} | newer.reasons
        self.together = (self.together - asked) | newer.together
        self.error = newer.error


def _ask_once(
    reward: Reward, media: Tensor, prompts: PromptBatch, rows: Sequence[int], traits: RewardTraits
) -> _Answer:
    answer = _Answer(torch.full((len(prompts),), math.nan))
    try:
        with _on_device(reward, media.device, traits):
            for chunk in _chunks(rows, prompts, traits):
                _ask_about(chunk, reward, media, prompts, traits, answer)
    except _NotMovedError as error:
        answer.fail(rows, Reason("failed", str(error)), error, are_together=_are_several(rows, prompts, traits))
    return answer


def _ask_about(
    rows: Sequence[int], reward: Reward, media: Tensor, prompts: PromptBatch, traits: RewardTraits, answer: _Answer
) -> None:
    """Ask about some rows in one call, and note in `answer` what it gives."""
    are_together = _are_several(rows, prompts, traits)
    is_all = rows == list(range(len(prompts)))
    try:
        # A copy, as an index makes one: what a reward does to its media is seen by no other, nor by the next try.
        own_media = media.clone() if is_all else media[rows]
        given: Any = reward(own_media, prompts if is_all else prompts.select(rows))
    except Exception as error:
        answer.fail(rows, _raised(error), error, are_together=are_together)
        return
    try:
        values = _one_each(given, len(rows))
    except Exception as error:  # of a tensor without data, or an object's own `tolist`
        reason = Reason(f"returned {type(given).__name__} that cannot be read", describe_error(error))
        answer.fail(rows, reason, error, are_together=are_together)
        return
    if isinstance(values, str):
        answer.fail(rows, Reason(values), None, are_together=are_together)
        return
    for row, value in zip(rows, values, strict=True):
        number = _finite(value)
        if number is not None:
            answer.rewards[row] = number
        elif isinstance(value, Exception):  # of a reward that asks about each sample by itself
            answer.fail([row], _raised(value), value, are_together=False)
        else:
            answer.fail([row], Reason(f"returned {shown(value)}"), None, are_together=False)


def _are_several(rows: Sequence[int], prompts: PromptBatch, traits: RewardTraits) -> bool:
    """Whether rows are more than what a reward may be asked about at least: a sample, or a group."""
    return len({prompts.group_ids[row] for row in rows} if traits.groupwise else rows) > 1


def _raised(error: Exception) -> Reason:
    return Reason("failed", describe_error(error))


def _one_each(given: Any, num_samples: int) -> list[Any] | str:
    """Give the values that a reward returned, or say what is wrong with all of them together."""
    if isinstance(given, Tensor):
        if given.is_complex():
            return f"returned {given.dtype} values"
        if given.shape != (num_samples,):
            return f"returned shape {list(given.shape)} instead of [{num_samples}]"
        values: list[Any] = given.detach().float().cpu().tolist()
        return values
    if hasattr(given, "tolist"):  # numpy's arrays
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        return f"returned {type(given).__name__} instead of a tensor of {num_samples} values"
    return list(given) if len(given) == num_samples else f"returned {len(given)} values instead of {num_samples}"


def _finite(value: Any) -> float | None:
    try:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        if not isinstance(value, numbers.Real):
            return None
        number = float(value)
    except Exception:  # integers and fractions that are too large, tensors without data, objects of any kind
        return None
    return number if abs(number) <= _LARGEST else None  # also false for nan


def _chunks(rows: Sequence[int], prompts: PromptBatch, traits: RewardTraits) -> Iterator[list[int]]:
    """Cut rows to calls of at most `batch_size`, between groups where those must be whole."""
    if not rows:
        return
    units = [[row] for row in rows]
    if traits.groupwise:
        by_group: dict[int, list[int]] = {}
        for row in rows:
            by_group.setdefault(prompts.group_ids[row], []).append(row)
        units = list(by_group.values())
    size = traits.batch_size or len(rows)
    chunk: list[int] = []
    for unit in units:
        if chunk and len(chunk) + len(unit) > size:
            yield chunk
            chunk = []
        chunk = chunk + unit
    yield chunk


def _whole_groups(rows: Iterable[int], prompts: PromptBatch) -> list[int]:
    groups = {prompts.group_ids[row] for row in rows}
    return [row for row, group in enumerate(prompts.group_ids) if group in groups]


class _NotMovedError(Exception):
    """A reward could not be put where it computes or waits."""


@contextmanager
def _on_device(reward: Reward, device: torch.device, traits: RewardTraits) -> Iterator[None]:
    """Have an offloaded reward on the samples' device while it is asked."""
    if not traits.offload:
        yield
        return
    host = torch.device("cpu")
    try:
        _move(reward, device)
        yield
    except BaseException:
        with suppress(_NotMovedError):  # the first error says why
            _move(reward, host)
        raise
    _move(reward, host)


def _move(reward: Reward, device: torch.device) -> None:
    try:
        reward_attribute(reward, "to")(device)
    except Exception as error:
        raise _NotMovedError(f"cannot be moved to {device}: {describe_error(error)}") from error
