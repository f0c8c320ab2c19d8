"""The scheduling core, driven by a discrete-event loop with random durations and checked against its history."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.scheduling import (
    Action,
    Event,
    FinishStep,
    Generate,
    Generated,
    MicroBatch,
    Scheduler,
    Score,
    Scored,
    Slice,
    StepStarted,
    Update,
    Updated,
    WeightsLoaded,
    cut_step,
)


@dataclass(frozen=True)
class Case:
    """A cluster, its work, and the seed of all durations."""

    seed: int
    num_generators: int
    group_size: int
    groups_per_micro_batch: int
    micro_batches_per_step: tuple[int, ...]
    generation_batch_size: int | None
    new_version_every: int
    """Steps that share a version, as under gradient accumulation."""

    @property
    def generators(self) -> list[str]:
        return [f"generator-{index}" for index in range(self.num_generators)]

    def steps(self) -> list[StepStarted]:
        return [
            StepStarted(
                cut_step(
                    index,
                    num_groups=count * self.groups_per_micro_batch,
                    group_size=self.group_size,
                    groups_per_micro_batch=self.groups_per_micro_batch,
                    num_generators=self.num_generators,
                    generation_batch_size=self.generation_batch_size,
                ),
                policy_version=index // self.new_version_every,
            )
            for index, count in enumerate(self.micro_batches_per_step)
        ]


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    num_generators=st.integers(1, 5),
    group_size=st.integers(1, 6),
    groups_per_micro_batch=st.integers(1, 2),
    micro_batches_per_step=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    generation_batch_size=st.none() | st.integers(1, 4),
    new_version_every=st.integers(1, 2),
)

Turn = tuple[Event, list[Action]]


def simulate(case: Case) -> list[Turn]:
    """Run the scheduler against a virtual clock; workers do their tasks one after another, at random speeds."""
    rng = random.Random(case.seed)
    speed = {generator: rng.choice([1, 1, 3, 10]) for generator in case.generators}
    scheduler = Scheduler(case.generators, policy_version=0)
    free_at: dict[str, int] = defaultdict(int)
    order = itertools.count()
    happenings: list[tuple[int, int, Event]] = []
    steps = case.steps()
    history: list[Turn] = []

    def schedule(now: int, worker: str, event: Event, longest: int) -> None:
        free_at[worker] = max(now, free_at[worker]) + rng.randint(0, longest) * speed.get(worker, 1)
        heapq.heappush(happenings, (free_at[worker], next(order), event))

    heapq.heappush(happenings, (0, next(order), steps[0]))
    while happenings:
        now, _, event = heapq.heappop(happenings)
        actions = scheduler.observe(event)
        history.append((event, actions))
        for action in actions:
            match action:
                case Generate(part, generator):
                    schedule(now, generator, Generated(part, generator), 9)
                case Score(part, generator):
                    schedule(now, generator, Scored(part, generator), 3)
                case Update(micro_batch):
                    schedule(now, "trainers", Updated(micro_batch), rng.choice([2, 20]))
                case FinishStep(step) if step + 1 < len(steps):
                    following = steps[step + 1]
                    if following.policy_version != steps[step].policy_version:
                        for generator in case.generators:
                            schedule(now, generator, WeightsLoaded(generator, following.policy_version), 8)
                    heapq.heappush(happenings, (now + rng.randint(0, 4), next(order), following))
    return history


@dataclass
class Ledger:
    """What an onlooker knows who only sees events and actions go by."""

    idle: set[str]
    loaded: dict[str, int]
    version: int = 0
    is_trainer_idle: bool = True
    to_generate: set[Slice] = field(default_factory=set)
    to_score: set[Slice] = field(default_factory=set)
    unscored: dict[MicroBatch, set[Slice]] = field(default_factory=dict)
    whole: list[MicroBatch] = field(default_factory=list)
    """Waiting for the trainers, in the order of becoming whole."""

    def see(self, event: Event) -> None:
        match event:
            case StepStarted(micro_batches, version):
                self.version = version
                for micro_batch in micro_batches:
                    self.to_generate |= set(micro_batch.slices)
                    self.unscored[micro_batch] = set(micro_batch.slices)
            case WeightsLoaded(generator, version):
                self.loaded[generator] = version
            case Generated(part, generator):
                self.idle.add(generator)
                self.to_score.add(part)
            case Scored(part, generator):
                self.idle.add(generator)
                owner = next(entry for entry in self.unscored if part in entry.slices)
                self.unscored[owner].remove(part)
                if not self.unscored[owner]:
                    self.whole.append(owner)
            case Updated():
                self.is_trainer_idle = True

    def do(self, action: Action) -> None:
        match action:
            case Generate(part, generator):
                self.idle.remove(generator)
                self.to_generate.remove(part)
            case Score(part, generator):
                self.idle.remove(generator)
                self.to_score.remove(part)
            case Update(micro_batch):
                self.is_trainer_idle = False
                self.whole.remove(micro_batch)


def replay(case: Case) -> Iterator[tuple[Ledger, Event, list[Action]]]:
    """Give each turn with the ledger as it is after the event and before the actions; then do them."""
    ledger = Ledger(set(case.generators), dict.fromkeys(case.generators, 0))
    for event, actions in simulate(case):
        ledger.see(event)
        yield ledger, event, actions
        for action in actions:
            ledger.do(action)


@given(CASES)
def test_every_slice_is_generated_once_and_scored_once(case: Case) -> None:
    actions = [action for _, actions in simulate(case) for action in actions]
    slices = Counter(part for step in case.steps() for entry in step.micro_batches for part in entry.slices)
    assert Counter(action.slice for action in actions if isinstance(action, Generate)) == slices
    assert Counter(action.slice for action in actions if isinstance(action, Score)) == slices


@given(CASES)
def test_every_micro_batch_is_updated_once_after_all_its_slices_were_scored(case: Case) -> None:
    scored: set[Slice] = set()
    updated: list[MicroBatch] = []
    for event, actions in simulate(case):
        if isinstance(event, Scored):
            scored.add(event.slice)
        for action in actions:
            if isinstance(action, Update):
                assert set(action.micro_batch.slices) <= scored
                updated.append(action.micro_batch)
    assert Counter(updated) == Counter(entry for step in case.steps() for entry in step.micro_batches)


@given(CASES)
def test_a_worker_has_one_task_at_a_time(case: Case) -> None:
    for ledger, _, actions in replay(case):
        busy = [action.generator for action in actions if isinstance(action, (Generate, Score))]
        assert len(busy) == len(set(busy))
        assert set(busy) <= ledger.idle
        num_updates = sum(isinstance(action, Update) for action in actions)
        assert num_updates <= (1 if ledger.is_trainer_idle else 0)


@given(CASES)
def test_no_sample_is_made_before_its_generator_has_loaded_the_steps_weights(case: Case) -> None:
    for ledger, _, actions in replay(case):
        for action in actions:
            if isinstance(action, Generate):
                assert ledger.loaded[action.generator] == ledger.version
                assert ledger.version == action.slice.step // case.new_version_every


@given(CASES)
def test_no_generator_idles_while_work_that_it_may_do_waits(case: Case) -> None:
    for ledger, _, actions in replay(case):
        idle = ledger.idle - {action.generator for action in actions if isinstance(action, (Generate, Score))}
        unscored = ledger.to_score - {action.slice for action in actions if isinstance(action, Score)}
        unmade = ledger.to_generate - {action.slice for action in actions if isinstance(action, Generate)}
        assert not (idle and unscored)
        assert not (unmade and any(ledger.loaded[generator] == ledger.version for generator in idle))


@given(CASES)
def test_scoring_comes_before_generation(case: Case) -> None:
    for ledger, _, actions in replay(case):
        waiting = set(ledger.to_score)
        for action in actions:
            if isinstance(action, Score):
                waiting.remove(action.slice)
            assert not (isinstance(action, Generate) and waiting)


@given(CASES)
def test_the_trainers_take_whole_micro_batches_at_once_and_in_the_order_of_becoming_whole(case: Case) -> None:
    for ledger, _, actions in replay(case):
        updates = [action.micro_batch for action in actions if isinstance(action, Update)]
        assert updates == (ledger.whole[:1] if ledger.is_trainer_idle else [])


@given(CASES)
def test_a_step_ends_with_its_last_update_and_nothing_of_it_comes_later(case: Case) -> None:
    history = simulate(case)
    ends = [(event, actions) for event, actions in history if any(isinstance(a, FinishStep) for a in actions)]
    assert [actions for _, actions in ends] == [[FinishStep(step)] for step in range(len(case.micro_batches_per_step))]
    assert all(isinstance(event, Updated) for event, _ in ends)
    num_updated: Counter[int] = Counter()
    for event, actions in history:
        num_updated.update([event.micro_batch.step] if isinstance(event, Updated) else [])
        for action in actions:
            if isinstance(action, FinishStep):
                assert num_updated[action.step] == case.micro_batches_per_step[action.step]


@given(CASES)
def test_the_same_events_give_the_same_actions(case: Case) -> None:
    history = simulate(case)
    scheduler = Scheduler(case.generators, policy_version=0)
    assert [scheduler.observe(event) for event, _ in history] == [actions for _, actions in history]


@given(CASES)
def test_samples_are_made_in_the_order_of_the_step(case: Case) -> None:
    made = [action.slice for _, actions in simulate(case) for action in actions if isinstance(action, Generate)]
    assert made == sorted(made)


def test_the_maker_of_a_slice_scores_it() -> None:
    step = cut_step(0, num_groups=2, group_size=2, groups_per_micro_batch=1, num_generators=2)
    scheduler = Scheduler(["a", "b"], policy_version=0)
    first, second = step[0].slices
    assert scheduler.observe(StepStarted(step, 0)) == [Generate(first, "a"), Generate(second, "b")]
    assert scheduler.observe(Generated(second, "b")) == [Score(second, "b")]
    assert scheduler.observe(Generated(first, "a")) == [Score(first, "a")]


def test_a_slow_generator_does_not_hold_up_the_others_micro_batches() -> None:
    step = cut_step(0, num_groups=2, group_size=1, groups_per_micro_batch=1, num_generators=2)
    scheduler = Scheduler(["slow", "fast"], policy_version=0)
    second = step[1].slices[0]
    scheduler.observe(StepStarted(step, 0))
    scheduler.observe(Generated(second, "fast"))
    assert scheduler.observe(Scored(second, "fast")) == [Update(step[1])]


def test_generators_wait_for_new_weights_one_by_one() -> None:
    step = cut_step(1, num_groups=1, group_size=2, groups_per_micro_batch=1, num_generators=2)
    scheduler = Scheduler(["a", "b"], policy_version=0)
    assert scheduler.observe(StepStarted(step, policy_version=1)) == []
    assert scheduler.observe(WeightsLoaded("b", 1)) == [Generate(step[0].slices[0], "b")]
    assert scheduler.observe(WeightsLoaded("a", 1)) == [Generate(step[0].slices[1], "a")]


def test_a_generator_without_new_weights_may_score_what_others_made() -> None:
    step = cut_step(1, num_groups=1, group_size=2, groups_per_micro_batch=1, num_generators=2)
    scheduler = Scheduler(["late", "early"], policy_version=0)
    scheduler.observe(StepStarted(step, policy_version=1))
    scheduler.observe(WeightsLoaded("early", 1))
    first, second = step[0].slices
    assert Score(first, "late") in scheduler.observe(Generated(first, "early"))


def test_a_step_that_starts_before_the_last_one_ended_is_a_bug() -> None:
    step = cut_step(0, num_groups=1, group_size=1, groups_per_micro_batch=1, num_generators=1)
    scheduler = Scheduler(["a"], policy_version=0)
    scheduler.observe(StepStarted(step, 0))
    with pytest.raises(AssertionError, match="not finished"):
        scheduler.observe(StepStarted(step, 0))
