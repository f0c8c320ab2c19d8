"""Running estimates of how long tasks take, from the tasks of this run."""

from __future__ import annotations

from dataclasses import dataclass

_NEWEST_WEIGHT = 0.2  # a change of speed shows after about five tasks, an outlier is soon forgotten


@dataclass
class DurationEstimate:
    """An exponential average of seconds per unit of work; the first measurement counts in full."""

    mean_s: float | None = None

    def observe(self, seconds: float, num_units: float = 1.0) -> None:
        """Take in a task of `num_units` that took `seconds`."""
        per_unit_s = seconds / num_units
        self.mean_s = per_unit_s if self.mean_s is None else self.mean_s + _NEWEST_WEIGHT * (per_unit_s - self.mean_s)


class Durations:
    """Estimates per kind of task and class of worker.

    Samples are the units of generating, scoring, assisting and updating, so that slices and micro-batches of any size
    are comparable.

    Example:
        >>> durations = Durations()
        >>> durations.observe("generate", 4.0, num_units=8)
        >>> durations.seconds("generate", num_units=16)
        8.0
        >>> durations.seconds("assist") is None
        True
    """

    def __init__(self) -> None:
        self._estimates: dict[str, DurationEstimate] = {}

    def observe(self, kind: str, seconds: float, num_units: float = 1.0) -> None:
        """Take in a finished task."""
        self._estimates.setdefault(kind, DurationEstimate()).observe(seconds, num_units)

    def seconds(self, kind: str, num_units: float = 1.0) -> float | None:
        """Estimate a task of `num_units`; None before the first one has finished."""
        estimate = self._estimates.get(kind)
        return None if estimate is None or estimate.mean_s is None else estimate.mean_s * num_units

    def as_dict(self) -> dict[str, float]:
        """Give all estimates in seconds per unit, for `profile.json`."""
        return {kind: estimate.mean_s for kind, estimate in self._estimates.items() if estimate.mean_s is not None}
