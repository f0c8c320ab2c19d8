"""What is done about samples whose reward fails: asked again, left out, or the end; and how calls are cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.rewards import ErrorPolicy, RewardError, SeveralRewards, compute_rewards, score_samples
from digenrl.types import Prompt, PromptBatch

RETRY = ErrorPolicy(on_error="retry", num_retries=2, wait_s=0.0)
DROP = replace(RETRY, on_error="drop_group")
PROMPTS = PromptBatch.for_step([Prompt(f"prompt {row}", row) for row in range(4)], step=0, group_size=4, seed=0)
MEDIA = torch.arange(16.0).reshape(16, 1, 1, 1) / 16


class Asked:
    """Gives each sample its brightness, and remembers what it was asked about."""

    name = "asked"

    def __init__(self, bad: dict[int, Any] | None = None, *, good_after: int = 10**9, **traits: Any) -> None:
        self.bad, self.good_after = bad or {}, good_after
        self.calls: list[list[int]] = []
        vars(self).update(traits)

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
        rows = (media.flatten() * 16).int().tolist()
        assert [PROMPTS.seeds[row] for row in rows] == list(prompts.seeds), "media and prompts belong together"
        self.calls.append(rows)
        values = [self.bad.get(row, row / 16) if len(self.calls) <= self.good_after else row / 16 for row in rows]
        for value in values:
            if isinstance(value, KeyError):
                raise value
        return values


def test_only_samples_that_failed_are_asked_about_again() -> None:
    reward = Asked({3: math.nan, 11: None}, good_after=1)
    scored = score_samples(reward, MEDIA, PROMPTS, RETRY)
    assert reward.calls == [list(range(16)), [3, 11]]
    assert torch.equal(scored.rewards, MEDIA.flatten())
    assert scored.failures == ()


def test_a_reward_of_groups_is_asked_again_about_whole_groups() -> None:
    reward = Asked({3: math.nan, 11: None}, good_after=1, groupwise=True)
    score_samples(reward, MEDIA, PROMPTS, RETRY)
    assert reward.calls == [list(range(16)), [0, 1, 2, 3, 8, 9, 10, 11]]


def test_asking_ends_with_an_error_that_says_how_often() -> None:
    reward = Asked({5: math.inf})
    with pytest.raises(RewardError, match="`asked` returned inf for 1 of 16.*'prompt 1', asked 3 times"):
        score_samples(reward, MEDIA, PROMPTS, RETRY)
    assert reward.calls == [list(range(16)), [5], [5]]


def test_raise_asks_once() -> None:
    reward = Asked({5: math.inf})
    with pytest.raises(RewardError):
        score_samples(reward, MEDIA, PROMPTS, ErrorPolicy(on_error="raise"))
    assert len(reward.calls) == 1


def test_dropping_marks_the_sample_and_names_reward_prompt_and_reason() -> None:
    scored = score_samples(Asked({5: math.inf, 6: ValueError("no text")}), MEDIA, PROMPTS, DROP)
    assert scored.rewards.isnan().nonzero().flatten().tolist() == [5, 6]
    assert [str(failure) for failure in scored.failures] == [
        "reward `asked` for prompt 'prompt 1' returned inf",
        "reward `asked` for prompt 'prompt 1' failed: ValueError: no text",
    ]


@pytest.mark.parametrize("groupwise", [False, True])
def test_what_raises_for_a_batch_is_found_by_asking_about_each_by_itself(groupwise: bool) -> None:
    scored = score_samples(Asked({5: KeyError("face")}, groupwise=groupwise), MEDIA, PROMPTS, DROP)
    assert scored.rewards.isnan().nonzero().flatten().tolist() == ([4, 5, 6, 7] if groupwise else [5])


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("num_retries", [0, 1])
def test_what_is_dropped_does_not_depend_on_how_samples_were_batched(batch_size: int | None, num_retries: int) -> None:
    reward = Asked({5: KeyError("face"), 6: None}, batch_size=batch_size)
    scored = score_samples(reward, MEDIA, PROMPTS, replace(DROP, num_retries=num_retries))
    assert scored.rewards.isnan().nonzero().flatten().tolist() == [5, 6]
    assert [failure.reason for failure in scored.failures] == ["failed: KeyError: 'face'", "returned None"]


def test_without_retries_only_samples_that_failed_together_are_asked_about_one_by_one() -> None:
    reward = Asked({1: KeyError("face"), 6: None, 9: KeyError("face")}, batch_size=4)
    score_samples(reward, MEDIA, PROMPTS, replace(DROP, num_retries=0))
    assert reward.calls[4:] == [[0], [1], [2], [3], [8], [9], [10], [11]]
    alone = Asked({1: KeyError("face")}, batch_size=1)
    score_samples(alone, MEDIA, PROMPTS, replace(DROP, num_retries=0))
    assert alone.calls == [[row] for row in range(16)]


def test_without_retries_a_reward_of_groups_is_asked_about_each_group() -> None:
    reward = Asked({5: KeyError("face")}, groupwise=True)
    scored = score_samples(reward, MEDIA, PROMPTS, replace(DROP, num_retries=0))
    assert reward.calls[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert scored.rewards.isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_waits_double_up_to_a_bound_and_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("digenrl.rewards.scoring._sleep", lambda wait_s, poll: waits.append(wait_s))
    with pytest.raises(RewardError, match="asked 1001 times"):
        score_samples(Asked({5: None}), MEDIA, PROMPTS, ErrorPolicy(on_error="retry", num_retries=1000))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 994]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_retries": 10**6}, "`reward_retries` must be at most 1000, which take 8 hours of waits, got 1000000"),
        ({"num_retries": True}, "`reward_retries` is a count and must be at least 0, got True"),
        ({"wait_s": -1.0}, r"`wait_s` is in seconds and must be in \[0, inf\), got -1.0"),
        ({"wait_s": math.nan}, "`wait_s` .* got nan"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErrorPolicy(**settings)


class Spoiler(Asked):
    """Blackens what it was given, and scores what was there before."""

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
        values = super().__call__(media, prompts)
        media.zero_()
        return values


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_reward_that_changes_its_media_spoils_nothing(batch_size: int | None) -> None:
    kept = MEDIA.clone()
    joined = SeveralRewards([Spoiler(name="spoiler", batch_size=batch_size), Asked()])
    assert torch.equal(compute_rewards(joined, kept, PROMPTS), MEDIA.flatten(1).expand(16, 2))
    assert torch.equal(kept, MEDIA)
    retried = Spoiler(dict.fromkeys(range(16)), good_after=1)  # all again, and so the same media
    assert torch.equal(score_samples(retried, kept, PROMPTS, RETRY).rewards, MEDIA.flatten())


def test_a_reward_that_leaves_a_sample_out_has_failed_for_that_sample() -> None:
    def short(media: Tensor, prompts: PromptBatch) -> Any:
        return [value for value in media.flatten().tolist() if value != 5 / 16]

    scored = score_samples(short, MEDIA, PROMPTS, DROP)
    assert scored.rewards.isnan().nonzero().flatten().tolist() == [5]
    assert [failure.reason for failure in scored.failures] == ["returned 0 values instead of 1"]


def test_each_of_several_rewards_fails_by_itself() -> None:
    first, second = Asked({1: None}, name="first"), Asked({2: None}, name="second")
    scored = score_samples(SeveralRewards([first, second]), MEDIA, PROMPTS, DROP)
    assert scored.rewards.isnan().nonzero().tolist() == [[1, 0], [2, 1]]
    assert {failure.reward for failure in scored.failures} == {"first", "second"}


@pytest.mark.parametrize("batch_size", [1, 3, 5, 16, 100])
def test_calls_hold_at_most_the_batch_size(batch_size: int) -> None:
    reward = Asked(batch_size=batch_size)
    assert torch.equal(score_samples(reward, MEDIA, PROMPTS, RETRY).rewards, MEDIA.flatten())
    assert [row for call in reward.calls for row in call] == list(range(16))
    assert max(map(len, reward.calls)) == min(batch_size, 16)


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [4] * 4), (7, [4] * 4), (8, [8, 8]), (9, [8, 8])])
def test_calls_of_a_groupwise_reward_hold_whole_groups(batch_size: int, sizes: list[int]) -> None:
    reward = Asked(batch_size=batch_size, groupwise=True)
    score_samples(reward, MEDIA, PROMPTS, RETRY)
    assert [len(call) for call in reward.calls] == sizes


def test_groups_that_are_mixed_in_a_batch_keep_their_samples() -> None:
    rows = [0, 4, 1, 5, 2, 6, 3, 7]
    reward = Asked(groupwise=True)
    scored = score_samples(reward, MEDIA[rows], PROMPTS.select(rows), RETRY)
    assert reward.calls == [list(range(8))]
    assert scored.rewards.tolist() == [row / 16 for row in rows]


class Offloaded(Asked):
    offload = True

    def __init__(self) -> None:
        super().__init__({0: KeyError("always")})
        self.moves: list[str] = []

    def to(self, device: torch.device) -> None:
        self.moves.append(str(device))


def test_an_offloaded_reward_goes_to_host_memory_even_after_an_error() -> None:
    reward = Offloaded()
    media = MEDIA.to("meta")
    with pytest.raises(RewardError):
        score_samples(lambda_of(reward), media, PROMPTS, ErrorPolicy(on_error="raise"))
    assert reward.moves == ["meta", "cpu"]


def lambda_of(reward: Offloaded) -> Any:
    """The same traits, a call that needs no data."""

    def call(media: Tensor, prompts: PromptBatch) -> Any:
        raise KeyError("always")

    reward.__class__ = type("Broken", (Offloaded,), {"__call__": lambda self, media, prompts: call(media, prompts)})
    return reward


class Stuck(Asked):
    """Cannot be moved to some devices."""

    name = "stuck"
    offload = True

    def __init__(self, stuck_at: tuple[str, ...], times: int = 10**9) -> None:
        super().__init__()
        self.stuck_at, self.times, self.moves = stuck_at, times, list[str]()

    def to(self, device: torch.device) -> None:
        self.moves.append(str(device))
        if str(device) in self.stuck_at and len(self.moves) <= self.times:
            raise MemoryError("full")


@pytest.mark.parametrize("stuck_at", [("cpu",), ("meta",), ("meta", "cpu")])
def test_an_offloaded_reward_that_cannot_be_moved_has_failed(stuck_at: tuple[str, ...]) -> None:
    class StuckMeta(Stuck):
        def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
            return [1.0] * len(prompts)

    reward = StuckMeta(stuck_at)
    message = f"reward `stuck` failed for 16 of 16 .*: cannot be moved to {stuck_at[0]}: MemoryError: full"
    with pytest.raises(RewardError, match=message):
        score_samples(reward, MEDIA.to("meta"), PROMPTS, ErrorPolicy(on_error="raise"))
    assert reward.moves == ["meta", "cpu"]
    dropped = score_samples(StuckMeta(stuck_at), MEDIA.to("meta"), PROMPTS, DROP)
    assert len(dropped.failures) == 16
    assert dropped.rewards.isnan().all()


def test_a_reward_that_can_be_moved_again_is_asked_again() -> None:
    scored = score_samples(Stuck(("cpu",), times=2), MEDIA, PROMPTS, RETRY)
    assert torch.equal(scored.rewards, MEDIA.flatten())


def test_an_interrupt_is_not_taken_for_a_failure() -> None:
    class Interrupted(Stuck):
        def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
            self.stuck_at = ("cpu",)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_samples(Interrupted(()), MEDIA, PROMPTS, DROP)
