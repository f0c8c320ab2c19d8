"""Averages of weights over training: how much of its old value an average keeps at an update.

    average = decay average + (1 - decay) weights

Such averages are evaluated (Flow-GRPO), are the reference of a loss (DGPO, DiffusionNFT), or make the samples.
A schedule holds no state. `num_steps`, g in formulas, counts the optimizer steps before the one whose weights
are taken in: it is 0 at the first update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class DecaySchedule(ABC):
    """The decay of an average at each optimizer step.

    Example:
        >>> schedule = WarmupDecay()
        >>> schedule.decay(6), schedule.decay(7)
        (None, 0.47058823529411764)
    """

    @abstractmethod
    def decay(self, num_steps: int) -> float | None:
        """Give the decay, in [0, 1]; None leaves the average as it is."""


@dataclass(frozen=True)
class NoUpdates(DecaySchedule):
    """An average that keeps its first weights: a frozen reference."""

    def decay(self, num_steps: int) -> None:
        """None."""
        return


@dataclass(frozen=True)
class ConstantDecay(DecaySchedule):
    """The same decay at every step."""

    rate: float
    """In [0, 1]; 0 follows the weights."""

    def __post_init__(self) -> None:
        """Check the decay."""
        _check_decay("rate", self.rate)

    def decay(self, num_steps: int) -> float:
        """Give `rate`."""
        return self.rate


@dataclass(frozen=True)
class WarmupDecay(DecaySchedule):
    """min((1 + g) / (10 + g), cap) at every `interval`-th step: Flow-GRPO's evaluated average.

    From the published code of arXiv:2505.05470; the first update is at g = interval - 1.
    """

    cap: float = 0.9
    """Largest decay, in [0, 1]."""
    interval: int = 8
    """Steps from one update to the next, at least 1."""

    def __post_init__(self) -> None:
        """Check both."""
        _check_decay("cap", self.cap)
        if self.interval < 1:
            raise ValueError(f"`interval` counts optimizer steps and must be at least 1, got {self.interval}.")

    def decay(self, num_steps: int) -> float | None:
        """Give the decay at the steps that end an interval."""
        if (num_steps + 1) % self.interval:
            return None
        return min((1 + num_steps) / (10 + num_steps), self.cap)


@dataclass(frozen=True)
class RampDecay(DecaySchedule):
    """min(start + rate max(0, g - flat), cap): the average follows the weights at first, and ever less.

    DGPO (arXiv:2510.08425) has rate 0.001 and cap 0.3, the defaults. DiffusionNFT (arXiv:2509.16117) has rate
    0.001 and cap 0.5, or flat 75, rate 0.0075 and cap 0.999.
    """

    rate: float = 0.001
    """Growth of the decay per step, at least 0."""
    cap: float = 0.3
    """Largest decay, in [0, 1]."""
    flat: int = 0
    """Steps before the decay grows, at least 0."""
    start: float = 0.0
    """Decay until then, in [0, cap]."""

    def __post_init__(self) -> None:
        """Check them."""
        _check_decay("cap", self.cap)
        if not self.rate >= 0:
            raise ValueError(f"`rate` is the growth of the decay per step and must be at least 0, got {self.rate}.")
        if self.flat < 0:
            raise ValueError(f"`flat` counts optimizer steps and must be at least 0, got {self.flat}.")
        if not 0 <= self.start <= self.cap:
            raise ValueError(f"`start` is the first decay and must be in [0, {self.cap}], got {self.start}.")

    def decay(self, num_steps: int) -> float:
        """Give the decay."""
        return min(self.start + self.rate * max(0, num_steps - self.flat), self.cap)


@dataclass(frozen=True)
class EveryNth(DecaySchedule):
    """Another schedule, at every `interval`-th optimizer step only; its g counts all steps."""

    schedule: DecaySchedule
    """What happens at those steps."""
    interval: int
    """Optimizer steps from one update to the next, at least 1."""

    def __post_init__(self) -> None:
        """Check the interval."""
        if self.interval < 1:
            raise ValueError(f"`interval` counts optimizer steps and must be at least 1, got {self.interval}.")

    def decay(self, num_steps: int) -> float | None:
        """Give the schedule's decay at the steps that end an interval."""
        return None if (num_steps + 1) % self.interval else self.schedule.decay(num_steps)


def _check_decay(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` is the share of its old value that an average keeps, in [0, 1], got {value}.")
