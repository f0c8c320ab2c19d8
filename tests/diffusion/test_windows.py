"""Trained steps: windows against published ones, and that they are full, in bounds and the same everywhere."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from digenrl.diffusion import (
    ExponentialDecayWindow,
    LinearDecayWindow,
    RandomWindow,
    SlidingWindow,
    Window,
    random_timesteps,
    shared_timesteps,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mixgrpo_window_states.json").read_text())

# The published code's `max_timesteps` is the index of our last trainable step, so `stop` is one more.
PUBLISHED = {
    "progressive_overlap1": SlidingWindow(size=4, stop=24, steps_per_window=3),
    "progressive_nooverlap": SlidingWindow(size=4, stop=15, stride=4, steps_per_window=2),
    "progressive_noroll": SlidingWindow(size=4, stop=15, stride=4, steps_per_window=2, roll_back=False),
    "frozen_overlap0": SlidingWindow(size=4, stop=24, stride=0, steps_per_window=3),
    "decay": LinearDecayWindow(size=4, stop=15, steps_per_window=10, min_steps_per_window=1),
    "exp_decay": ExponentialDecayWindow(size=4, stop=24, steps_per_window=5, decay_rate=0.1, decay_threshold=13),
}


@st.composite
def windows(draw: st.DrawFn) -> Window:
    start, size, slack = draw(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 12)))
    bounds = {"start": start, "size": size, "stop": start + size + slack}
    kind = draw(st.sampled_from([RandomWindow, SlidingWindow, LinearDecayWindow, ExponentialDecayWindow]))
    if kind is RandomWindow:
        return RandomWindow(**bounds)
    steps_per_window = draw(st.integers(1, 5))
    settings = bounds | {
        "stride": draw(st.integers(0, 8)),
        "steps_per_window": steps_per_window,
        "roll_back": draw(st.booleans()),
    }
    if kind is LinearDecayWindow:
        settings["min_steps_per_window"] = draw(st.integers(1, steps_per_window))
    if kind is ExponentialDecayWindow:
        settings |= {"decay_rate": draw(st.floats(0, 1000)), "decay_threshold": draw(st.integers(0, 10))}
    return kind(**settings)


# ---- windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_windows_equal_mixgrpos_while_those_have_their_full_size(name: str) -> None:
    expected = GOLDEN[name]["seq"]
    assert [list(PUBLISHED[name].steps(step, seed=0)) for step in range(len(expected))] == expected


def test_every_stored_window_is_compared() -> None:
    assert set(PUBLISHED) == set(GOLDEN)


@given(windows(), st.integers(0, 500), st.integers(0, 2**63 - 1))
def test_a_window_is_full_and_in_bounds(window: Window, step: int, seed: int) -> None:
    steps = window.steps(step, seed=seed)
    assert len(steps) == window.size
    assert window.start <= steps.start
    assert steps.stop <= window.stop


@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 6), st.integers(1, 4))
def test_a_sliding_window_visits_every_step_and_begins_anew(size: int, slack: int, stride: int, dwell: int) -> None:
    window = SlidingWindow(size=size, stop=size + slack, stride=min(stride, size), steps_per_window=dwell)
    firsts = [window.steps(step, seed=0).start for step in range(200)]
    period = dwell * (firsts.index(slack) // dwell + 1)
    assert {index for first in firsts[:period] for index in range(first, first + size)} == set(range(size + slack))
    assert firsts[:period] == sorted(firsts[:period])
    assert firsts[period:] == firsts[: 200 - period]
    assert set(Counter(firsts[:period]).values()) == {dwell}


def test_a_window_that_does_not_roll_back_stays_at_its_last_place() -> None:
    window = SlidingWindow(size=4, stop=15, start=2, stride=4, steps_per_window=2, roll_back=False)
    firsts = [window.steps(step, seed=0).start for step in range(12)]
    assert firsts == [2, 2, 6, 6, 10, 10, 11, 11, 11, 11, 11, 11]


def test_the_decay_starts_where_the_window_does_and_rounds_down() -> None:
    window = LinearDecayWindow(size=1, start=3, stop=8, steps_per_window=5, min_steps_per_window=1)
    firsts = [window.steps(step, seed=0).start for step in range(16)]
    assert Counter(firsts[:15]) == {3: 5, 4: 4, 5: 3, 6: 2, 7: 1}
    assert firsts[15] == 3


def test_random_windows_are_spread_evenly_over_all_places_and_repeat_with_the_seed() -> None:
    window = RandomWindow(size=3, stop=7, start=2)
    places = Counter(window.steps(step, seed=5).start for step in range(3000))
    assert set(places) == {2, 3, 4}
    assert all(abs(count - 1000) < 130 for count in places.values())  # five standard deviations
    draws = {seed: [window.steps(step, seed=seed) for step in range(20)] for seed in (5, 6)}
    assert draws[5] == [RandomWindow(size=3, stop=7, start=2).steps(step, seed=5) for step in range(20)]
    assert draws[5] != draws[6]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (RandomWindow, {"size": 0, "stop": 5}, r"`size` .* \[1, 5\].* got 0"),
        (RandomWindow, {"size": 3, "stop": 5, "start": 3}, r"`size` .* \[1, 2\].* got 3"),
        (RandomWindow, {"size": 1, "stop": 5, "start": -1}, "`start` .* got -1"),
        (SlidingWindow, {"size": 1, "stop": 5, "stride": -1}, "`stride` .* got -1"),
        (SlidingWindow, {"size": 1, "stop": 5, "steps_per_window": 0}, "`steps_per_window` .* got 0"),
        (LinearDecayWindow, {"size": 1, "stop": 5, "min_steps_per_window": 0}, r"\[1, 25\], got 0"),
        (LinearDecayWindow, {"size": 1, "stop": 5, "min_steps_per_window": 26}, r"\[1, 25\], got 26"),
        (ExponentialDecayWindow, {"size": 1, "stop": 5, "decay_rate": -0.1}, "`decay_rate` .* got -0.1"),
        (ExponentialDecayWindow, {"size": 1, "stop": 5, "decay_rate": float("nan")}, "`decay_rate` .* got nan"),
        (ExponentialDecayWindow, {"size": 9, "stop": 5}, "`size` .* got 9"),
    ],
)
def test_a_window_that_cannot_be_is_refused_in_one_line(kind: type[Window], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)


# ---- random subsets ------------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 20), st.randoms(use_true_random=False))
def test_a_samples_timesteps_are_distinct_and_the_same_in_any_batch(
    data: st.DataObject, num_available: int, rng: random.Random
) -> None:
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8, unique=True))
    num_chosen = data.draw(st.integers(1, num_available))
    chosen = random_timesteps(seeds, num_available=num_available, num_chosen=num_chosen)
    assert chosen.shape == (len(seeds), num_chosen)
    assert all(len(set(row)) == num_chosen and set(row) <= set(range(num_available)) for row in chosen.tolist())
    others = rng.sample(seeds, rng.randint(1, len(seeds)))
    again = random_timesteps(others, num_available=num_available, num_chosen=num_chosen)
    assert torch.equal(again, chosen[[seeds.index(seed) for seed in others]])


def test_fewer_timesteps_are_the_beginning_of_more() -> None:
    few, all_of_them = (random_timesteps(range(5), num_available=9, num_chosen=k) for k in (5, 9))
    assert torch.equal(few, all_of_them[:, :5])
    assert torch.equal(all_of_them.sort(dim=1).values, torch.arange(9).expand(5, -1))


def test_samples_have_permutations_of_their_own_in_even_shares() -> None:
    first = random_timesteps(range(3000), num_available=6, num_chosen=2)
    pairs = Counter(map(tuple, first.tolist()))
    assert len(pairs) == 30
    assert all(abs(count - 100) < 50 for count in pairs.values())  # five standard deviations


def test_a_steps_shared_timesteps_are_distinct_uniform_and_depend_on_seed_and_step() -> None:
    draws = [shared_timesteps(step, seed=3, num_available=7, num_chosen=4) for step in range(2000)]
    assert all(len(set(draw.tolist())) == 4 for draw in draws)
    counts = torch.cat(draws).bincount(minlength=7)
    assert ((counts - 8000 / 7).abs() < 111).all()  # five standard deviations
    assert torch.equal(shared_timesteps(8, seed=3, num_available=7, num_chosen=4), draws[8])
    other = torch.stack([shared_timesteps(step, seed=4, num_available=7, num_chosen=4) for step in range(20)])
    assert not torch.equal(other, torch.stack(draws[:20]))


def test_choosing_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    random_timesteps([1, 2], num_available=4, num_chosen=2)
    shared_timesteps(0, seed=0, num_available=4, num_chosen=2)
    RandomWindow(size=2, stop=5).steps(0, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_chosen", [0, 5])
def test_more_timesteps_than_there_are_or_none_are_refused(num_chosen: int) -> None:
    with pytest.raises(ValueError, match=rf"`num_chosen` .* \[1, 4\], got {num_chosen}"):
        random_timesteps([1], num_available=4, num_chosen=num_chosen)
    with pytest.raises(ValueError, match=rf"`num_chosen` .* \[1, 4\], got {num_chosen}"):
        shared_timesteps(1, seed=1, num_available=4, num_chosen=num_chosen)
