"""A loader that may be looked into gives the batches of the plain loader, and resumes at every position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from digenrl import Prompt
from digenrl.data import PromptLoader
from digenrl.strategies.lookahead import LookaheadLoader

NUM_EPOCHS = 3


def plain_loader() -> Any:
    return DataLoader([f"prompt {row}" for row in range(7)], batch_size=2, shuffle=True, collate_fn=list)


def loader_with_a_generator_of_its_own() -> Any:
    rng = torch.Generator().manual_seed(5)
    return DataLoader(range(7), batch_size=2, shuffle=True, collate_fn=list, generator=rng)


def loader_with_a_sampler_of_its_own() -> Any:
    sampler: Any = DistributedSampler(range(7), num_replicas=2, rank=1, seed=3)
    return DataLoader(range(7), batch_size=1, sampler=sampler, collate_fn=list)


def unshuffled_list() -> Any:
    return [[0, 1], [2, 3], [4]]


def prompt_loader() -> Any:
    return PromptLoader([Prompt(f"prompt {row}", row) for row in range(7)], 2, seed=3, shuffle=True)


LOADERS: list[Callable[[], Any]] = [
    plain_loader, loader_with_a_generator_of_its_own, loader_with_a_sampler_of_its_own, unshuffled_list, prompt_loader,
]  # fmt: skip


def plain_batches(make: Callable[[], Any], *, seed: int) -> list[list[Any]]:
    """What Lightning would get without lookahead, epoch by epoch."""
    torch.manual_seed(seed)
    loader = make()
    epochs = []
    for epoch in range(NUM_EPOCHS):
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)  # as Lightning does
        epochs.append(list(loader))
    return epochs


def committed_batches(loader: LookaheadLoader) -> Iterator[Any]:
    """Give batches as in a run in which each batch is an optimizer step."""
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            loader.commit(1)
            yield batch


@pytest.mark.parametrize("make", LOADERS)
def test_it_gives_the_batches_of_the_plain_loader(make: Callable[[], Any]) -> None:
    expected = plain_batches(make, seed=1)
    torch.manual_seed(1)
    loader = LookaheadLoader(make())
    assert len(loader) == len(expected[0])
    assert [list(loader) for _ in range(NUM_EPOCHS)] == expected


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("peek_seed", range(4))
def test_peeking_neither_loses_nor_repeats_nor_reorders(make: Callable[[], Any], peek_seed: int) -> None:
    expected = plain_batches(make, seed=1)
    stream = sum(expected, [])
    torch.manual_seed(1)
    loader, rng = LookaheadLoader(make()), random.Random(peek_seed)
    got: list[Any] = []
    for epoch in range(NUM_EPOCHS):
        for batch in loader:
            got.append(batch)
            num_peeked = rng.randint(0, len(loader))
            if len(got) + num_peeked <= len(stream):
                assert loader.peek(num_peeked) == stream[len(got) : len(got) + num_peeked]
        assert got == sum(expected[: epoch + 1], [])


def test_peeking_ends_behind_the_next_epoch() -> None:
    loader = LookaheadLoader(unshuffled_list())
    batches = iter(loader)
    next(batches)
    assert loader.peek(100) == [[2, 3], [4], *unshuffled_list()]
    assert [next(batches), next(batches)] == [[2, 3], [4]]
    with pytest.raises(StopIteration):
        next(batches)
    assert list(loader) == unshuffled_list()


def test_peeking_before_the_first_batch_shows_it() -> None:
    loader = LookaheadLoader(prompt_loader())
    first = loader.peek(2)
    assert list(loader)[:2] == first


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("num_peeked", [0, 1, 5])
def test_a_resume_at_every_position_gives_the_rest_of_the_uninterrupted_run(
    make: Callable[[], Any], num_peeked: int
) -> None:
    whole = [batch for epoch in plain_batches(make, seed=1) for batch in epoch]
    for position in range(1, len(whole)):
        torch.manual_seed(1)
        interrupted = LookaheadLoader(make())
        run = committed_batches(interrupted)
        for _ in range(position):
            next(run)
            interrupted.peek(num_peeked)
        state = interrupted.state_dict()
        torch.manual_seed(99)
        resumed = LookaheadLoader(make())
        resumed.load_state_dict(state)
        rest = list(committed_batches(resumed))
        assert rest[: len(whole) - position] == whole[position:], f"position {position}"


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("num_peeked", [0, 2])
def test_a_resume_of_a_run_that_had_not_begun_gives_all_of_it(make: Callable[[], Any], num_peeked: int) -> None:
    torch.manual_seed(1)
    not_begun = LookaheadLoader(make())
    not_begun.peek(num_peeked)
    state = not_begun.state_dict()
    torch.manual_seed(99)
    resumed = LookaheadLoader(make())
    resumed.load_state_dict(state)
    assert [list(resumed) for _ in range(NUM_EPOCHS)] == plain_batches(make, seed=1)


@pytest.mark.parametrize("make", LOADERS)
def test_a_batch_that_was_not_committed_comes_again_after_a_resume(make: Callable[[], Any]) -> None:
    whole = sum(plain_batches(make, seed=1), [])
    torch.manual_seed(1)
    interrupted = LookaheadLoader(make())
    batches = iter(interrupted)
    for _ in range(2):
        next(batches)
    interrupted.commit(1)
    resumed = LookaheadLoader(make())
    resumed.load_state_dict(interrupted.state_dict())
    assert list(resumed) == whole[1 : len(resumed)]


def test_a_second_resume_continues_the_first() -> None:
    whole = sum(plain_batches(plain_loader, seed=1), [])
    got, state = [], None
    torch.manual_seed(1)
    for _ in range(len(whole)):
        loader = LookaheadLoader(plain_loader())
        if state is not None:
            torch.manual_seed(len(got))
            loader.load_state_dict(state)
        got.append(next(committed_batches(loader)))
        state = loader.state_dict()
    assert got == whole


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 6))
def test_an_epoch_that_is_left_early_is_followed_by_the_next(taken: list[int], num_peeked: int) -> None:
    loader, plain = LookaheadLoader(prompt_loader()), prompt_loader()
    for epoch, count in enumerate(taken):
        batches = iter(loader)
        got = []
        for _ in range(count):
            got.append(next(batches))
            loader.peek(num_peeked)
        assert got == list(plain.batches(epoch))[:count]


def test_an_epoch_of_a_shuffled_loader_that_is_left_early_is_followed_by_the_next() -> None:
    torch.manual_seed(1)
    plain = plain_loader()
    expected = [next(iter(plain)) for _ in range(4)]
    torch.manual_seed(1)
    loader = LookaheadLoader(plain_loader())
    assert [next(iter(loader)) for _ in range(4)] == expected


@pytest.mark.parametrize("num_taken", [1, 2, 3])
def test_a_resume_in_a_later_epoch_knows_nothing_of_an_epoch_that_was_left_early(num_taken: int) -> None:
    loader = LookaheadLoader(prompt_loader())
    for _ in range(2):
        batches = iter(loader)
        for _ in range(num_taken):
            next(batches)
            loader.commit(1)
    resumed = LookaheadLoader(prompt_loader())
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == list(prompt_loader().batches(1))[num_taken:]


def test_a_used_loader_forgets_its_own_position_when_it_takes_over_another() -> None:
    reference = LookaheadLoader(prompt_loader())
    next(iter(reference))
    reference.commit(1)
    used = LookaheadLoader(prompt_loader())
    list(used)
    used.peek(1)
    used.load_state_dict(reference.state_dict())
    assert used.peek(2) == list(prompt_loader().batches(0, start=1))[:2]
    assert list(used) == list(prompt_loader().batches(0, start=1))


def test_a_stream_without_a_length_is_read_and_resumed() -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = LookaheadLoader(Stream())
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]
    loader.commit(2)
    resumed = LookaheadLoader(Stream())
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [2, 3, 4]


def test_an_epoch_that_is_asked_for_twice_before_its_first_batch_is_one_epoch() -> None:
    loader = LookaheadLoader(prompt_loader())
    iter(loader)
    assert list(loader) == list(prompt_loader().batches(0))
    assert list(loader) == list(prompt_loader().batches(1))


def test_a_resume_that_is_asked_for_twice_skips_what_was_committed() -> None:
    loader = LookaheadLoader(prompt_loader())
    next(committed_batches(loader))
    resumed = LookaheadLoader(prompt_loader())
    resumed.load_state_dict(loader.state_dict())
    iter(resumed)
    assert list(resumed) == list(prompt_loader().batches(0))[1:]


def test_a_loader_may_have_no_length() -> None:
    assert LookaheadLoader(unshuffled_list()).has_length
    assert not LookaheadLoader(iter([[0], [1]])).has_length
