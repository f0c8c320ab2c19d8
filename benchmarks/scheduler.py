"""What the scheduler costs per event, and how long large simulations take: `python -m benchmarks.scheduler`."""

from __future__ import annotations

import time

from digenrl.scheduling import SchedulingPolicy
from digenrl.scheduling.events import Action, Event
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.simulate import Cluster, SimulationResult, Workload, simulate

WORKERS = (8, 64, 512, 2048)
"""Generators, and as many trainers."""

POLICIES = {
    "off": SchedulingPolicy(),
    "optimal": SchedulingPolicy(trainer_assist="optimal"),
    "optimal, staleness 0.25": SchedulingPolicy(trainer_assist="optimal", staleness=0.25),
}
MICRO_BATCHES_PER_GENERATOR = 4
NUM_EVENTS = 100_000
"""Events for each figure, at least."""

MOST_S = 20.0
"""For 1,024 generators and trainers, 4,096 micro-batches a step and ten steps."""


class TimedScheduler(Scheduler):
    """Sums the seconds spent in `observe`."""

    spent_s = 0.0

    def observe(self, event: Event, time_s: float) -> list[Action]:
        """Take the time."""
        start = time.perf_counter()
        actions = super().observe(event, time_s)
        TimedScheduler.spent_s += time.perf_counter() - start
        return actions


def workload(num_groups: int) -> Workload:
    """Give a step whose trainers are about as busy as its generators: each group is a micro-batch of four samples."""
    return Workload(
        num_groups=num_groups,
        group_size=4,
        generate_s=1.0,
        score_s=0.1,
        update_s=3.5 * 4 / num_groups,
        assist_s=6.0 * 4 / num_groups,
        optimizer_s=0.5,
        publish_s=0.5,
        load_s=0.5,
        jitter=0.1,
    )


def run(num_workers: int, num_groups: int, num_steps: int, policy: SchedulingPolicy) -> SimulationResult:
    """Simulate as many generators as trainers."""
    cluster = Cluster(generators=num_workers, trainers=num_workers)
    return simulate(cluster, workload(num_groups), policy, num_steps=num_steps, record_spans=False)


def main() -> None:
    """Print both tables."""
    from unittest.mock import patch

    print(f"Scheduler, microseconds per event ({MICRO_BATCHES_PER_GENERATOR} micro-batches per generator and step)")
    print(f"{'policy':<24}" + "".join(f"{count:>9}" for count in WORKERS) + "   workers")
    for name, policy in POLICIES.items():
        figures = []
        for count in WORKERS:
            num_groups = MICRO_BATCHES_PER_GENERATOR * count
            num_steps = max(2, NUM_EVENTS // (num_groups * 9))
            TimedScheduler.spent_s = 0.0
            with patch("digenrl.scheduling.simulate.Scheduler", TimedScheduler):
                result = run(count, num_groups, num_steps, policy)
            figures.append(TimedScheduler.spent_s / result.num_events * 1e6)
        print(f"{name:<24}" + "".join(f"{figure:>9.1f}" for figure in figures))
    print()
    print("Simulation of 1,024 generators and 1,024 trainers, 4,096 micro-batches a step, ten steps")
    for name, policy in POLICIES.items():
        start = time.perf_counter()
        result = run(1024, 4096, 10, policy)
        spent_s = time.perf_counter() - start
        verdict = "met" if spent_s < MOST_S else "MISSED"
        print(f"{name:<24}{spent_s:>9.1f} s {result.num_events:>9,} events   target {MOST_S:g} s: {verdict}")


if __name__ == "__main__":
    main()
