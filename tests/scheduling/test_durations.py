"""Running averages against a computation by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.scheduling import Durations

SECONDS = st.floats(0, 1e6)


def test_the_first_measurement_counts_in_full() -> None:
    durations = Durations()
    durations.observe("generate", 6.0, num_units=3)
    assert durations.seconds("generate") == 2.0


def test_a_newer_measurement_counts_a_fifth() -> None:
    durations = Durations()
    for seconds in (10.0, 20.0, 0.0):
        durations.observe("update", seconds)
    # 10, then 10 + (20 - 10) / 5 = 12, then 12 - 12 / 5 = 9.6
    assert durations.seconds("update") == pytest.approx(9.6)


@given(st.lists(SECONDS, min_size=1, max_size=20))
def test_the_average_weighs_measurements_by_their_age(measured: list[float]) -> None:
    durations = Durations()
    for seconds in measured:
        durations.observe("score", seconds)
    weights = [0.8 ** (len(measured) - 1)] + [0.2 * 0.8**age for age in reversed(range(len(measured) - 1))]
    expected = sum(weight * seconds for weight, seconds in zip(weights, measured, strict=True))
    assert sum(weights) == pytest.approx(1)
    assert durations.seconds("score") == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=10), st.floats(1e-3, 1e3))
def test_tasks_of_any_size_are_comparable(sizes: list[tuple[int, int]], per_sample_s: float) -> None:
    durations = Durations()
    for size, asked in sizes:
        durations.observe("generate", size * per_sample_s, num_units=size)
        assert durations.seconds("generate", num_units=asked) == pytest.approx(asked * per_sample_s)


def test_five_tasks_after_a_change_of_speed_two_thirds_of_it_show() -> None:
    durations = Durations()
    for seconds in (1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        durations.observe("generate", seconds)
    assert durations.seconds("generate") == pytest.approx(2 - 0.8**5)


def test_kinds_of_tasks_are_averaged_apart() -> None:
    durations = Durations()
    durations.observe("generate", 4.0)
    durations.observe("load", 1.0)
    assert durations.as_dict() == {"generate": 4.0, "load": 1.0}


def test_nothing_is_known_before_the_first_task() -> None:
    durations = Durations()
    assert durations.seconds("assist", num_units=8) is None
    assert durations.as_dict() == {}
