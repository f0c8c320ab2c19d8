"""What a trainer group can be rebuilt from: a snapshot of its state, and the journal of what it did since."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from digenrl.engines import Engine, ObjectRef, Task
from digenrl.scheduling import MicroBatch
from digenrl.strategies.workers import TimestepBatchSize
from digenrl.types import PromptBatch


def snapshot_interval(snapshot: str) -> int | None:
    """Give the optimizer steps from one snapshot to the next, from the option's text; None is never.

    Raises:
        ValueError: it has another form.
    """
    if snapshot == "off":
        return None
    if snapshot == "every_step":
        return 1
    match = re.fullmatch(r"every_([1-9][0-9]*)", str(snapshot))
    if match is None:
        raise ValueError(f"`snapshot` must be every_step, every_N with a number N of steps, or off, got {snapshot!r}.")
    return int(match[1])


def check_restarts(*, engine: str, max_restarts: int, snapshot: str) -> None:
    """Check what a run was told about restarts.

    Raises:
        ValueError: `snapshot` has no form that it may have, or no worker of the engine can die.
    """
    if snapshot_interval(snapshot) not in (None, 1) and max_restarts == 0:
        raise ValueError(
            f"`snapshot` {snapshot} is for runs that start workers again, but `max_restarts` is 0: raise it, or leave "
            "`snapshot` out."
        )
    if max_restarts and engine == "inline":
        raise ValueError(
            f"`max_restarts` must be 0 with engine `inline`, got {max_restarts}: its workers are no processes that "
            "could be started again."
        )


@dataclass(frozen=True)
class MadeSlice:
    """A slice's samples, and what they were made of."""

    prompts: PromptBatch
    trajectories: tuple[ObjectRef, ...]


@dataclass(frozen=True)
class UpdateCall:
    """What all trainers are asked to do with a micro-batch."""

    micro_batch: MicroBatch
    slices: tuple[MadeSlice, ...]
    rewards: Sequence[Any]
    advantages: Sequence[Any]
    num_rows: int
    keeps_parts_apart: bool

    @property
    def trajectories(self) -> list[ObjectRef]:
        """Of all slices."""
        return [ref for part in self.slices for ref in part.trajectories]

    def submit(self, engine: Engine, trainer: str, timestep_batch_size: TimestepBatchSize) -> Task:
        """Queue it on one of them; the result is an `UpdateReport`."""
        return engine.submit(
            trainer,
            "update",
            self.trajectories,
            self.rewards,
            self.advantages,
            num_rows=self.num_rows,
            timestep_batch_size=timestep_batch_size,
            keeps_parts_apart=self.keeps_parts_apart,
        )


@dataclass(frozen=True)
class StepCall:
    """How all trainers are asked to end a window: with an optimizer step, or, where no row is left, by counting one."""

    settings: Sequence[Mapping[str, Any]]
    clip_value: float
    clip_algorithm: Literal["norm", "value"]
    gradient_scale: float
    row_scale: float

    @property
    def is_empty(self) -> bool:
        """Whether no row is left to train."""
        return self.row_scale == 0

    def submit(self, engine: Engine, trainer: str) -> Task:
        """Queue it on one of them; the result is a `StepReport`, or None."""
        if self.is_empty:
            return engine.submit(trainer, "skip_step")
        return engine.submit(
            trainer,
            "optimizer_step",
            self.settings,
            self.clip_value,
            self.clip_algorithm,
            self.gradient_scale,
            self.row_scale,
        )


@dataclass
class Window:
    """What makes one policy version of the version before: updates, in their order, and a step of the optimizer."""

    updates: list[UpdateCall] = field(default_factory=list)
    step: StepCall | None = None
    """None while the window is open."""
    trajectories: list[ObjectRef] = field(default_factory=list)
    """That are kept for the window and nobody else needs any more."""


@dataclass
class Journal:
    """The windows that the newest snapshot does not cover. With it, it gives the trainers' state bit by bit."""

    version: int = 0
    """Of the weights that the open window trains."""
    open: Window = field(default_factory=Window)
    closed: list[Window] = field(default_factory=list)

    def note_update(self, call: UpdateCall) -> None:
        """Note that a micro-batch is in the gradient."""
        self.open.updates.append(call)

    def exchange(self, call: UpdateCall, other: UpdateCall) -> None:
        """Put an update in the place of one that stands here, since its samples were made again."""
        for window in (*self.closed, self.open):
            window.updates[:] = [other if entry is call else entry for entry in window.updates]

    def forget_updates(self) -> list[UpdateCall]:
        """Forget what is in the gradient; returns it."""
        updates, self.open.updates = self.open.updates, []
        return updates

    def keep(self, trajectories: Sequence[ObjectRef]) -> None:
        """Take over the trajectories of a step whose updates are in the open window, or that is given up."""
        self.open.trajectories += trajectories

    def close(self, step: StepCall) -> None:
        """Note that the optimizer was stepped."""
        self.open.step = step
        self.closed.append(self.open)
        self.open = Window()
        self.version += 1

    def commit(self, version: int) -> list[ObjectRef]:
        """Drop the windows that led to `version`, whose weights are safe; returns trajectories that may go."""
        num_covered = len(self.closed) - (self.version - version)
        covered, self.closed = self.closed[:num_covered], self.closed[num_covered:]
        return [ref for window in covered for ref in window.trajectories]

    def give_up(self) -> list[ObjectRef]:
        """Forget the open window, whose gradient was discarded; returns trajectories that may go."""
        window, self.open = self.open, Window()
        return window.trajectories

    def begin_anew(self, version: int) -> list[ObjectRef]:
        """Go on from other weights, which are called `version`; returns trajectories that may go."""
        freed = [ref for window in (*self.closed, self.open) for ref in window.trajectories]
        self.version, self.open, self.closed = version, Window(), []
        return freed
