"""The book of one step: who gets which slice, and what becomes of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.scheduling import MicroBatch, Slice, cut_step
from digenrl.scheduling.step import StepWork


def work(num_micro_batches: int = 3, *, group_size: int = 4, num_generators: int = 2) -> StepWork:
    micro_batches = cut_step(
        0,
        num_groups=num_micro_batches,
        group_size=group_size,
        groups_per_micro_batch=1,
        num_generators=num_generators,
    )
    return StepWork(micro_batches, policy_version=5)


def drain(step: StepWork) -> list[Slice]:
    """Hand out all that is left."""
    parts = []
    while step.peek() is not None:
        parts.append(step.take(is_stale=False))
    return parts


def finish(step: StepWork, micro_batch: MicroBatch) -> None:
    """Score a micro-batch whose slices are in the hands of generators, and train it."""
    for part in micro_batch.slices:
        step.mark_scored(part)
    step.mark_updated(step.take_update())


def test_slices_are_handed_out_in_order_and_each_once() -> None:
    step = work()
    parts = drain(step)
    assert [part.start for part in parts] == [0, 2, 4, 6, 8, 10]
    assert parts == sorted(set(parts))


def test_peek_shows_the_slice_that_take_gives() -> None:
    step = work()
    while (shown := step.peek()) is not None:
        assert step.take(is_stale=False) == shown


def test_generators_take_from_the_front_and_the_trainer_from_the_back() -> None:
    step = work()
    first, second, third = step.unassigned
    assert step.take(is_stale=False) == first.slices[0]
    assert step.take_micro_batch() == third
    assert list(step.unassigned) == [second]  # the first is begun and is no longer the trainer's
    assert step.num_assisted == 1
    assert third.slices[0] not in drain(step)


def test_a_micro_batch_enters_the_update_queue_with_its_last_score() -> None:
    step = work(1)
    first, second = drain(step)
    step.mark_scored(second)
    assert not step.update_queue
    step.mark_scored(first)
    assert [entry.slices for entry in step.update_queue] == [(first, second)]


def test_micro_batches_are_updated_in_the_order_of_becoming_whole() -> None:
    step = work(3)
    first, second, third = step.unassigned
    step.mark_assisted(step.take_micro_batch())
    drain(step)
    for micro_batch in (second, first):
        for part in micro_batch.slices:
            step.mark_scored(part)
    assert [step.take_update() for _ in range(3)] == [third, second, first]


def test_a_step_is_trained_when_all_its_micro_batches_are() -> None:
    step = work(2)
    micro_batches = list(step.unassigned)
    drain(step)
    finish(step, micro_batches[1])
    assert not step.is_trained
    finish(step, micro_batches[0])
    assert step.is_trained


def test_a_score_that_comes_twice_is_a_bug() -> None:
    step = work(1)
    part = step.take(is_stale=False)
    step.mark_scored(part)
    with pytest.raises(KeyError):
        step.mark_scored(part)


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 4), st.floats(0, 1, exclude_max=True))
def test_early_slices_are_the_first_that_fit_under_the_bound(
    num_micro_batches: int, group_size: int, num_generators: int, fraction: float
) -> None:
    step = work(num_micro_batches, group_size=group_size, num_generators=num_generators)
    bound = math.floor(fraction * step.num_samples + 1e-9)
    step.demand_early(fraction)
    early, rest = list(step.early), drain(step)
    assert [part.stop for part in early] == [part.stop for part in sorted([*early, *rest]) if part.stop <= bound]
    assert sum(len(part) for part in (*early, *rest)) == step.num_samples


def test_a_fraction_that_floats_get_wrong_counts_as_whole_samples() -> None:
    step = work(10, group_size=1, num_generators=1)
    step.demand_early(0.29999999999999993)  # 0.1 + 0.2 - 1e-16, as from a sum of fractions
    assert len(step.early) == 3


def test_early_slices_are_stale_and_count_as_such() -> None:
    step = work(2)
    step.demand_early(0.5)
    assert [len(step.take_early()), step.num_stale_samples] == [2, 2]
    assert [len(step.take_early()), step.num_stale_samples] == [2, 4]
    assert not step.early


def test_early_slices_that_are_given_up_come_first_again() -> None:
    step = work(2)
    step.demand_early(0.3)
    step.take(is_stale=False)
    step.give_up_early()
    assert not step.early
    assert [part.start for part in drain(step)] == [0, 4, 6]
    assert step.num_stale_samples == 0


def test_lost_slices_are_handed_out_again_in_order() -> None:
    step = work(2)
    parts = [step.take(is_stale=False) for _ in range(4)]
    step.lose(parts[2])
    step.lose(parts[1])
    assert drain(step) == [parts[1], parts[2]]


def test_lost_stale_samples_no_longer_count() -> None:
    step = work(1)
    lost = step.take(is_stale=True)
    step.take(is_stale=True)
    step.lose(lost)
    assert step.num_stale_samples == 2
    assert step.take(is_stale=False) == lost
    assert step.num_stale_samples == 2


def test_begun_samples_are_those_in_hand_and_those_left_of_a_begun_micro_batch() -> None:
    step = work(2)
    assert step.num_begun_samples == 0
    part = step.take(is_stale=False)
    step.note_begun(part, 10.0)
    assert step.num_begun_samples == 4  # two in hand, two left
    assert step.mean_time_in_hand_s(13.0) == 3.0
    step.note_ended(part, 10.0)
    assert [step.num_begun_samples, step.mean_time_in_hand_s(13.0)] == [2, 0.0]
