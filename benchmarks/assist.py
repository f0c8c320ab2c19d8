"""How long it takes to plan trainer-assisted generation: `python -m benchmarks.assist` from the repository's root."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from digenrl.scheduling.assist import AssistPlan, AssistState, next_task, plan_assist

COUNTS = (8, 128, 1024, 4096)
UPDATE_RATIOS = (0.1, 0.5)
"""Update over generation time, u/g."""
ASSIST_RATIOS = (0.1, 0.5, 2.0)
"""Assisted over generation time, a/g."""
REPEATS = 5

TARGETS = (
    ("optimal", 128, 1.0),
    ("search", 128, 50.0),
    ("optimal", 4096, 30.0),
)
"""Method, micro-batches, and the most milliseconds, all at u/g = 0.1."""

Result = TypeVar("Result")


def measure(function: Callable[[], Result]) -> tuple[float, Result]:
    """Give the shortest of some durations in milliseconds, and the result."""
    durations = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = function()
        durations.append(time.perf_counter() - start)
    return min(durations) * 1e3, result


def measure_plan(num_micro_batches: int, update: float, assist: float, method: str) -> tuple[float, AssistPlan]:
    """Plan with a generation time of 1 s."""
    return measure(
        lambda: plan_assist(num_micro_batches, generate_s=1.0, assist_s=assist, update_s=update, method=method)
    )


def measure_decision(num_micro_batches: int, update: float, assist: float) -> float:
    """Ask only for the first task, in milliseconds."""
    state = AssistState(num_unassigned=num_micro_batches - 1, num_ready=0, in_progress_s=(1.0,))
    return measure(lambda: next_task(state, generate_s=1.0, assist_s=assist, update_s=update))[0]


def main() -> None:
    """Print the table and how the targets are met."""
    slowest: dict[tuple[str, int], float] = {}
    print("Makespans in units of the generation time g; shortest time of", REPEATS)
    print(f"{'':>6} {'':>5} {'':>5} | {'makespan':^26} | {'optimal':^24} | {'search':^16}")
    print(
        f"{'B':>6} {'u/g':>5} {'a/g':>5} | {'off':>8} {'search':>8} {'optimal':>8} | "
        f"{'ms':>7} {'counts':>6} {'next ms':>9} | {'ms':>8} {'bubbles':>7}"
    )
    for num_micro_batches in COUNTS:
        for update in UPDATE_RATIOS:
            for assist in ASSIST_RATIOS:
                _, off = measure_plan(num_micro_batches, update, assist, "off")
                search_ms, search = measure_plan(num_micro_batches, update, assist, "search")
                optimal_ms, optimal = measure_plan(num_micro_batches, update, assist, "optimal")
                next_ms = measure_decision(num_micro_batches, update, assist)
                makespans = f"{off.makespan_s:>8.2f} {search.makespan_s:>8.2f} {optimal.makespan_s:>8.2f}"
                print(
                    f"{num_micro_batches:>6} {update:>5} {assist:>5} | {makespans} | "
                    f"{optimal_ms:>7.3f} {optimal.num_states:>6} {next_ms:>9.4f} | "
                    f"{search_ms:>8.3f} {search.num_states:>7}"
                )
                if update == 0.1:
                    for method, duration_ms in (("optimal", optimal_ms), ("search", search_ms)):
                        key = (method, num_micro_batches)
                        slowest[key] = max(slowest.get(key, 0.0), duration_ms)
    for method, num_micro_batches, most_ms in TARGETS:
        duration_ms = slowest[method, num_micro_batches]
        verdict = "met" if duration_ms < most_ms else "MISSED"
        print(f"{method} at B={num_micro_batches}, u/g=0.1: {duration_ms:.3f} ms, target {most_ms:g} ms: {verdict}")


if __name__ == "__main__":
    main()
