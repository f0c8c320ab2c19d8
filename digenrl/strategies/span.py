"""When a worker did something."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """When a task ran, in seconds of the host's monotonic clock."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end_s - self.start_s
