"""The check between a reward and the advantages."""

from __future__ import annotations

import threading
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from digenrl import Prompt, PromptBatch
from digenrl.rewards import RewardError, SeveralRewards, compute_rewards, reward_name
from digenrl.rewards.reward import check_picklable
from tests.toy import level_reward

TEXTS = [f"prompt {row}" for row in range(16)]


@pytest.fixture
def prompts() -> PromptBatch:
    return PromptBatch.for_validation([Prompt(text, uid) for uid, text in enumerate(TEXTS)], seed=0)


def media() -> Tensor:
    return torch.zeros(16, 3, 2, 2)


def reward_that_returns(value: Any) -> Any:
    def picky_reward(media: Tensor, prompts: PromptBatch) -> Any:
        return value

    return picky_reward


class BrightnessReward(nn.Module):
    def forward(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return media.flatten(1).mean(1) * torch.ones((), requires_grad=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 7, 15])
def test_one_bad_value_of_sixteen_is_an_error_that_names_reward_and_prompt(
    prompts: PromptBatch, bad: float, row: int
) -> None:
    values = torch.arange(16.0)
    values[row] = bad
    with pytest.raises(RewardError, match=f"`picky_reward` returned {bad} for 1 of 16.*'prompt {row}'"):
        compute_rewards(reward_that_returns(values), media(), prompts)


def test_several_bad_values_are_counted_and_the_first_is_named(prompts: PromptBatch) -> None:
    values = torch.zeros(16).index_fill(0, torch.tensor([4, 9, 11]), float("nan"))
    with pytest.raises(RewardError, match="for 3 of 16 samples, the first for prompt 'prompt 4'"):
        compute_rewards(reward_that_returns(values), media(), prompts)


@pytest.mark.parametrize("bad", [None, 1.0, {"score": torch.zeros(16)}, "0.5"])
def test_what_is_no_tensor_is_an_error_that_names_the_type(prompts: PromptBatch, bad: Any) -> None:
    with pytest.raises(RewardError, match=f"`picky_reward` returned {type(bad).__name__} instead of a tensor of 16"):
        compute_rewards(reward_that_returns(bad), media(), prompts)


@pytest.mark.parametrize("bad", [None, "0.5", 1j, float("nan")])
def test_one_bad_entry_of_a_list_is_an_error_that_names_reward_and_prompt(prompts: PromptBatch, bad: Any) -> None:
    values = [1.0] * 7 + [bad] + [1.0] * 8
    with pytest.raises(RewardError, match=f"`picky_reward` returned {bad!r} for 1 of 16.*'prompt 7'"):
        compute_rewards(reward_that_returns(values), media(), prompts)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_list_of_numbers_is_as_good_as_a_tensor(prompts: PromptBatch, kind: Any) -> None:
    assert compute_rewards(reward_that_returns(kind([0.5] * 16)), media(), prompts).tolist() == [0.5] * 16


def test_a_list_of_another_length_is_an_error_that_names_the_lengths(prompts: PromptBatch) -> None:
    with pytest.raises(RewardError, match="`picky_reward` returned 15 values instead of 16.*'prompt 0'"):
        compute_rewards(reward_that_returns([1.0] * 15), media(), prompts)


@pytest.mark.parametrize("shape", [(), (15,), (17,), (16, 1), (1, 16), (0,)])
def test_another_number_of_values_is_an_error_that_names_the_shape(prompts: PromptBatch, shape: Any) -> None:
    with pytest.raises(RewardError, match=rf"`picky_reward`.* \[{', '.join(map(str, shape))}\] instead of \[16\]"):
        compute_rewards(reward_that_returns(torch.zeros(shape)), media(), prompts)


def test_a_value_too_large_for_float32_is_an_error_and_not_a_silent_infinity(prompts: PromptBatch) -> None:
    values = torch.full((16,), 1e300, dtype=torch.float64)
    with pytest.raises(RewardError, match="returned inf for 16 of 16"):
        compute_rewards(reward_that_returns(values), media(), prompts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_rewards_of_any_type_become_float32_without_a_gradient(prompts: PromptBatch, dtype: torch.dtype) -> None:
    rewards = compute_rewards(reward_that_returns(torch.tensor([0, 1] * 8).to(dtype)), media(), prompts)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [0.0, 1.0] * 8
    assert not compute_rewards(BrightnessReward(), media(), prompts).requires_grad


def test_an_error_of_the_reward_itself_is_the_cause_of_one_that_names_reward_and_prompt(prompts: PromptBatch) -> None:
    def server_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
        raise ConnectionRefusedError("port 8000")

    with pytest.raises(
        RewardError, match="`server_reward` failed for 16 of 16.*'prompt 0': ConnectionRefusedError: port 8000"
    ) as info:
        compute_rewards(server_reward, media(), prompts)
    assert isinstance(info.value.__cause__, ConnectionRefusedError)


def test_a_reward_sees_the_media_and_prompts_row_by_row() -> None:
    words = ["low", "middle", "high", "top"]
    prompts = PromptBatch.for_validation([Prompt(word, uid) for uid, word in enumerate(words)], seed=0)
    brightness = torch.tensor([0.0, 0.5, 0.25, 0.75])
    rewards = compute_rewards(level_reward, brightness[:, None, None, None].expand(4, 1, 2, 4), prompts)
    assert rewards.tolist() == pytest.approx([0.0, -0.0625, -0.0625, 0.0])


def test_a_reward_is_named_after_its_function_or_class() -> None:
    assert reward_name(level_reward) == "level_reward"
    assert reward_name(BrightnessReward()) == "BrightnessReward"
    assert reward_name(BrightnessReward().forward) == "forward"
    assert reward_name(partial(partial(level_reward), prompts=None)) == "level_reward"
    assert reward_name(partial(BrightnessReward())) == "BrightnessReward"


class Unreadable:
    """Says nothing of itself and gives no values."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __float__(self) -> float:
        raise ValueError("no number")

    def tolist(self) -> list[float]:
        raise ValueError("no list")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (10**400, r"returned 10{76}\.\.\. for 1 of 16"),
        (10**5000, "returned int that cannot be shown|returned 1000"),  # older Pythons write out any integer
        (Fraction(10**400, 3), "returned Fraction"),
        (Unreadable(), "returned Unreadable that cannot be shown"),
        (torch.empty((), device="meta"), "returned tensor"),
        (["a", "b" * 1000], r"returned \['a', 'b+\.\.\. for"),
    ],
    ids=["integer", "longer integer", "fraction", "object", "meta", "list"],
)
def test_an_entry_that_is_no_number_at_all_is_an_error_that_names_the_reward(
    prompts: PromptBatch, bad: Any, message: str
) -> None:
    with pytest.raises(RewardError, match=f"`picky_reward` ({message}).*'prompt 7'") as info:
        compute_rewards(reward_that_returns([1.0] * 7 + [bad] + [1.0] * 8), media(), prompts)
    assert len(str(info.value)) < 300


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Unreadable(), "returned Unreadable that cannot be read for 16 of 16 .*: ValueError: no list"),
        (torch.empty(16, device="meta"), "returned Tensor that cannot be read for 16 of 16 .*: NotImplementedError: "),
        (torch.zeros(16).to_sparse(), "returned Tensor that cannot be read for 16 of 16 .*: "),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_reward(prompts: PromptBatch, bad: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"`picky_reward` {message}"):
        compute_rewards(reward_that_returns(bad), media(), prompts)


def test_an_error_that_cannot_say_what_it_is_is_named_by_its_class(prompts: PromptBatch) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def raising(media: Tensor, prompts: PromptBatch) -> Tensor:
        raise SilentError

    with pytest.raises(RewardError, match="`raising` failed for 16 of 16 samples.*: SilentError."):
        compute_rewards(raising, media(), prompts)


@pytest.mark.parametrize("joined", [False, True])
def test_what_cannot_be_sent_to_workers_is_named_with_the_remedy(joined: bool) -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
            return media.flatten(1).mean(1)

    message = (
        "^reward `Locked` must be picklable, as workers get a copy of it, but has what is not "
        r"\(TypeError: cannot pickle '_thread.lock' object\): make that in a method `setup\(device\)`, which "
        "workers call.$"
    )
    check_picklable(SeveralRewards([level_reward, BrightnessReward()]))
    with pytest.raises(ValueError, match=message):
        check_picklable(SeveralRewards([level_reward, Locked()]) if joined else Locked())
