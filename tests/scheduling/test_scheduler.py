"""The scheduling core, driven by a discrete-event loop with random durations and losses, checked by an onlooker."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.scheduling import (
    Action,
    Assist,
    Assisted,
    Event,
    FinishStep,
    Generate,
    Generated,
    LoadWeights,
    MicroBatch,
    Paused,
    Resumed,
    SamplesLost,
    Scheduler,
    SchedulingPolicy,
    Score,
    Scored,
    Slice,
    StepAdded,
    StepStarted,
    Update,
    Updated,
    WeightsLoaded,
    WeightsPublished,
    WorkerJoined,
    WorkerLost,
    cut_step,
    plan_assist,
)

simulated = settings(deadline=None)  # a busy machine is not a failure
thoroughly = settings(deadline=None, max_examples=300)

TRAINERS = "trainers"
Seconds = Callable[[str, str, int], float]
"""How long a kind of task takes a worker, for a number of samples."""


class Loss(NamedTuple):
    """The death of a worker."""

    at_s: float
    victim: int
    """Place in the list of those alive then."""
    replaced_after_s: float | None
    """Only generators are replaced; the last one always is."""


@dataclass(frozen=True)
class Job:
    """A cluster, its work, what happens to it, and the seed of all durations."""

    seed: int
    num_generators: int
    num_reward_workers: int
    policy: SchedulingPolicy
    group_size: int
    groups_per_micro_batch: int
    micro_batches_per_step: tuple[int, ...]
    generation_batch_size: int | None
    steps_per_version: int
    """More than 1 under gradient accumulation, which goes without staleness."""
    steps_per_rollout: int
    """More than 1 if several updates train on samples of the same weights, which goes without both."""
    pauses_after: frozenset[int]
    """Steps after which the generators are wanted for a validation."""
    is_last_step_dropped: bool
    """Whether the run ends while its last step has only been begun ahead."""
    is_deaf: bool
    """Whether the driver hears nothing while the optimizer steps."""
    losses: tuple[Loss, ...]
    lost_scores: frozenset[int] = frozenset()
    """Which of all tasks of scoring fail, as the samples are gone with their host."""

    @property
    def generators(self) -> list[str]:
        return [f"generator-{index}" for index in range(self.num_generators)]

    @property
    def reward_workers(self) -> list[str]:
        return [f"reward-{index}" for index in range(self.num_reward_workers)]

    @property
    def num_trained_steps(self) -> int:
        is_dropped = self.is_last_step_dropped and self.policy.staleness > 0
        return len(self.micro_batches_per_step) - is_dropped

    def steps(self) -> list[StepAdded]:
        return [
            StepAdded(
                cut_step(
                    index,
                    num_groups=count * self.groups_per_micro_batch,
                    group_size=self.group_size,
                    groups_per_micro_batch=self.groups_per_micro_batch,
                    num_generators=self.num_generators,
                    generation_batch_size=self.generation_batch_size,
                ),
                policy_version=index // (1 if self.policy.staleness > 0 else self.steps_per_version),
                shares_rollout=self.policy.staleness == 0
                and self.steps_per_version == 1
                and index % self.steps_per_rollout > 0,
            )
            for index, count in enumerate(self.micro_batches_per_step)
        ]

    def trained_micro_batches(self) -> list[MicroBatch]:
        return [entry for step in self.steps()[: self.num_trained_steps] for entry in step.micro_batches]


STALENESS = st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.5, 0.9])
POLICIES = st.builds(
    SchedulingPolicy,
    trainer_assist=st.sampled_from(["off", "static:0", "static:1", "static:3", "search", "optimal"]),
    staleness=STALENESS,
    staleness_mode=st.sampled_from(["cap", "exact"]),
)
LOSSES = st.builds(Loss, st.integers(0, 300), st.integers(0, 5), st.none() | st.integers(0, 60))
JOBS = st.builds(
    Job,
    seed=st.integers(0, 2**32),
    num_generators=st.integers(1, 4),
    num_reward_workers=st.sampled_from([0, 0, 1, 2]),
    policy=POLICIES,
    group_size=st.integers(1, 6),
    groups_per_micro_batch=st.integers(1, 2),
    micro_batches_per_step=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    generation_batch_size=st.none() | st.integers(1, 4),
    steps_per_version=st.integers(1, 2),
    steps_per_rollout=st.integers(1, 3),
    pauses_after=st.frozensets(st.integers(0, 3)),
    is_last_step_dropped=st.booleans(),
    is_deaf=st.booleans(),
    losses=st.lists(LOSSES, max_size=4).map(tuple),
    lost_scores=st.frozensets(st.integers(0, 30), max_size=4),
)
CALM_JOBS = JOBS.map(lambda job: replace(job, losses=(), lost_scores=frozenset()))


def random_seconds(seed: int) -> Seconds:
    """Draw whole seconds, so that ties are frequent; workers differ in speed, and a task may take no time."""
    rng = random.Random(seed)
    slowness: dict[str, int] = {}
    longest = {"generate": 9, "assist": 9, "score": 3, "update": rng.choice([2, 20]), "load": 8, "switch": 3}

    def seconds(kind: str, worker: str, num_samples: int) -> float:
        slowness.setdefault(worker, rng.choice([1, 1, 3, 10]))
        return rng.randint(0, longest.get(kind, 20)) * slowness[worker]

    return seconds


class Turn(NamedTuple):
    time_s: float
    event: Event
    actions: list[Action]


class Simulation:
    """The driver in small: a queue of happenings takes the place of workers and clock."""

    def __init__(self, job: Job, seconds: Seconds) -> None:
        self.history: list[Turn] = []
        self._job = job
        self._seconds = seconds
        self._scheduler = Scheduler(job.generators, reward_workers=job.reward_workers, policy=job.policy)
        self._now_s = 0.0
        self._version = 0
        self._happenings: list[tuple[float, int, str, Event | Loss]] = []
        self._order = itertools.count()
        self._alive = [*job.generators, *job.reward_workers]
        self._num_replacements = 0
        self._num_scores = 0
        self._is_switched = False
        self._finished: set[int] = set()
        for loss in job.losses:
            self._schedule(loss.at_s, "", loss)

    def run(self) -> list[Turn]:
        steps = self._job.steps()
        self._observe(steps[0])
        is_paused = False
        for index in range(self._job.num_trained_steps):
            if index > 0 and self._job.policy.staleness == 0 and not steps[index].shares_rollout:
                self._observe(steps[index])
            if index + 1 < len(steps) and (self._job.policy.staleness > 0 or steps[index + 1].shares_rollout):
                self._observe(steps[index + 1])
            if is_paused:
                self._observe(Resumed())
            self._observe(StepStarted(index))
            self._work_until(lambda index=index: index in self._finished)
            self._step_optimizer(steps, index)
            is_paused = index in self._job.pauses_after
            if is_paused:
                self._pause()
        if not is_paused:
            self._pause()  # as when the run ends
        return self.history

    def _step_optimizer(self, steps: Sequence[StepAdded], index: int) -> None:
        if index + 1 < len(steps) and steps[index + 1].policy_version == self._version:
            return
        end_s = self._now_s + self._seconds("optimizer", TRAINERS, 1)
        if not self._job.is_deaf:
            self._work_until(lambda: not self._happenings or self._happenings[0][0] > end_s)
        self._now_s = max(self._now_s, end_s)
        self._version += 1
        self._observe(WeightsPublished(self._version))
        if not self._job.is_deaf:
            self._work_until(lambda: not self._happenings or self._happenings[0][0] > self._now_s)

    def _pause(self) -> None:
        self._observe(Paused())
        self._work_until(lambda: self._scheduler.is_quiet)
        end_s = self._now_s + self._seconds("validation", "driver", 1)
        self._work_until(lambda: not self._happenings or self._happenings[0][0] > end_s)
        self._work_until(lambda: self._scheduler.is_quiet)  # a replacement may have joined
        self._now_s = max(self._now_s, end_s)

    def _work_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            assert self._happenings, "deadlock: nobody works, and the step is not finished"
            at_s, _, worker, happening = heapq.heappop(self._happenings)
            self._now_s = max(self._now_s, at_s)
            if isinstance(happening, Loss):
                self._lose(happening)
            elif worker in self._alive or worker == TRAINERS:
                self._observe(happening)
            elif isinstance(happening, WorkerJoined):
                self._alive.append(worker)
                self._observe(happening)

    def _lose(self, loss: Loss) -> None:
        if not self._alive:
            return
        victim = self._alive.pop(loss.victim % len(self._alive))
        after_s = loss.replaced_after_s
        if victim.startswith("generator"):
            if after_s is None and not any(worker.startswith("generator") for worker in self._alive):
                after_s = 5.0
            if after_s is not None:
                self._num_replacements += 1
                name = f"generator-new-{self._num_replacements}"
                self._schedule(self._now_s + after_s, name, WorkerJoined(name, self._version))
        self._observe(WorkerLost(victim))

    def _observe(self, event: Event) -> None:
        actions = self._scheduler.observe(event, self._now_s)
        self.history.append(Turn(self._now_s, event, list(actions)))
        assert len(self.history) < 10_000, "the scheduler goes round in circles"
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Generate(part, worker):
                self._end_after("generate", worker, len(part), Generated(part, worker))
            case Score(part, worker):
                is_lost = self._num_scores in self._job.lost_scores
                self._num_scores += 1
                event = SamplesLost(part, worker) if is_lost else Scored(part, worker)
                self._end_after("score", worker, len(part), event)
            case LoadWeights(worker, version):
                self._end_after("load", worker, 1, WeightsLoaded(worker, version))
            case Assist(micro_batch):
                switch_s = 0.0 if self._is_switched else self._seconds("switch", TRAINERS, 1)
                self._is_switched = True
                self._end_after("assist", TRAINERS, len(micro_batch), Assisted(micro_batch, switch_s), switch_s)
            case Update(micro_batch):
                switch_s = self._seconds("switch", TRAINERS, 1) if self._is_switched else 0.0
                self._is_switched = False
                self._end_after("update", TRAINERS, len(micro_batch), Updated(micro_batch, switch_s), switch_s)
            case FinishStep(step):
                self._finished.add(step)

    def _end_after(self, kind: str, worker: str, num_samples: int, event: Event, extra_s: float = 0.0) -> None:
        self._schedule(self._now_s + self._seconds(kind, worker, num_samples) + extra_s, worker, event)

    def _schedule(self, at_s: float, worker: str, happening: Event | Loss) -> None:
        heapq.heappush(self._happenings, (at_s, next(self._order), worker, happening))


def simulate(job: Job, seconds: Seconds | None = None) -> list[Turn]:
    """Run the scheduler against a virtual clock."""
    return Simulation(job, seconds or random_seconds(job.seed)).run()


class Ledger:
    """What an onlooker knows who only sees events and actions go by; it refuses what no cluster could do."""

    def __init__(self, job: Job) -> None:
        self.holds = dict.fromkeys(job.generators, 0)
        """Version by generator; while it loads, the old one."""
        self.reward_workers = set(job.reward_workers)
        self._trainers_score = not job.reward_workers
        self.doing: dict[str, Action] = {}
        self.published = 0
        self.started: int | None = None
        self.is_paused = False
        self.steps: dict[int, StepAdded] = {}
        self.unmade: set[Slice] = set()
        self.early: set[Slice] = set()
        """Unmade slices that must be made with the weights before their step's own."""
        self.version: dict[Slice, int] = {}
        """Of the weights that made a slice."""
        self.waiting: list[Slice] = []
        """For their rewards."""
        self.whole: list[MicroBatch] = []
        """Waiting for the trainers, in the order of becoming whole."""
        self.updated: list[MicroBatch] = []
        self.num_assisted: Counter[int] = Counter()
        self._policy = job.policy
        self._scored: set[Slice] = set()
        self._touched: set[MicroBatch] = set()

    @property
    def idle_generators(self) -> list[str]:
        return [generator for generator in self.holds if generator not in self.doing]

    @property
    def scorers(self) -> set[str]:
        return self.reward_workers or set(self.holds)

    def micro_batch_of(self, part: Slice) -> MicroBatch:
        return self.steps[part.step].micro_batches[part.micro_batch]

    def untouched(self, step: int) -> list[MicroBatch]:
        return [entry for entry in self.steps[step].micro_batches if entry not in self._touched]

    def num_samples(self, step: int) -> int:
        return self.steps[step].micro_batches[-1].stop

    def num_stale(self, step: int) -> int:
        if self.steps[step].shares_rollout:
            return 0
        version = self.steps[step].policy_version
        return sum(len(part) for part, made_with in self.version.items() if part.step == step and made_with < version)

    def see(self, event: Event) -> None:
        match event:
            case StepAdded():
                self._add(event)
            case StepStarted(step):
                self.started = step
            case WeightsPublished(version):
                self.published = version
            case WeightsLoaded(generator, version):
                assert self.doing.pop(generator) == LoadWeights(generator, version)
                self.holds[generator] = version
            case Generated(part, generator):
                assert self.doing.pop(generator) == Generate(part, generator)
                self.waiting.append(part)
            case Scored(part, worker):
                assert self.doing.pop(worker) == Score(part, worker)
                self._enter_score(part)
            case SamplesLost(part, worker):
                assert self.doing.pop(worker) == Score(part, worker)
                self.version.pop(part, None)  # trainers may have made it
                self.unmade.add(part)
            case Assisted(micro_batch):
                assert self.doing.pop(TRAINERS) == Assist(micro_batch)
                if self._trainers_score:
                    self.whole.append(micro_batch)
                else:
                    self.waiting += micro_batch.slices
            case Updated(micro_batch):
                assert self.doing.pop(TRAINERS) == Update(micro_batch)
                self.updated.append(micro_batch)
            case WorkerLost(worker):
                self._lose(worker)
            case WorkerJoined(generator, version):
                self.holds[generator] = version
            case Paused() | Resumed():
                self.is_paused = isinstance(event, Paused)
        self._give_up_early()

    def do(self, action: Action) -> None:
        match action:
            case Generate(part, generator):
                self._begin(generator, action, self.holds)
                self.unmade.remove(part)
                self.early.discard(part)
                self._touched.add(self.micro_batch_of(part))
                self.version[part] = self.holds[generator]
            case Score(part, worker):
                self._begin(worker, action, self.scorers)
                self.waiting.remove(part)
            case LoadWeights(generator, _):
                self._begin(generator, action, self.holds)
            case Assist(micro_batch):
                self._begin(TRAINERS, action, [TRAINERS])
                assert micro_batch not in self._touched
                self._touched.add(micro_batch)
                self.unmade -= set(micro_batch.slices)
                self.num_assisted[micro_batch.step] += 1
            case Update(micro_batch):
                self._begin(TRAINERS, action, [TRAINERS])
                self.whole.remove(micro_batch)

    def _begin(self, worker: str, action: Action, those_who_may: object) -> None:
        assert worker in those_who_may  # type: ignore[operator]
        assert worker not in self.doing, "a worker has one task at a time"
        self.doing[worker] = action

    def _add(self, step: StepAdded) -> None:
        parts = [part for entry in step.micro_batches for part in entry.slices]
        self.steps[parts[0].step] = step
        self.unmade |= set(parts)
        if self._policy.staleness_mode == "exact" and step.policy_version > self.published:
            num_early = math.floor(self._policy.staleness * parts[-1].stop + 1e-9)
            self.early |= {part for part in parts if part.stop <= num_early}
            self._touched |= {self.micro_batch_of(part) for part in parts if part in self.early}

    def _enter_score(self, part: Slice) -> None:
        self._scored.add(part)
        micro_batch = self.micro_batch_of(part)
        if set(micro_batch.slices) <= self._scored:
            self.whole.append(micro_batch)

    def _lose(self, worker: str) -> None:
        self.reward_workers.discard(worker)
        self.holds.pop(worker, None)
        match self.doing.pop(worker, None):
            case Generate(part, _):
                del self.version[part]
                self.unmade.add(part)
            case Score(part, _):
                self.waiting.append(part)

    def _give_up_early(self) -> None:
        """Early slices are made with the step's own weights once no generator has, or is loading, the ones before."""
        loading = {task.policy_version for task in self.doing.values() if isinstance(task, LoadWeights)}
        versions = loading | {held for worker, held in self.holds.items() if worker not in self._loading()}
        for part in list(self.early):
            needed = self.steps[part.step].policy_version - 1
            if needed < self.published and needed not in versions:
                self.early.remove(part)

    def _loading(self) -> set[str]:
        return {worker for worker, task in self.doing.items() if isinstance(task, LoadWeights)}


def replay(job: Job) -> Iterator[tuple[Ledger, Turn]]:
    """Give each turn with the ledger as it is after the event and before the actions; then do them."""
    ledger = Ledger(job)
    for turn in simulate(job):
        ledger.see(turn.event)
        yield ledger, turn
        for action in turn.actions:
            ledger.do(action)


def settled(job: Job) -> Iterator[tuple[Ledger, Turn]]:
    """Give each turn with the ledger as it is after the actions."""
    ledger = Ledger(job)
    for turn in simulate(job):
        ledger.see(turn.event)
        for action in turn.actions:
            ledger.do(action)
        yield ledger, turn


# ---- the ledger: nothing twice, nothing lost ---------------------------------------------------------------


@thoroughly
@given(JOBS)
def test_every_micro_batch_is_made_scored_and_trained_exactly_once(job: Job) -> None:
    for last, _ in settled(job):
        ledger = last
    expected = job.trained_micro_batches()
    assert Counter(ledger.updated) == Counter(expected)
    assert not any(part.step < job.num_trained_steps for part in (*ledger.unmade, *ledger.waiting))


@simulated
@given(CALM_JOBS)
def test_without_losses_no_sample_is_made_or_scored_twice(job: Job) -> None:
    actions = [action for turn in simulate(job) for action in turn.actions]
    made = [action.slice for action in actions if isinstance(action, Generate)]
    made += [part for action in actions if isinstance(action, Assist) for part in action.micro_batch.slices]
    scored = [action.slice for action in actions if isinstance(action, Score)]
    assert max(Counter(made).values()) == 1
    assert max(Counter(scored).values(), default=1) == 1
    assert set(made) >= {part for entry in job.trained_micro_batches() for part in entry.slices}


@simulated
@given(JOBS)
def test_steps_finish_in_order_each_with_its_last_update(job: Job) -> None:
    finished = []
    for ledger, turn in replay(job):
        for action in turn.actions:
            if isinstance(action, FinishStep):
                finished.append(action.step)
                assert isinstance(turn.event, Updated)
                num_updated = sum(entry.step == action.step for entry in ledger.updated)
                assert num_updated == job.micro_batches_per_step[action.step]
                assert action.num_assisted == ledger.num_assisted[action.step]
    assert finished == list(range(job.num_trained_steps))


@simulated
@given(JOBS.filter(lambda job: job.is_last_step_dropped and job.policy.staleness > 0))
def test_work_begun_ahead_of_a_run_that_ends_is_not_trained(job: Job) -> None:
    history = simulate(job)
    taken = [action for turn in history for action in turn.actions if isinstance(action, (Assist, Update))]
    assert all(action.micro_batch.step < job.num_trained_steps for action in taken)


@simulated
@given(JOBS)
def test_the_same_events_give_the_same_actions(job: Job) -> None:
    history = simulate(job)
    scheduler = Scheduler(job.generators, reward_workers=job.reward_workers, policy=job.policy)
    assert [scheduler.observe(turn.event, turn.time_s) for turn in history] == [turn.actions for turn in history]


# ---- versions ----------------------------------------------------------------------------------------------


@simulated
@given(JOBS)
def test_trained_samples_are_one_version_old_at_most(job: Job) -> None:
    for ledger, turn in replay(job):
        for action in turn.actions:
            if isinstance(action, Update):
                versions = {ledger.version.get(part, ledger.published) for part in action.micro_batch.slices}
                assert versions <= {ledger.published, ledger.published - 1}


@thoroughly
@given(JOBS)
def test_stale_samples_of_a_step_never_exceed_the_bound(job: Job) -> None:
    for ledger, turn in settled(job):
        for step in ledger.steps:
            assert ledger.num_stale(step) <= math.floor(job.policy.staleness * ledger.num_samples(step) + 1e-9)
        for action in turn.actions:
            if isinstance(action, FinishStep):
                assert action.num_stale_samples == ledger.num_stale(action.step)


@simulated
@given(JOBS.map(lambda job: replace(job, policy=replace(job.policy, staleness=0.0))))
def test_without_staleness_all_samples_are_made_with_their_steps_weights(job: Job) -> None:
    for ledger, turn in replay(job):
        for action in turn.actions:
            if isinstance(action, Generate):
                step, version = ledger.steps[action.slice.step], ledger.holds[action.generator]
                assert version == step.policy_version or (step.shares_rollout and version == step.policy_version - 1)
            if isinstance(action, FinishStep):
                assert action.num_stale_samples == 0


def stale_slices(job: Job, seed: int) -> set[Slice]:
    """Run a job with other durations and see which trained slices were made with old weights."""
    ledger = Ledger(job)
    for turn in simulate(job, random_seconds(seed)):
        ledger.see(turn.event)
        for action in turn.actions:
            ledger.do(action)
    return {
        part
        for part, version in ledger.version.items()
        if version < ledger.steps[part.step].policy_version and part.step < job.num_trained_steps
    }


@simulated
@given(CALM_JOBS, STALENESS, st.integers(0, 2**32))
def test_exact_makes_the_same_slices_stale_whatever_the_durations(job: Job, staleness: float, seed: int) -> None:
    policy = replace(job.policy, staleness_mode="exact", staleness=staleness)
    job = replace(job, policy=policy, steps_per_rollout=1)
    stale = stale_slices(job, job.seed)
    assert stale == stale_slices(job, seed)
    # They are those at the front of each step but the first that fit under the bound.
    for step in job.steps()[1 : job.num_trained_steps]:
        num_stale = math.floor(staleness * step.micro_batches[-1].stop + 1e-9)
        for part in (part for entry in step.micro_batches for part in entry.slices):
            assert (part in stale) == (part.stop <= num_stale)


@simulated
@given(JOBS)
def test_a_generator_loads_the_published_weights_between_slices(job: Job) -> None:
    for ledger, turn in settled(job):
        for action in turn.actions:
            if isinstance(action, LoadWeights):
                assert action.policy_version == ledger.published
                assert ledger.holds[action.generator] < action.policy_version
                assert not any(maker == action.generator for maker in _makers_at_work(ledger))


def _makers_at_work(ledger: Ledger) -> list[str]:
    return [task.generator for task in ledger.doing.values() if isinstance(task, Generate)]


@simulated
@given(JOBS)
def test_outdated_weights_make_only_what_must_be_made_with_them(job: Job) -> None:
    for ledger, turn in replay(job):
        for action in turn.actions:
            if isinstance(action, Generate) and ledger.holds[action.generator] < ledger.published:
                assert action.slice in ledger.early


@simulated
@given(JOBS)
def test_early_slices_are_made_with_the_weights_before_and_with_no_others(job: Job) -> None:
    for ledger, turn in replay(job):
        for action in turn.actions:
            if isinstance(action, Generate) and action.slice in ledger.early:
                assert ledger.holds[action.generator] == ledger.steps[action.slice.step].policy_version - 1


# ---- generators --------------------------------------------------------------------------------------------


def allowed(ledger: Ledger, generator: str, policy: SchedulingPolicy) -> bool:
    """Whether there is something that an idle generator may do.

    It may score what nobody else will; load published weights that it lacks; and unless paused make the first unmade
    slice of a step with the step's own weights, or with the ones before where these are as good, an early slice with
    the ones before, or under `cap` the first unmade slice of a step with the ones before where the bound has room.
    """
    if ledger.waiting and not ledger.reward_workers:
        return True
    if ledger.holds[generator] < ledger.published:
        return True
    if ledger.is_paused:
        return False
    for step, added in ledger.steps.items():
        age = added.policy_version - ledger.holds[generator]
        unmade = sorted(part for part in ledger.unmade - ledger.early if part.step == step)
        is_early = age == 1 and any(part.step == step for part in ledger.early)
        room = math.floor(policy.staleness * ledger.num_samples(step) + 1e-9) - ledger.num_stale(step)
        has_room = bool(unmade) and policy.staleness_mode == "cap" and len(unmade[0]) <= room
        if is_early or (unmade and (age == 0 or (age == 1 and (has_room or added.shares_rollout)))):
            return True
    return False


@thoroughly
@given(JOBS)
def test_no_generator_idles_while_there_is_work_that_it_may_do(job: Job) -> None:
    for ledger, _ in settled(job):
        for generator in ledger.idle_generators:
            assert not allowed(ledger, generator, job.policy)


@simulated
@given(JOBS)
def test_scoring_comes_before_generation(job: Job) -> None:
    for ledger, turn in settled(job):
        idle = ledger.scorers - set(ledger.doing)
        assert not (ledger.waiting and idle)
        kinds = [type(action) for action in turn.actions if isinstance(action, (Generate, Score))]
        assert kinds == sorted(kinds, key=[Score, Generate].index)


@simulated
@given(JOBS.filter(lambda job: job.num_reward_workers > 0))
def test_generators_score_only_once_no_reward_worker_is_left(job: Job) -> None:
    for ledger, turn in settled(job):
        for action in turn.actions:
            if isinstance(action, Score):
                assert (action.worker in ledger.holds) == (not ledger.reward_workers)


@simulated
@given(CALM_JOBS)
def test_samples_are_made_in_the_order_of_the_steps(job: Job) -> None:
    made = [action.slice for turn in simulate(job) for action in turn.actions if isinstance(action, Generate)]
    for step in range(len(job.micro_batches_per_step)):
        parts = [part for part in made if part.step == step]
        assert parts == sorted(parts)
    assert [part.step for part in made] == sorted(part.step for part in made)


@simulated
@given(JOBS)
def test_a_pause_starts_no_new_samples_but_those_that_a_load_must_wait_for(job: Job) -> None:
    for ledger, turn in replay(job):
        if ledger.is_paused:
            for action in turn.actions:
                assert isinstance(action, (LoadWeights, Score)) or (
                    isinstance(action, Generate) and action.slice in ledger.early
                )


# ---- trainers ----------------------------------------------------------------------------------------------


@simulated
@given(JOBS)
def test_trainers_touch_only_the_step_that_was_started_with_its_own_weights(job: Job) -> None:
    for ledger, turn in replay(job):
        for action in turn.actions:
            if isinstance(action, (Assist, Update)):
                assert action.micro_batch.step == ledger.started
                assert ledger.steps[action.micro_batch.step].policy_version == ledger.published


@simulated
@given(JOBS)
def test_trainers_update_in_the_order_of_becoming_whole_and_never_idle_on_a_whole_micro_batch(job: Job) -> None:
    for ledger, turn in replay(job):
        is_idle = TRAINERS not in ledger.doing
        whole = [entry for entry in ledger.whole if entry.step == ledger.started]
        tasks = [action for action in turn.actions if isinstance(action, (Assist, Update))]
        assert len(tasks) <= 1
        assert all(action == Update(whole[0]) for action in tasks if isinstance(action, Update))
        is_in_time = ledger.started is not None and ledger.steps[ledger.started].policy_version == ledger.published
        assert tasks or not (is_idle and whole and is_in_time)


@simulated
@given(JOBS)
def test_trainers_assist_with_the_last_micro_batch_that_is_neither_begun_nor_set_aside(job: Job) -> None:
    for ledger, turn in replay(job):
        untouched = [] if ledger.started is None else ledger.untouched(ledger.started)
        for action in turn.actions:
            if isinstance(action, Generate):
                untouched = [entry for entry in untouched if action.slice not in entry.slices]
            if isinstance(action, Assist):
                assert action.micro_batch == untouched[-1]


@simulated
@given(JOBS)
def test_assistance_keeps_to_its_method(job: Job) -> None:
    method = job.policy.trainer_assist
    most = {"off": 0, "static:0": 0, "static:1": 1, "static:3": 3}.get(method, max(job.micro_batches_per_step))
    for ledger, turn in settled(job):
        assert all(count <= most for count in ledger.num_assisted.values())
        for action in turn.actions:
            if isinstance(action, Assist) and method == "search":  # at bubbles only
                assert not any(entry.step == ledger.started for entry in ledger.whole)
            if isinstance(action, Update) and method.startswith("static"):  # all at once, as long as there are any
                step = action.micro_batch.step
                assert ledger.num_assisted[step] == most or not ledger.untouched(step)


# ---- realised time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds per sample."""

    generate: float
    score: float
    assist: float
    update: float

    def seconds(self, kind: str, worker: str, num_samples: int) -> float:
        return num_samples * {
            "generate": self.generate, "score": self.score, "assist": self.assist, "update": self.update
        }.get(kind, 0.0)  # fmt: skip

    def plan(self, num_micro_batches: int, num_samples: int, method: str) -> float:
        """Give the planned makespan of a step."""
        return plan_assist(
            num_micro_batches,
            generate_s=num_samples * self.generate,
            score_s=num_samples * self.score,
            assist_s=num_samples * (self.assist - self.score),
            update_s=num_samples * self.update,
            method=method,
        ).makespan_s


TENTHS = st.integers(1, 60).map(lambda tenths: tenths / 10)
COSTS = st.builds(Costs, TENTHS, st.just(0.0) | TENTHS, TENTHS, TENTHS).filter(
    lambda costs: costs.assist >= costs.score
)


def makespans(
    num_micro_batches: int, group_size: int, batch_size: int | None, method: str, costs: Costs
) -> list[float]:
    """Run four steps on one generator and one trainer; give each step's seconds."""
    job = Job(
        seed=0,
        num_generators=1,
        num_reward_workers=0,
        policy=SchedulingPolicy(method),
        group_size=group_size,
        groups_per_micro_batch=1,
        micro_batches_per_step=(num_micro_batches,) * 4,
        generation_batch_size=batch_size,
        steps_per_version=1,
        steps_per_rollout=1,
        pauses_after=frozenset(),
        is_last_step_dropped=False,
        is_deaf=False,
        losses=(),
    )
    history = simulate(job, costs.seconds)
    starts = [turn.time_s for turn in history if isinstance(turn.event, StepStarted)]
    ends = [turn.time_s for turn in history if any(isinstance(action, FinishStep) for action in turn.actions)]
    return [end - start for start, end in zip(starts, ends, strict=True)]


@simulated
@given(st.integers(2, 9), st.integers(1, 3), st.none() | st.just(1), st.sampled_from(["search", "optimal"]), COSTS)
def test_once_durations_are_known_a_step_takes_as_long_as_planned(
    num_micro_batches: int, group_size: int, batch_size: int | None, method: str, costs: Costs
) -> None:
    realised = makespans(num_micro_batches, group_size, batch_size, method, costs)
    planned = costs.plan(num_micro_batches, group_size, method)
    assert realised[1:] == pytest.approx([planned] * 3, rel=1e-6)


@simulated
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 9), COSTS)
def test_without_planning_a_step_takes_as_long_as_its_closed_form(
    num_micro_batches: int, group_size: int, num_wanted: int, costs: Costs
) -> None:
    costs = replace(costs, generate=costs.generate * math.sqrt(2))  # no two workers are free at one time
    generate_s = (costs.generate + costs.score) * group_size
    assist_s, update_s = costs.assist * group_size, costs.update * group_size
    count = 0  # assist j starts before the generator takes the last but j
    while count < num_wanted and count * assist_s < (num_micro_batches - 1 - count) * generate_s:
        count += 1
    left = num_micro_batches - count
    trainer_s = count * assist_s + num_micro_batches * update_s
    closed_form = max(trainer_s, left * generate_s + update_s, generate_s + left * update_s)
    method = f"static:{num_wanted}" if num_wanted else "off"
    realised = makespans(num_micro_batches, group_size, None, method, costs)
    assert realised == pytest.approx([closed_form] * 4, rel=1e-6)


@simulated
@given(COSTS)
def test_running_averages_of_steady_workers_are_their_durations(costs: Costs) -> None:
    steps = [cut_step(step, num_groups=3, group_size=2, groups_per_micro_batch=1, num_generators=1) for step in (0, 1)]
    scheduler = Scheduler(["a"], policy=SchedulingPolicy("static:1"))
    now_s: dict[str, float] = defaultdict(float)
    queue: list[tuple[float, int, Event]] = []
    order = itertools.count()
    events: list[Event] = [StepAdded(steps[0], 0), StepStarted(0)]
    time_s = 0.0
    while events or queue:
        if events:
            event = events.pop(0)
        else:
            time_s, _, event = heapq.heappop(queue)
        for action in scheduler.observe(event, time_s):
            kind, worker, size, end = _task(action)
            if end is not None:
                now_s[worker] = time_s + costs.seconds(kind, worker, size)
                heapq.heappush(queue, (now_s[worker], next(order), end))
    expected = {"generate": costs.generate, "score": costs.score, "assist": costs.assist, "update": costs.update}
    assert scheduler.durations.as_dict() == pytest.approx(expected, abs=1e-9)


def _task(action: Action) -> tuple[str, str, int, Event | None]:
    match action:
        case Generate(part, worker):
            return "generate", worker, len(part), Generated(part, worker)
        case Score(part, worker):
            return "score", worker, len(part), Scored(part, worker)
        case Assist(micro_batch):
            return "assist", TRAINERS, len(micro_batch), Assisted(micro_batch)
        case Update(micro_batch):
            return "update", TRAINERS, len(micro_batch), Updated(micro_batch)
    return "", "", 0, None


# ---- small examples, to be read ----------------------------------------------------------------------------


def cut(step: int, num_micro_batches: int, *, group_size: int = 1, num_generators: int = 1) -> tuple[MicroBatch, ...]:
    return cut_step(
        step,
        num_groups=num_micro_batches,
        group_size=group_size,
        groups_per_micro_batch=1,
        num_generators=num_generators,
    )


def test_a_micro_batch_is_made_scored_and_trained_while_the_next_one_is_made() -> None:
    first, second = cut(0, 2)
    (a,), (b,) = first.slices, second.slices
    scheduler = Scheduler(["gen"])
    assert scheduler.observe(StepAdded((first, second), 0), 0.0) == [Generate(a, "gen")]
    assert scheduler.observe(StepStarted(0), 0.0) == []
    assert scheduler.observe(Generated(a, "gen"), 4.0) == [Score(a, "gen")]
    assert scheduler.observe(Scored(a, "gen"), 5.0) == [Generate(b, "gen"), Update(first)]
    assert scheduler.observe(Updated(first), 7.0) == []
    assert scheduler.observe(Generated(b, "gen"), 9.0) == [Score(b, "gen")]
    assert scheduler.observe(Scored(b, "gen"), 10.0) == [Update(second)]
    assert scheduler.observe(Updated(second), 12.0) == [FinishStep(0, num_stale_samples=0, num_assisted=0)]


def test_a_slow_generator_does_not_hold_up_the_others_micro_batches() -> None:
    first, second = cut(0, 2)
    (a,), (b,) = first.slices, second.slices
    scheduler = Scheduler(["slow", "fast"])
    assert scheduler.observe(StepAdded((first, second), 0), 0.0) == [Generate(a, "slow"), Generate(b, "fast")]
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(b, "fast"), 1.0)
    assert scheduler.observe(Scored(b, "fast"), 2.0) == [Update(second)]


def test_reward_workers_score_while_generators_make_the_next_samples() -> None:
    first, second = cut(0, 2)
    (a,), (b,) = first.slices, second.slices
    scheduler = Scheduler(["gen"], reward_workers=["judge"])
    scheduler.observe(StepAdded((first, second), 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    assert scheduler.observe(Generated(a, "gen"), 4.0) == [Score(a, "judge"), Generate(b, "gen")]
    assert scheduler.observe(Generated(b, "gen"), 8.0) == []  # the judge is busy
    assert scheduler.observe(Scored(a, "judge"), 9.0) == [Score(b, "judge"), Update(first)]


def test_trainers_do_nothing_of_a_step_before_it_is_started() -> None:
    (only,) = step = cut(0, 1)
    (a,) = only.slices
    scheduler = Scheduler(["gen"], policy=SchedulingPolicy("optimal"))
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(Generated(a, "gen"), 1.0)
    assert scheduler.observe(Scored(a, "gen"), 2.0) == []
    assert scheduler.observe(StepStarted(0), 3.0) == [Update(only)]


def test_a_fixed_number_of_micro_batches_is_taken_from_the_back_before_updates() -> None:
    first, second, third, fourth = step = cut(0, 4)
    scheduler = Scheduler(["gen"], policy=SchedulingPolicy("static:2"))
    scheduler.observe(StepAdded(step, 0), 0.0)
    assert scheduler.observe(StepStarted(0), 0.0) == [Assist(fourth)]
    scheduler.observe(Generated(first.slices[0], "gen"), 1.0)
    scheduler.observe(Scored(first.slices[0], "gen"), 1.0)
    # The first micro-batch is ready and so is the fourth; the plan wants one more.
    assert scheduler.observe(Assisted(fourth), 2.0) == [Assist(third)]
    assert scheduler.observe(Assisted(third), 4.0) == [Update(first)]
    assert scheduler.observe(Updated(first), 5.0) == [Update(fourth)]


def test_the_first_bubble_is_assisted_to_measure_how_long_that_takes() -> None:
    step = cut(0, 3)
    scheduler = Scheduler(["gen"], policy=SchedulingPolicy("optimal"))
    scheduler.observe(StepAdded(step, 0), 0.0)
    assert scheduler.observe(StepStarted(0), 0.0) == [Assist(step[2])]
    # Nothing is known of updates yet, so the trainer does not assist again before it has made one.
    assert scheduler.observe(Assisted(step[2]), 5.0) == [Update(step[2])]
    assert scheduler.durations.as_dict() == {"assist": 5.0}


def trainer_tasks_of_second_step(method: str, num_micro_batches: int, costs: Costs) -> str:
    """Spell what the trainer does, `a` for an assist and `U` for an update."""
    job = Job(
        0, 1, 0, SchedulingPolicy(method), 1, 1, (num_micro_batches,) * 2, None, 1, 1, frozenset(), False, False, ()
    )
    actions = [action for turn in simulate(job, costs.seconds) for action in turn.actions]
    letters = {Assist: "a", Update: "U"}
    return "".join(
        letters[type(action)]
        for action in actions
        if isinstance(action, (Assist, Update)) and action.micro_batch.step == 1
    )


def test_the_plan_may_put_assistance_before_updates_that_are_ready() -> None:
    costs = Costs(generate=10, score=0, assist=1, update=3)
    assert trainer_tasks_of_second_step("off", 5, costs) == "UUUUU"
    assert trainer_tasks_of_second_step("search", 5, costs) == "aUaUaUUU"
    assert trainer_tasks_of_second_step("optimal", 5, costs) == "aaaaUUUUU"


def test_a_clock_too_coarse_for_generation_leaves_planning_out() -> None:
    first, _, _, fourth = step = cut(0, 4)
    scheduler = Scheduler(["gen"], policy=SchedulingPolicy("optimal"))
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(first.slices[0], "gen"), 0.0)
    scheduler.observe(Scored(first.slices[0], "gen"), 0.0)
    assert scheduler.observe(Assisted(fourth), 1.0) == [Update(first)]
    assert scheduler.observe(Updated(first), 2.0) == [Update(fourth)]  # the third is unassigned


# ---- examples of staleness (docs/design/staleness.md) ------------------------------------------------------

STALE_HALF = SchedulingPolicy(staleness=0.5)
EXACT_HALF = SchedulingPolicy(staleness=0.5, staleness_mode="exact")


def train(scheduler: Scheduler, micro_batch: MicroBatch, generator: str, time_s: float) -> list[Action]:
    """Let a micro-batch of one slice be made, scored and trained at one moment; gives the last answer."""
    (part,) = micro_batch.slices
    scheduler.observe(Generated(part, generator), time_s)
    scheduler.observe(Scored(part, generator), time_s)
    return scheduler.observe(Updated(micro_batch), time_s)


def test_an_idle_generator_begins_the_next_step_up_to_the_bound() -> None:
    now, then = cut(0, 1), cut(1, 4)
    scheduler = Scheduler(["gen"], policy=STALE_HALF)
    scheduler.observe(StepAdded(now, 0), 0.0)
    assert scheduler.observe(StepAdded(then, 1), 0.0) == []
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(now[0].slices[0], "gen"), 4.0)
    first, second = then[0].slices[0], then[1].slices[0]
    assert scheduler.observe(Scored(now[0].slices[0], "gen"), 5.0) == [Generate(first, "gen"), Update(now[0])]
    scheduler.observe(Generated(first, "gen"), 9.0)
    assert scheduler.observe(Scored(first, "gen"), 10.0) == [Generate(second, "gen")]
    scheduler.observe(Generated(second, "gen"), 14.0)
    assert scheduler.observe(Scored(second, "gen"), 15.0) == []  # 2 of 4 are stale: that is the bound


def test_new_weights_are_loaded_when_the_slice_in_hand_is_scored() -> None:
    now, then = cut(0, 1), cut(1, 4)
    scheduler = Scheduler(["gen"], policy=STALE_HALF)
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    assert train(scheduler, now[0], "gen", 1.0) == [FinishStep(0, num_stale_samples=0, num_assisted=0)]
    assert scheduler.observe(WeightsPublished(1), 2.0) == []  # the generator is in the middle of a slice
    part = then[0].slices[0]
    assert scheduler.observe(Generated(part, "gen"), 3.0) == [Score(part, "gen")]
    # One stale slice more would be within the bound, but fresh weights are there.
    assert scheduler.observe(Scored(part, "gen"), 4.0) == [LoadWeights("gen", 1)]
    assert scheduler.observe(WeightsLoaded("gen", 1), 5.0) == [Generate(then[1].slices[0], "gen")]
    assert scheduler.observe(StepStarted(1), 5.0) == [Update(then[0])]


def test_exact_makes_its_early_slices_even_after_the_new_weights_are_published() -> None:
    now, then = cut(0, 1), cut(1, 4)
    scheduler = Scheduler(["gen"], policy=EXACT_HALF)
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    train(scheduler, now[0], "gen", 1.0)
    scheduler.observe(WeightsPublished(1), 2.0)
    first, second = then[0].slices[0], then[1].slices[0]
    scheduler.observe(Generated(first, "gen"), 3.0)
    assert scheduler.observe(Scored(first, "gen"), 4.0) == [Generate(second, "gen")]
    scheduler.observe(Generated(second, "gen"), 5.0)
    assert scheduler.observe(Scored(second, "gen"), 6.0) == [LoadWeights("gen", 1)]


@pytest.mark.parametrize("policy", [STALE_HALF, EXACT_HALF])
def test_the_running_step_is_made_before_the_next_one_is_begun(policy: SchedulingPolicy) -> None:
    now, then = cut(0, 2), cut(1, 2)
    scheduler = Scheduler(["gen"], policy=policy)
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    made = now[0].slices[0]
    scheduler.observe(Generated(made, "gen"), 1.0)
    assert scheduler.observe(Scored(made, "gen"), 1.0) == [Generate(now[1].slices[0], "gen"), Update(now[0])]


def test_trainers_wait_for_the_weights_of_a_step_that_is_started() -> None:
    now, then = cut(0, 1), cut(1, 4)
    scheduler = Scheduler(["gen"], policy=STALE_HALF)
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    train(scheduler, now[0], "gen", 1.0)
    scheduler.observe(Generated(then[0].slices[0], "gen"), 2.0)
    scheduler.observe(Scored(then[0].slices[0], "gen"), 2.0)  # the first micro-batch is ready
    assert scheduler.observe(StepStarted(1), 3.0) == []
    assert scheduler.observe(WeightsPublished(1), 4.0) == [Update(then[0])]


def test_a_bound_below_one_slice_makes_nothing_stale() -> None:
    now, then = cut(0, 1), cut(1, 2, group_size=4)
    scheduler = Scheduler(["gen"], policy=SchedulingPolicy(staleness=0.4))  # 3 of 8 samples; slices have 4
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    scheduler.observe(Generated(now[0].slices[0], "gen"), 1.0)
    assert scheduler.observe(Scored(now[0].slices[0], "gen"), 1.0) == [Update(now[0])]


# ---- examples of losses ------------------------------------------------------------------------------------


def test_a_lost_generators_samples_are_kept_and_what_it_was_at_is_made_again() -> None:
    step = cut(0, 2, group_size=2, num_generators=2)
    first, second = step[0].slices
    scheduler = Scheduler(["a", "b"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(first, "a"), 1.0)
    scheduler.observe(Scored(first, "a"), 1.0)  # a goes on with the second micro-batch
    assert scheduler.observe(WorkerLost("a"), 2.0) == []
    scheduler.observe(Generated(second, "b"), 3.0)
    again = Generate(step[1].slices[0], "b")
    assert scheduler.observe(Scored(second, "b"), 4.0) == [again, Update(step[0])]


def test_a_sample_whose_scorer_is_lost_is_scored_by_another() -> None:
    (only,) = step = cut(0, 1)
    scheduler = Scheduler(["a", "b"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    assert scheduler.observe(Generated(only.slices[0], "a"), 1.0) == [Score(only.slices[0], "a")]
    assert scheduler.observe(WorkerLost("a"), 2.0) == [Score(only.slices[0], "b")]
    assert scheduler.observe(Scored(only.slices[0], "b"), 3.0) == [Update(only)]


def test_the_only_generator_may_be_lost_at_work_and_replaced() -> None:
    (only,) = step = cut(0, 1)
    scheduler = Scheduler(["a"])
    assert scheduler.observe(StepAdded(step, 0), 0.0) == [Generate(only.slices[0], "a")]
    assert scheduler.observe(WorkerLost("a"), 1.0) == []
    assert scheduler.observe(WorkerJoined("b", 0), 2.0) == [Generate(only.slices[0], "b")]


def test_a_lost_maker_does_not_take_its_samples_from_the_reward_worker() -> None:
    (only,) = step = cut(0, 1)
    (part,) = only.slices
    scheduler = Scheduler(["a", "b"], reward_workers=["judge"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    assert scheduler.observe(Generated(part, "a"), 1.0) == [Score(part, "judge")]
    assert scheduler.observe(WorkerLost("a"), 2.0) == []
    assert scheduler.observe(Scored(part, "judge"), 4.0) == [Update(only)]


def test_samples_that_are_lost_before_they_are_scored_are_made_again_in_their_place() -> None:
    first, second = step = cut(0, 2)
    (a,), (b,) = first.slices, second.slices
    scheduler = Scheduler(["gen"], reward_workers=["judge"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    assert scheduler.observe(Generated(a, "gen"), 1.0) == [Score(a, "judge"), Generate(b, "gen")]
    assert scheduler.observe(SamplesLost(a, "judge"), 2.0) == []
    assert scheduler.observe(Generated(b, "gen"), 3.0) == [Score(b, "judge"), Generate(a, "gen")]
    assert scheduler.observe(Scored(b, "judge"), 4.0) == [Update(second)]
    assert scheduler.observe(Generated(a, "gen"), 5.0) == [Score(a, "judge")]
    assert scheduler.observe(Updated(second), 6.0) == []
    assert scheduler.observe(Scored(a, "judge"), 7.0) == [Update(first)]
    assert scheduler.observe(Updated(first), 8.0) == [FinishStep(0, num_stale_samples=0, num_assisted=0)]


def test_samples_lost_by_the_generator_that_scores_them_are_made_again() -> None:
    (only,) = step = cut(0, 1)
    (part,) = only.slices
    scheduler = Scheduler(["gen"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    assert scheduler.observe(Generated(part, "gen"), 1.0) == [Score(part, "gen")]
    assert scheduler.observe(SamplesLost(part, "gen"), 2.0) == [Generate(part, "gen")]


def test_generators_do_not_score_while_the_last_reward_worker_is_started_again() -> None:
    first, second = step = cut(0, 2)
    (a,), (b,) = first.slices, second.slices
    scheduler = Scheduler(["gen"], reward_workers=["judge"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(a, "gen"), 1.0)
    assert scheduler.observe(WorkerLost("judge", returns=True), 2.0) == []
    assert scheduler.observe(Generated(b, "gen"), 3.0) == []
    assert scheduler.observe(WorkerJoined("judge", None), 4.0) == [Score(a, "judge")]
    assert scheduler.observe(Scored(a, "judge"), 5.0) == [Score(b, "judge"), Update(first)]


def test_generators_score_once_the_last_reward_worker_is_lost() -> None:
    first, second = step = cut(0, 2)
    (a,), (b,) = first.slices, second.slices
    scheduler = Scheduler(["gen"], reward_workers=["judge"])
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(a, "gen"), 1.0)
    assert scheduler.observe(WorkerLost("judge"), 2.0) == []
    assert scheduler.observe(Generated(b, "gen"), 3.0) == [Score(b, "gen")]  # the maker has it at hand
    assert scheduler.observe(Scored(b, "gen"), 4.0) == [Score(a, "gen"), Update(second)]
    assert scheduler.observe(Scored(a, "gen"), 5.0) == []


def test_early_slices_are_given_up_when_nobody_has_the_weights_for_them_any_more() -> None:
    now, then = cut(0, 1), cut(1, 4)
    scheduler = Scheduler(["gen"], policy=EXACT_HALF)
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    scheduler.observe(Generated(now[0].slices[0], "gen"), 1.0)
    scheduler.observe(Scored(now[0].slices[0], "gen"), 1.0)
    scheduler.observe(WorkerLost("gen"), 2.0)  # at the first early slice; the second is untouched
    scheduler.observe(Updated(now[0]), 3.0)
    scheduler.observe(WeightsPublished(1), 4.0)
    first, second = then[0].slices[0], then[1].slices[0]
    assert scheduler.observe(WorkerJoined("new", 1), 5.0) == [Generate(first, "new")]
    scheduler.observe(Generated(first, "new"), 6.0)
    assert scheduler.observe(Scored(first, "new"), 6.0) == [Generate(second, "new")]


def test_a_lost_early_slice_is_made_again_with_the_steps_own_weights() -> None:
    now, then = cut(0, 1), cut(1, 2)
    scheduler = Scheduler(["a", "b"], policy=EXACT_HALF)
    assert scheduler.observe(StepAdded(now, 0), 0.0) == [Generate(now[0].slices[0], "a")]
    part = then[0].slices[0]
    assert scheduler.observe(StepAdded(then, 1), 0.0) == [Generate(part, "b")]
    assert scheduler.observe(WorkerLost("b"), 1.0) == []
    scheduler.observe(Generated(now[0].slices[0], "a"), 2.0)
    assert scheduler.observe(Scored(now[0].slices[0], "a"), 2.0) == []
    assert scheduler.observe(WeightsPublished(1), 3.0) == [LoadWeights("a", 1)]
    assert scheduler.observe(WeightsLoaded("a", 1), 4.0) == [Generate(part, "a")]


def test_early_slices_wait_for_generators_that_are_loading_the_weights_for_them() -> None:
    step = [cut(index, 2, group_size=2, num_generators=2) for index in range(3)]
    scheduler = Scheduler(["a", "b"], policy=EXACT_HALF)
    scheduler.observe(WeightsPublished(1), 0.0)  # both are loading
    scheduler.observe(StepAdded(step[1], 1), 0.0)
    scheduler.observe(StepAdded(step[2], 2), 0.0)
    scheduler.observe(WorkerLost("a"), 1.0)
    made = []
    for time_s in (2.0, 3.0, 4.0, 5.0, 6.0):
        event = Scored(made[-1], "b") if made else WeightsLoaded("b", 1)
        (action,) = scheduler.observe(event, time_s)
        made.append(action.slice)
        scheduler.observe(Generated(action.slice, "b"), time_s)
    assert made == [*step[1][0].slices, *step[1][1].slices, step[2][0].slices[0]]


def test_a_generator_that_joins_with_older_weights_loads_first() -> None:
    step = cut(0, 1)
    scheduler = Scheduler(["a"], policy_version=3)
    scheduler.observe(StepAdded(step, 3), 0.0)
    scheduler.observe(WorkerLost("a"), 1.0)
    assert scheduler.observe(WorkerJoined("b", 2), 2.0) == [LoadWeights("b", 3)]
    assert scheduler.observe(WeightsLoaded("b", 3), 3.0) == [Generate(step[0].slices[0], "b")]


# ---- examples of pauses and of misuse ----------------------------------------------------------------------


def test_a_pause_lets_generators_finish_load_and_wait() -> None:
    now, then = cut(0, 1), cut(1, 2)
    scheduler = Scheduler(["gen"], policy=STALE_HALF)
    for event in (StepAdded(now, 0), StepAdded(then, 1), StepStarted(0)):
        scheduler.observe(event, 0.0)
    train(scheduler, now[0], "gen", 1.0)  # the generator is at the first slice of the next step
    scheduler.observe(WeightsPublished(1), 2.0)
    assert scheduler.observe(Paused(), 2.0) == []
    part = then[0].slices[0]
    scheduler.observe(Generated(part, "gen"), 3.0)
    assert scheduler.observe(Scored(part, "gen"), 3.0) == [LoadWeights("gen", 1)]
    assert not scheduler.is_quiet
    assert scheduler.observe(WeightsLoaded("gen", 1), 4.0) == []
    assert scheduler.is_quiet
    assert scheduler.observe(Resumed(), 9.0) == [Generate(then[1].slices[0], "gen")]


def test_a_pause_before_new_weights_leaves_early_slices_for_later() -> None:
    now, then = cut(0, 1), cut(1, 2)
    scheduler = Scheduler(["gen"], policy=EXACT_HALF)
    for event in (StepAdded(now, 0), StepAdded(then, 1), Paused()):
        scheduler.observe(event, 0.0)
    part = now[0].slices[0]
    scheduler.observe(Generated(part, "gen"), 1.0)
    assert scheduler.observe(Scored(part, "gen"), 1.0) == []
    assert scheduler.is_quiet
    assert scheduler.observe(Resumed(), 2.0) == [Generate(then[0].slices[0], "gen")]


def test_steps_out_of_order_and_two_versions_ahead_are_bugs() -> None:
    scheduler = Scheduler(["gen"])
    scheduler.observe(StepAdded(cut(1, 1), 0), 0.0)
    with pytest.raises(AssertionError, match="in order"):
        scheduler.observe(StepAdded(cut(1, 1), 0), 0.0)
    with pytest.raises(AssertionError, match="one version ahead"):
        scheduler.observe(StepAdded(cut(2, 1), 2), 0.0)


def test_durations_are_per_sample_and_leave_switching_out() -> None:
    first, second = step = cut(0, 2, group_size=4)
    scheduler = Scheduler(["gen"], policy=SchedulingPolicy("static:1"))
    scheduler.observe(StepAdded(step, 0), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Assisted(second, switch_s=2.0), 10.0)
    scheduler.observe(Updated(second, switch_s=1.0), 19.0)
    scheduler.observe(Generated(first.slices[0], "gen"), 20.0)
    scheduler.observe(Scored(first.slices[0], "gen"), 26.0)
    # The switch: 2 s at first, then a fifth of the way to 1 s.
    expected = {"assist": 2.0, "update": 2.0, "switch": 1.8, "generate": 5.0, "score": 1.5}
    assert scheduler.durations.as_dict() == pytest.approx(expected)


# ---- several updates per rollout ---------------------------------------------------------------------------


@simulated
@given(
    JOBS.map(
        lambda job: replace(
            job, policy=replace(job.policy, staleness=0.0), steps_per_version=1, steps_per_rollout=2, losses=()
        )
    )
)
def test_a_step_of_the_same_rollout_is_begun_before_its_weights_exist(job: Job) -> None:
    begun_early = {
        action.slice.step
        for ledger, turn in replay(job)
        for action in turn.actions
        if isinstance(action, Generate) and ledger.steps[action.slice.step].policy_version > ledger.published
    }
    assert begun_early <= {index for index in range(len(job.micro_batches_per_step)) if index % 2 == 1}


def test_generators_go_on_with_the_next_step_while_the_trainer_updates() -> None:
    first, second = (
        cut_step(index, num_groups=1, group_size=2, groups_per_micro_batch=1, num_generators=1) for index in (0, 1)
    )
    part = first[0].slices[0]
    scheduler = Scheduler(["generator-0"])
    scheduler.observe(StepAdded(first, policy_version=0), 0.0)
    scheduler.observe(StepAdded(second, policy_version=1, shares_rollout=True), 0.0)
    scheduler.observe(StepStarted(0), 0.0)
    scheduler.observe(Generated(part, "generator-0"), 1.0)
    actions = scheduler.observe(Scored(part, "generator-0"), 2.0)
    assert actions == [Generate(second[0].slices[0], "generator-0"), Update(first[0])]
