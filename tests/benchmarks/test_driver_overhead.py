"""The benchmark of the driver runs and its figures make sense; nothing here asserts a time."""

from __future__ import annotations

import pytest

from benchmarks import driver_overhead
from benchmarks.driver_overhead import MOST_RSS_DIFFERENCE, Memory, StepCosts, memory_table, step_table


def text_of(table: object) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_steps_of_empty_work_are_measured() -> None:
    few, many = (driver_overhead.measure_steps("inline", count, num_steps=3) for count in (2, 8))
    for costs in (few, many):
        assert 0 < costs.fastest_step_s <= costs.step_s
        assert 0 < costs.busiest_worker_s < costs.step_s
        assert costs.driver_s > 0
    assert many.driver_s > few.driver_s
    assert "step of 8 micro-batches" in text_of(step_table("inline", few, many))


@pytest.mark.parametrize(
    ("step_s", "slope_s", "verdicts"), [(0.014, 0.0009, ["met", "met"]), (0.02, 0.002, ["MISSED"] * 2)]
)
def test_targets_are_those_of_a_step_and_of_one_more_micro_batch(
    step_s: float, slope_s: float, verdicts: list[str]
) -> None:
    few = StepCosts(4, step_s, step_s, 0.01, 0.004, 0.0)
    many = StepCosts(14, step_s + 10 * slope_s, step_s, 0.01 + 10 * slope_s, 0.004, 0.0)
    text = text_of(step_table("local", few, many))
    assert [word for word in text.split() if word in ("met", "MISSED")] == verdicts


def test_memory_that_follows_the_policy_misses_the_target() -> None:
    small = Memory(1 << 20, 400 << 20, 410 << 20, 405 << 20, 0.1)
    for more, verdict in ((MOST_RSS_DIFFERENCE, "met"), (MOST_RSS_DIFFERENCE + (1 << 20), "MISSED")):
        large = Memory(384 << 20, (400 << 20) + more, 1200 << 20, 800 << 20, 2.0)
        assert verdict in text_of(memory_table("local", [small, large]))
