"""The batches of one optimizer step, and what its workers did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence

from digenrl.strategies.step_book import WorkerSpan


class StepWindow:
    """Counts from the first batch of an optimizer step to the weights it publishes."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_samples = 0
        self._start_s: float | None = None

    def begin(self) -> None:
        """Start the clock with the first batch."""
        if self._start_s is None:
            self._start_s = time.monotonic()

    def add(self, num_samples: int) -> None:
        """Count a batch."""
        self.num_batches += 1
        self.num_samples += num_samples

    def metrics(
        self, spans: Sequence[WorkerSpan], *, num_generators: int, num_trainers: int, num_workers: int
    ) -> dict[str, float]:
        """Sum up the window: times in seconds, utilization as shares, throughput over all workers."""
        assert self._start_s is not None, "an optimizer step without a batch"
        start_s, end_s = self._start_s, time.monotonic()
        step_s = end_s - start_s

        def busy_s(*tasks: str) -> float:
            return sum(entry.span.seconds for entry in spans if entry.task in tasks)

        def share(role: str, tasks: Sequence[str], num_workers: int) -> float:
            """Give the share of a group's time that it computes; samples of the next step count where they are made."""
            within_s = [
                min(entry.span.end_s, end_s) - max(entry.span.start_s, start_s)
                for entry in spans
                if entry.worker.startswith(role) and entry.task in tasks
            ]
            return sum(max(seconds, 0.0) for seconds in within_s) / (step_s * num_workers)

        return {
            "time/step_s": step_s,
            "time/generate_s": busy_s("generate"),
            "time/score_s": busy_s("score"),
            "time/assist_s": busy_s("assist"),
            "time/update_s": busy_s("update"),
            "util/generators": share("generator", ("generate", "score"), num_generators),
            "util/trainers": share("trainer", ("assist", "update", "optimizer"), num_trainers),
            "throughput/samples_per_s": self.num_samples / step_s,
            "throughput/samples_per_device_s": self.num_samples / step_s / num_workers,
        }
