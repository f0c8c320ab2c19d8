"""What the scheduler is told, and what it answers: ids only."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.scheduling.work import MicroBatch, Slice


@dataclass(frozen=True)
class StepAdded:
    """A step's work is known. Steps are added in order; the next one may be added while one is running."""

    micro_batches: tuple[MicroBatch, ...]
    policy_version: int
    """Of the weights that train it; its samples are made with these or, within the bound, with the ones before."""
    shares_rollout: bool = False
    """Whether the weights before make the very same samples, which then are not stale: rollouts use a copy of the
    weights that both versions have."""


@dataclass(frozen=True)
class StepStarted:
    """The trainers may work on a step that was added."""

    step: int


@dataclass(frozen=True)
class WeightsPublished:
    """The trainers hold new weights, and generators may load them."""

    policy_version: int


@dataclass(frozen=True)
class WeightsLoaded:
    """A generator has loaded weights and is free."""

    generator: str
    policy_version: int
    seconds: float | None = None
    """How long the worker says it took; None takes the time from the action to this event."""


@dataclass(frozen=True)
class Generated:
    """A generator has made a slice and is free; the slice waits for its rewards."""

    slice: Slice
    generator: str
    seconds: float | None = None
    """How long the worker says it took; None takes the time from the action to this event."""


@dataclass(frozen=True)
class Scored:
    """A worker has scored a slice and is free; the score is dropped if the slice was lost meanwhile."""

    slice: Slice
    worker: str
    seconds: float | None = None
    """How long the worker says it took; None takes the time from the action to this event."""


@dataclass(frozen=True)
class SamplesLost:
    """A worker could not score a slice and is free: its samples are gone with the host that kept them."""

    slice: Slice
    worker: str


@dataclass(frozen=True)
class Assisted:
    """The trainer group has made a micro-batch, scored it unless the run has reward workers, and is free."""

    micro_batch: MicroBatch
    switch_s: float = 0.0
    """Seconds of the task that went into switching to generation state."""
    seconds: float | None = None
    """How long the worker says it took, switching included; None takes the time from the action to this event."""


@dataclass(frozen=True)
class Updated:
    """The trainer group has accumulated a micro-batch's gradient and is free."""

    micro_batch: MicroBatch
    switch_s: float = 0.0
    """Seconds of the task that went into switching back to training state."""
    seconds: float | None = None
    """How long the worker says it took, switching included; None takes the time from the action to this event."""


@dataclass(frozen=True)
class WorkerLost:
    """A generator or reward worker is gone, and with it what it was at; the samples that it had made are kept, unless
    their host is gone, too, which `SamplesLost` says of those that are not scored yet."""

    worker: str
    returns: bool = False
    """Whether it is being started again: until it joins, nobody takes over the part of the last reward worker."""


@dataclass(frozen=True)
class WorkerJoined:
    """A generator has been started and holds weights `policy_version`; or a reward worker, which holds none."""

    worker: str
    policy_version: int | None


@dataclass(frozen=True)
class Paused:
    """Generators are wanted for something else: let them finish, bring them up to date, start nothing new."""


@dataclass(frozen=True)
class Resumed:
    """Generators are available again."""


Event = (
    StepAdded
    | StepStarted
    | WeightsPublished
    | WeightsLoaded
    | Generated
    | Scored
    | SamplesLost
    | Assisted
    | Updated
    | WorkerLost
    | WorkerJoined
    | Paused
    | Resumed
)


@dataclass(frozen=True)
class Generate:
    """Let a generator make a slice."""

    slice: Slice
    generator: str


@dataclass(frozen=True)
class Score:
    """Let a worker score a slice."""

    slice: Slice
    worker: str


@dataclass(frozen=True)
class LoadWeights:
    """Let a generator load published weights."""

    generator: str
    policy_version: int


@dataclass(frozen=True)
class Assist:
    """Let the trainer group make and score a micro-batch."""

    micro_batch: MicroBatch


@dataclass(frozen=True)
class Update:
    """Let the trainer group accumulate a micro-batch's gradient."""

    micro_batch: MicroBatch


@dataclass(frozen=True)
class FinishStep:
    """All micro-batches of the step are in the gradient: step the optimizer."""

    step: int
    num_stale_samples: int
    num_assisted: int
    """Micro-batches that the trainer group made."""


Action = Generate | Score | LoadWeights | Assist | Update | FinishStep
