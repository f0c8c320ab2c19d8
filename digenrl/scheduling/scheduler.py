"""The scheduling core: a state machine over ids. Events go in, actions come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.scheduling.work import MicroBatch, Slice


@dataclass(frozen=True)
class StepStarted:
    """A step's work is known; its samples must be made with weights `policy_version`."""

    micro_batches: tuple[MicroBatch, ...]
    policy_version: int


@dataclass(frozen=True)
class WeightsLoaded:
    """A generator has loaded weights and will use them from now on."""

    generator: str
    policy_version: int


@dataclass(frozen=True)
class Generated:
    """A generator has made a slice and is free; the slice waits for its rewards."""

    slice: Slice
    generator: str


@dataclass(frozen=True)
class Scored:
    """A generator has scored a slice and is free."""

    slice: Slice
    generator: str


@dataclass(frozen=True)
class Updated:
    """The trainer group has accumulated a micro-batch's gradient and is free."""

    micro_batch: MicroBatch


Event = StepStarted | WeightsLoaded | Generated | Scored | Updated


@dataclass(frozen=True)
class Generate:
    """Let a generator make a slice."""

    slice: Slice
    generator: str


@dataclass(frozen=True)
class Score:
    """Let a generator score a slice."""

    slice: Slice
    generator: str


@dataclass(frozen=True)
class Update:
    """Let the trainer group accumulate a micro-batch's gradient."""

    micro_batch: MicroBatch


@dataclass(frozen=True)
class FinishStep:
    """All micro-batches of the step are in the gradient: step the optimizer."""

    step: int


Action = Generate | Score | Update | FinishStep


class Scheduler:
    """Decides who does what next. Owns no worker, no clock and no thread; a driver or a simulator carries it out.

    Two queues: samples that wait for a reward are served before new samples are made, and scored micro-batches
    are trained in the order in which they became whole. On-policy barrier: a generator makes samples of a step
    only once it has loaded that step's weights.

    Invariants: each slice is generated once and scored once, and each micro-batch is updated once, after all its
    slices were scored; a worker has one task at a time; no generator idles while work that it may do waits.

    Example:
        >>> from digenrl.scheduling import cut_step
        >>> step = cut_step(0, num_groups=1, group_size=2, groups_per_micro_batch=1, num_generators=1)
        >>> part = step[0].slices[0]
        >>> scheduler = Scheduler(["generator-0"], policy_version=0)
        >>> scheduler.observe(StepStarted(step, policy_version=0)) == [Generate(part, "generator-0")]
        True
        >>> scheduler.observe(Generated(part, "generator-0")) == [Score(part, "generator-0")]
        True
        >>> scheduler.observe(Scored(part, "generator-0")) == [Update(step[0])]
        True
        >>> scheduler.observe(Updated(step[0]))
        [FinishStep(step=0)]
    """

    def __init__(self, generators: Sequence[str], *, policy_version: int) -> None:
        """Start with idle workers; all generators hold weights `policy_version`."""
        self._loaded_version = dict.fromkeys(generators, policy_version)
        self._idle_generators = deque(generators)
        self._is_trainer_idle = True
        self._policy_version = policy_version
        self._step: int | None = None
        self._generation_queue: deque[Slice] = deque()
        self._scoring_queue: deque[tuple[Slice, str]] = deque()
        self._update_queue: deque[MicroBatch] = deque()
        self._micro_batches: dict[int, MicroBatch] = {}
        self._unscored: dict[int, set[Slice]] = {}
        self._untrained: set[int] = set()

    def observe(self, event: Event) -> list[Action]:
        """Take in what happened and say what to start now."""
        match event:
            case StepStarted():
                self._start_step(event)
            case WeightsLoaded():
                self._loaded_version[event.generator] = event.policy_version
            case Generated():
                self._scoring_queue.append((event.slice, event.generator))
                self._idle_generators.append(event.generator)
            case Scored():
                self._idle_generators.append(event.generator)
                self._mark_scored(event.slice)
            case Updated():
                self._untrained.remove(event.micro_batch.index)
                self._is_trainer_idle = True
        return [*self._assign_generators(), *self._assign_trainer()]

    def _start_step(self, event: StepStarted) -> None:
        assert self._step is None, f"step {self._step} is not finished"
        assert event.micro_batches, "a step has at least one micro-batch"
        self._step = event.micro_batches[0].step
        self._policy_version = event.policy_version
        for micro_batch in event.micro_batches:
            self._generation_queue.extend(micro_batch.slices)
            self._micro_batches[micro_batch.index] = micro_batch
            self._unscored[micro_batch.index] = set(micro_batch.slices)
            self._untrained.add(micro_batch.index)

    def _mark_scored(self, scored: Slice) -> None:
        waiting = self._unscored[scored.micro_batch]
        waiting.remove(scored)
        if not waiting:
            self._update_queue.append(self._micro_batches.pop(scored.micro_batch))

    def _assign_generators(self) -> list[Action]:
        actions: list[Action] = []
        for generator in list(self._idle_generators):
            action = self._next_task(generator)
            if action is not None:
                self._idle_generators.remove(generator)
                actions.append(action)
        return actions

    def _next_task(self, generator: str) -> Action | None:
        if self._scoring_queue:
            # The maker of a slice still has it at hand.
            own = next((entry for entry in self._scoring_queue if entry[1] == generator), self._scoring_queue[0])
            self._scoring_queue.remove(own)
            return Score(own[0], generator)
        if self._generation_queue and self._loaded_version[generator] == self._policy_version:
            return Generate(self._generation_queue.popleft(), generator)
        return None

    def _assign_trainer(self) -> list[Action]:
        if not self._is_trainer_idle or self._step is None:
            return []
        if self._update_queue:
            self._is_trainer_idle = False
            return [Update(self._update_queue.popleft())]
        if not self._untrained:
            finished, self._step = self._step, None
            return [FinishStep(finished)]
        return []
