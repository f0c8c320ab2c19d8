"""Which steps of the schedule are trained: windows of consecutive steps, and random subsets.

All are pure functions of a seed and a training step, so that every worker finds the same steps for itself and
a resumed run goes on where it was. Letters in shapes: B samples, k trained timesteps of a sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.types import derive_seed


@dataclass(frozen=True, kw_only=True)
class Window(ABC):
    """`size` consecutive denoising steps within [start, stop), the same for all samples of a training step.

    A window always has its full size.
    """

    size: int
    """Number of denoising steps in the window, from 1 to stop - start."""
    stop: int
    """End of the denoising steps that may be trained, itself not one of them; T - 1 leaves out the last of T."""
    start: int = 0
    """First denoising step that may be trained."""

    def __post_init__(self) -> None:
        """Check that the window fits its bounds."""
        if self.start < 0:
            raise ValueError(f"`start` is the first denoising step to train and must be at least 0, got {self.start}.")
        if not 1 <= self.size <= self.stop - self.start:
            raise ValueError(
                f"`size` counts denoising steps and must be in [1, {self.stop - self.start}], as many as there are "
                f"from `start` {self.start} to `stop` {self.stop}, got {self.size}."
            )

    def steps(self, step: int, *, seed: int) -> range:
        """Give the denoising steps to train in training step `step`, counted from 0, of a run with `seed`."""
        first = self._first(step, seed)
        return range(first, first + self.size)

    @property
    def _last_start(self) -> int:
        return self.stop - self.size

    @abstractmethod
    def _first(self, step: int, seed: int) -> int:
        """Give the first step of the window, in [start, _last_start]."""


@dataclass(frozen=True, kw_only=True)
class RandomWindow(Window):
    """A window at a random place, drawn anew in each training step.

    Flow-GRPO-Fast (arXiv:2505.05470, published code) has size 2 or 3, start 0 and stop 5; MixGRPO
    (arXiv:2507.21802) has a variant over the whole schedule.

    Example:
        >>> RandomWindow(size=3, stop=5).steps(7, seed=0)
        range(0, 3)
    """

    def _first(self, step: int, seed: int) -> int:
        rng = torch.Generator().manual_seed(derive_seed(seed, "window", step))
        return int(torch.randint(self.start, self._last_start + 1, (1,), generator=rng))


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Window):
    """A window that moves from high noise to low noise, MixGRPO's progressive one (arXiv:2507.21802).

    The window rests for `steps_per_window` training steps, then moves by `stride`. Its last place ends at
    `stop`, also where `stride` would overshoot. The published code lets windows shrink there and become empty.

    Example:
        >>> window = SlidingWindow(size=4, stop=24, steps_per_window=3)
        >>> [window.steps(step, seed=0).start for step in (0, 2, 3, 62, 63)]
        [0, 0, 1, 20, 0]
    """

    stride: int = 1
    """Denoising steps that the window moves by; `size` for windows that do not overlap, 0 for one at rest."""
    steps_per_window: int = 25
    """Training steps that a window lasts, at least 1."""
    roll_back: bool = True
    """Whether the window goes back to `start` after its last place; otherwise it stays there."""

    def __post_init__(self) -> None:
        """Check the movement too."""
        super().__post_init__()
        if self.stride < 0:
            raise ValueError(f"`stride` is how far the window moves and must be at least 0, got {self.stride}.")
        if self.steps_per_window < 1:
            raise ValueError(
                f"`steps_per_window` counts training steps and must be at least 1, got {self.steps_per_window}."
            )

    def _first(self, step: int, seed: int) -> int:
        firsts = [*range(self.start, self._last_start, self.stride), self._last_start] if self.stride else [self.start]
        durations = [self._duration(first) for first in firsts]
        if self.roll_back:
            step %= sum(durations)
        for first, duration in zip(firsts, durations, strict=True):
            if step < duration:
                return first
            step -= duration
        return firsts[-1]

    def _duration(self, first: int) -> int:
        """Give the training steps, at least 1, that the window starting at `first` lasts."""
        return self.steps_per_window


@dataclass(frozen=True, kw_only=True)
class LinearDecayWindow(SlidingWindow):
    """A sliding window that moves ever faster: MixGRPO's "decay" (arXiv:2507.21802, published code).

    It rests for `steps_per_window` training steps at `start`, and for a number that falls in a straight line
    towards `min_steps_per_window` at the last step before `stop`, rounded down.
    """

    min_steps_per_window: int = 1
    """Training steps, in [1, steps_per_window]."""

    def __post_init__(self) -> None:
        """Check the decay too."""
        super().__post_init__()
        if not 1 <= self.min_steps_per_window <= self.steps_per_window:
            raise ValueError(
                "`min_steps_per_window` must be in [1, `steps_per_window`], "
                f"[1, {self.steps_per_window}], got {self.min_steps_per_window}."
            )

    def _duration(self, first: int) -> int:
        # In integers: a rounded share would floor exact values to one less.
        passed, total = first - self.start, max(self.stop - 1 - self.start, 1)
        return (self.steps_per_window * (total - passed) + self.min_steps_per_window * passed) // total


@dataclass(frozen=True, kw_only=True)
class ExponentialDecayWindow(SlidingWindow):
    """A sliding window that moves faster at low noise: MixGRPO's "exp_decay" (arXiv:2507.21802, published code).

    A window that starts at `first` lasts steps_per_window exp(-rate max(0, first - threshold)) training steps,
    rounded up.
    """

    decay_rate: float = 0.1
    """Decay per denoising step, at least 0."""
    decay_threshold: int = 13
    """Denoising step up to which windows last `steps_per_window`."""

    def __post_init__(self) -> None:
        """Check the decay too."""
        super().__post_init__()
        if not 0 <= self.decay_rate < math.inf:
            raise ValueError(f"`decay_rate` is per denoising step and must be in [0, inf), got {self.decay_rate}.")

    def _duration(self, first: int) -> int:
        decay = math.exp(-self.decay_rate * max(0, first - self.decay_threshold))
        return max(1, math.ceil(self.steps_per_window * decay))


def random_timesteps(seeds: Sequence[int], *, num_available: int, num_chosen: int) -> Tensor:
    """Choose timesteps for each sample on its own: the beginning of a random permutation.

    DanceGRPO (arXiv:2505.07818, published code) trains each sample on the first floor((T - 1) f) entries of a
    permutation of 0, ..., T - 2, in that order. A sample's choice depends on its seed alone.

    Args:
        seeds: [B] the samples' seeds (`PromptBatch.seeds`); the choice has their stream `"timesteps"`.
        num_available: how many timesteps there are to choose from, 0, 1, ...
        num_chosen: k, in [1, num_available].

    Returns:
        [B, k] indices, distinct in a row.

    Raises:
        ValueError: `num_chosen` is outside its range.
    """
    _check_num_chosen(num_chosen, num_available)
    return torch.stack([_permutation(derive_seed(seed, "timesteps"), num_available)[:num_chosen] for seed in seeds])


def shared_timesteps(step: int, *, seed: int, num_available: int, num_chosen: int) -> Tensor:
    """Choose timesteps for all samples of a training step at once, uniformly and without replacement.

    DGPO (arXiv:2510.08425, published code) trains 4 of the first 5 or 7.

    Args:
        step: training step.
        seed: of the run.
        num_available: how many timesteps there are to choose from, 0, 1, ...
        num_chosen: k, in [1, num_available].

    Returns:
        [k] distinct indices, in the order of the draw.

    Raises:
        ValueError: `num_chosen` is outside its range.
    """
    _check_num_chosen(num_chosen, num_available)
    return _permutation(derive_seed(seed, "timesteps", step), num_available)[:num_chosen]


def _permutation(seed: int, num: int) -> Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def _check_num_chosen(num_chosen: int, num_available: int) -> None:
    if not 1 <= num_chosen <= num_available:
        raise ValueError(
            f"`num_chosen` counts timesteps to train and must be in [1, `num_available`], [1, {num_available}], "
            f"got {num_chosen}."
        )
