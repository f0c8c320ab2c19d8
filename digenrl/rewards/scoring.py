"""Asking a reward, and what happens when it fails: between a reward and the advantages stand these checks."""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    reward_name,
    shortened,
)
from digenrl.types import PromptBatch

log = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max  # rewards are kept in float32

OnRewardError = Literal["raise", "retry", "drop_group"]


@dataclass(frozen=True, kw_only=True)
class ErrorPolicy:
    """What is done about samples whose reward failed: it raised, or gave no finite number."""

    on_error: OnRewardError = "raise"
    """`"retry"` asks again and raises at last, `"drop_group"` asks again and leaves the sample's group out at last.

    A reward that raises does so for all samples it was asked about together. Before groups are dropped it is therefore
    asked about each sample, or group, by itself the last time, so that only what cannot be scored is lost.
    """
    num_retries: int = 2
    """How often it is asked again."""
    wait_s: float = 0.5
    """Before the first time; each next wait is twice as long."""

    def __post_init__(self) -> None:
        """Check them, by the names that modules have for them."""
        if self.on_error not in ("raise", "retry", "drop_group"):
            raise ValueError(f"`on_reward_error` must be raise, retry or drop_group, got {self.on_error!r}.")
        check_count("`reward_retries`", self.num_retries, least=0)

    @property
    def waits_s(self) -> tuple[float, ...]:
        """Seconds before each time that a reward is asked, the first time included."""
        num_retries = 0 if self.on_error == "raise" else self.num_retries
        return (0.0, *(self.wait_s * 2**index for index in range(num_retries)))


@dataclass(frozen=True)
class RewardFailure:
    """A sample that one reward has failed for, at last."""

    reward: str
    row: int
    prompt: str
    reason: str

    def __str__(self) -> str:
        return f"reward `{self.reward}` {self.reason}, for prompt {shortened(self.prompt)}"


@dataclass(frozen=True)
class RewardBatch:
    """Rewards of B samples."""

    rewards: Tensor  # [B] or [B, R] float32 on the CPU; NaN where a reward failed
    failures: tuple[RewardFailure, ...]
    """Empty unless the policy is `"drop_group"`."""
    num_retried: int
    """Samples that a reward was asked about again."""


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


def score_samples(reward: Reward, media: Tensor, prompts: PromptBatch, policy: ErrorPolicy) -> RewardBatch:
    """Ask `reward` about B samples and do what `policy` says about those it fails for.

    Raises:
        RewardError: a reward has failed and its groups are not to be dropped; the message names reward and prompt.
    """
    if not isinstance(reward, JoinedReward):
        return _ask(reward, media, prompts, policy)
    parts = [_ask(part, media, prompts, policy) for part in reward.rewards]
    return RewardBatch(
        torch.stack([part.rewards for part in parts], dim=1),
        tuple(failure for part in parts for failure in part.failures),
        sum(part.num_retried for part in parts),
    )


def _ask(reward: Reward, media: Tensor, prompts: PromptBatch, policy: ErrorPolicy) -> RewardBatch:
    name, traits = reward_name(reward), RewardTraits.of(reward)
    rewards = torch.full((len(prompts),), math.nan)
    rows, num_retried = list(range(len(prompts))), 0
    answer = _Answer(rewards, {})
    for attempt, wait_s in enumerate(policy.waits_s):
        if attempt > 0:
            rows = _whole_groups(answer.reasons, prompts) if traits.groupwise else sorted(answer.reasons)
            num_retried = max(num_retried, len(rows))
            reason = answer.reasons[min(answer.reasons)]
            log.warning(
                "reward `%s` %s; asking again about %d of %d samples in %g s (%d of %d).",
                *(name, reason, len(rows), len(prompts), wait_s, attempt, len(policy.waits_s) - 1),
            )
            time.sleep(wait_s)
        is_last = 0 < attempt == len(policy.waits_s) - 1
        chunk_size = 1 if is_last and policy.on_error == "drop_group" else traits.batch_size
        answer = _ask_once(reward, media, prompts, rows, replace(traits, batch_size=chunk_size))
        rewards[rows] = answer.rewards[rows]
        if not answer.reasons:
            return RewardBatch(rewards, (), num_retried)
    failures = tuple(
        RewardFailure(name, row, prompts.texts[row], answer.reasons[row]) for row in sorted(answer.reasons)
    )
    if policy.on_error == "drop_group":
        return RewardBatch(rewards, failures, num_retried)
    first, tries = failures[0], len(policy.waits_s)
    remedy = "" if answer.error is not None else "; it must give one finite number per sample"
    raise RewardError(
        f"reward `{name}` {first.reason} for {len(failures)} of {len(prompts)} samples, the first for prompt "
        f"{shortened(first.prompt)}{f', asked {tries} times' if tries > 1 else ''}{remedy}."
    ) from answer.error


@dataclass
class _Answer:
    """What one round of asking gave."""

    rewards: Tensor  # [B], NaN where nothing good came
    reasons: dict[int, str]
    """Why it is not good, of the rows asked about."""
    error: Exception | None = None
    """The last one that the reward raised."""


def _ask_once(
    reward: Reward, media: Tensor, prompts: PromptBatch, rows: Sequence[int], traits: RewardTraits
) -> _Answer:
    answer = _Answer(torch.full((len(prompts),), math.nan), {})
    with _on_device(reward, media.device, traits):
        for chunk in _chunks(rows, prompts, traits):
            is_all = chunk == list(range(len(prompts)))
            try:
                given: Any = reward(media if is_all else media[chunk], prompts if is_all else prompts.select(chunk))
            except Exception as error:
                answer.error = error
                answer.reasons.update(dict.fromkeys(chunk, _raised(error)))
                continue
            values = _one_each(given, len(chunk))
            if isinstance(values, str):
                answer.reasons.update(dict.fromkeys(chunk, values))
                continue
            for row, value in zip(chunk, values, strict=True):
                number = _finite(value)
                if number is not None:
                    answer.rewards[row] = number
                elif isinstance(value, Exception):  # of a reward that asks about each sample by itself
                    answer.error, answer.reasons[row] = value, _raised(value)
                else:
                    answer.reasons[row] = f"returned {value!r}"
    return answer


def _raised(error: Exception) -> str:
    return f"{'failed:' if isinstance(error, RewardError) else 'raised'} {describe_error(error)}"


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
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    number = float(value)
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


def _whole_groups(rows: Iterator[int] | dict[int, str], prompts: PromptBatch) -> list[int]:
    groups = {prompts.group_ids[row] for row in rows}
    return [row for row, group in enumerate(prompts.group_ids) if group in groups]


@contextmanager
def _on_device(reward: Any, device: torch.device, traits: RewardTraits) -> Iterator[None]:
    """Have an offloaded reward on the samples' device while it is asked."""
    if not traits.offload:
        yield
        return
    reward.to(device)
    try:
        yield
    finally:
        reward.to(torch.device("cpu"))
