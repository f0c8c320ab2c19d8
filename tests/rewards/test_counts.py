from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from digenrl.rewards import ErrorPolicy, JpegCompressibility, OCRReward, RewardTraits, SafetyReward, VLMJudge
from digenrl.rewards.counts import check_count


@pytest.mark.parametrize("value", [1, 2, 10**9])
def test_whole_numbers_from_the_least_on_are_taken(value: int) -> None:
    check_count("`n`", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", None, True])
def test_what_is_no_count_is_refused_with_bound_and_value(value: object) -> None:
    with pytest.raises(ValueError, match=f"^`n` is a count and must be at least 1, got {value!r}.$"):
        check_count("`n`", value)


def test_a_count_may_be_in_units_and_have_another_bound() -> None:
    check_count("`side`", 32, least=32)
    with pytest.raises(ValueError, match="^`side` is in pixels and must be at least 32, got 31.$"):
        check_count("`side`", 31, least=32, what="in pixels")


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (JpegCompressibility, "num_frames"),
        (JpegCompressibility, "quality"),
        (OCRReward, "detect_size"),
        (OCRReward, "num_threads"),
        (SafetyReward, "num_threads"),
        (lambda **settings: VLMJudge("judge", **settings), "num_frames"),
        (lambda **settings: VLMJudge("judge", **settings), "max_side"),
        (lambda **settings: VLMJudge("judge", **settings), "concurrency"),
    ],
)
def test_true_is_no_count(make: Callable[..., Any], setting: str) -> None:
    with pytest.raises(ValueError, match=f"`{setting}` .*, got True"):
        make(**{setting: True})


def test_true_is_no_count_in_policies_and_traits() -> None:
    with pytest.raises(ValueError, match="`reward_retries` is a count and must be at least 0, got True"):
        ErrorPolicy(num_retries=True)
    reward = JpegCompressibility()
    reward.batch_size = True
    with pytest.raises(ValueError, match="`batch_size` of reward `JpegCompressibility` is a count .*, got True"):
        RewardTraits.of(reward)
