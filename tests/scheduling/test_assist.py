"""Planners of trainer-assisted generation against exhaustive search, in a simulator that shares no code with them.

Times of the simulator are integer ticks, so that ties are exact; planners see ticks or tenths of ticks as floats.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from digenrl.scheduling.assist import (
    AssistPlan,
    AssistState,
    TrainerTask,
    check_assist_method,
    next_task,
    plan_assist,
    plan_remaining,
)

METHODS = ["off", "static:1", "static:3", "search", "optimal"]
UNITS = [1, 0.1]
"""Length of a tick in seconds: whole seconds, and tenths, whose sums and multiples are inexact as floats."""


@dataclass(frozen=True)
class Ticks:
    """Costs of a model in ticks."""

    generate: int
    assist: int
    update: int
    score: int = 0
    switch: int = 0

    def seconds(self, unit: float) -> dict[str, float]:
        return {
            "generate_s": self.generate * unit,
            "assist_s": self.assist * unit,
            "update_s": self.update * unit,
            "score_s": self.score * unit,
            "switch_s": self.switch * unit,
        }


class World(NamedTuple):
    """Generator groups that never idle, and a trainer who is free `now`."""

    now: int
    num_unassigned: int
    num_ready: int
    in_progress: tuple[int, ...]
    """Ticks at which micro-batches in progress become ready, sorted."""
    is_switched: bool = False
    has_just_switched: bool = False
    """By a task of its own; switching again at once would lead nowhere."""

    @classmethod
    def start(cls, num_micro_batches: int, ticks: Ticks) -> World:
        return cls(0, num_micro_batches - 1, 0, (ticks.generate + ticks.score,))

    @property
    def is_finished(self) -> bool:
        return not (self.num_unassigned or self.num_ready or self.in_progress)

    def reach(self, now: int, ticks: Ticks, **changes: Any) -> World:
        """Let generators work up to and including `now`; `changes` hold from the start."""
        before = self._replace(**{"has_just_switched": False, **changes})
        in_progress = list(before.in_progress)
        num_unassigned, num_ready = before.num_unassigned, before.num_ready
        while in_progress and in_progress[0] <= now:
            end = in_progress.pop(0)
            num_ready += 1
            if num_unassigned:
                num_unassigned -= 1
                insort(in_progress, end + ticks.generate + ticks.score)
        return before._replace(
            now=now, num_unassigned=num_unassigned, num_ready=num_ready, in_progress=tuple(in_progress)
        )

    def assist(self, ticks: Ticks) -> World:
        assert self.num_unassigned, "nothing is unassigned"
        end = self.now + (0 if self.is_switched else ticks.switch) + ticks.assist + ticks.score
        made = self.reach(end, ticks, num_unassigned=self.num_unassigned - 1, is_switched=True)
        return made._replace(num_ready=made.num_ready + 1)

    def update(self, ticks: Ticks) -> World:
        assert self.num_ready, "nothing is ready"
        end = self.now + (ticks.switch if self.is_switched else 0) + ticks.update
        return self.reach(end, ticks, num_ready=self.num_ready - 1, is_switched=False)

    def wait(self, ticks: Ticks) -> World:
        """Be in training state when the next micro-batch is ready."""
        switched_back = self.now + (ticks.switch if self.is_switched else 0)
        return self.reach(max(self.in_progress[0], switched_back), ticks, is_switched=False)

    def perform(self, kind: TrainerTask, ticks: Ticks) -> World:
        return {"assist": self.assist, "update": self.update, "wait": self.wait}[kind](ticks)

    def state(self, unit: float = 1) -> AssistState:
        remaining = tuple((end - self.now) * unit for end in self.in_progress)
        return AssistState(self.num_unassigned, self.num_ready, remaining, is_switched=self.is_switched)


Choices = Callable[[World, Ticks], Iterator[World]]


def any_task(world: World, ticks: Ticks) -> Iterator[World]:
    """Whatever a trainer can do; a start between two events can be moved to the earlier one."""
    if world.num_unassigned:
        yield world.assist(ticks)
    if world.num_ready:
        yield world.update(ticks)
    if world.in_progress:
        yield world.reach(world.in_progress[0], ticks)
    if ticks.switch and not world.has_just_switched:
        end = world.now + ticks.switch
        yield world.reach(end, ticks, is_switched=not world.is_switched, has_just_switched=True)


def any_task_at_any_tick(world: World, ticks: Ticks) -> Iterator[World]:
    if world.num_unassigned:
        yield world.assist(ticks)
    if world.num_ready:
        yield world.update(ticks)
    if world.in_progress:
        yield world.reach(world.now + 1, ticks)


def skip_or_insert_at_bubbles(world: World, ticks: Ticks) -> Iterator[World]:
    """A bubble: the trainer is idle, nothing is ready, and generation is unfinished."""
    if world.num_ready:
        yield world.update(ticks)
        return
    if world.num_unassigned:
        yield world.assist(ticks)
    yield world.wait(ticks)


def brute_force(world: World, ticks: Ticks, choices: Choices) -> int:
    """Least makespan over all schedules made of these choices."""
    known: dict[World, int] = {}

    def search(world: World) -> int:
        if world.is_finished:
            return world.now
        if world not in known:
            known[world] = min(search(following) for following in choices(world, ticks))
        return known[world]

    return search(world)


def random_ticks(rng: random.Random, *, extras: bool = False) -> Ticks:
    longest = rng.choice([3, 12, 40])
    generate, assist, update = rng.randint(1, longest), rng.randint(0, longest), rng.randint(0, longest)
    if not extras:
        return Ticks(generate, assist, update)
    return Ticks(generate, assist, update, score=rng.randint(0, 4), switch=rng.randint(0, 4))


def random_starts(seed: int, count: int, *, extras: bool = False, largest: int = 9) -> Iterator[tuple[int, Ticks]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randint(1, largest), random_ticks(rng, extras=extras)


def random_moments(seed: int, count: int) -> Iterator[tuple[World, Ticks]]:
    """Moments in the middle of a step, with none to three generator groups at work."""
    rng = random.Random(seed)
    for _ in range(count):
        ticks = random_ticks(rng, extras=rng.random() < 0.5)
        longest = rng.choice([1, 2, 4]) * ticks.generate
        in_progress = tuple(sorted(rng.randint(0, longest) for _ in range(rng.randint(0, 3))))
        num_unassigned = rng.randint(0, 5) if in_progress else 0
        yield World(0, num_unassigned, rng.randint(0, 3), in_progress, rng.random() < 0.3), ticks


def plan(num_micro_batches: int, ticks: Ticks, method: str, unit: float = 1) -> AssistPlan:
    return plan_assist(num_micro_batches, method=method, **ticks.seconds(unit))


def close_to(ticks: int, unit: float) -> Any:
    """Times within what sums of floats lose, and within nothing if they are whole."""
    return ticks if unit == 1 else pytest.approx(ticks * unit, rel=1e-12, abs=1e-9)


def test_optimal_equals_brute_force_over_all_schedules() -> None:
    for num_micro_batches, ticks in random_starts(1, 2000):
        least = brute_force(World.start(num_micro_batches, ticks), ticks, any_task)
        for unit in UNITS:
            assert plan(num_micro_batches, ticks, "optimal", unit).makespan_s == close_to(least, unit), (
                num_micro_batches,
                ticks,
            )


def test_search_equals_brute_force_over_bubble_decisions() -> None:
    for num_micro_batches, ticks in random_starts(2, 2000):
        least = brute_force(World.start(num_micro_batches, ticks), ticks, skip_or_insert_at_bubbles)
        for unit in UNITS:
            assert plan(num_micro_batches, ticks, "search", unit).makespan_s == close_to(least, unit), (
                num_micro_batches,
                ticks,
            )


@pytest.mark.parametrize(("method", "choices"), [("optimal", any_task), ("search", skip_or_insert_at_bubbles)])
def test_scoring_and_switching_are_exact(method: str, choices: Choices) -> None:
    for num_micro_batches, ticks in random_starts(3, 500, extras=True, largest=7):
        least = brute_force(World.start(num_micro_batches, ticks), ticks, choices)
        for unit in UNITS:
            makespan_s = plan(num_micro_batches, ticks, method, unit).makespan_s
            assert makespan_s == close_to(least, unit), (num_micro_batches, ticks)


@pytest.mark.parametrize(("method", "choices"), [("optimal", any_task), ("search", skip_or_insert_at_bubbles)])
def test_plans_from_any_moment_equal_brute_force(method: str, choices: Choices) -> None:
    for moment, ticks in random_moments(4, 800):
        least = brute_force(moment.reach(0, ticks), ticks, choices)
        for unit in UNITS:
            makespan_s = plan_remaining(moment.state(unit), method=method, **ticks.seconds(unit)).makespan_s
            assert makespan_s == close_to(least, unit), (moment, ticks)


def test_waiting_for_any_time_gains_nothing() -> None:
    rng = random.Random(5)
    for _ in range(150):
        num_micro_batches = rng.randint(1, 5)
        ticks = Ticks(rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 4))
        least = brute_force(World.start(num_micro_batches, ticks), ticks, any_task_at_any_tick)
        assert plan(num_micro_batches, ticks, "optimal").makespan_s == least, (num_micro_batches, ticks)


def test_no_planner_loses_to_a_more_restricted_one() -> None:
    for num_micro_batches, ticks in random_starts(6, 400, extras=True, largest=48):
        off, one, three, search, optimal = (plan(num_micro_batches, ticks, method).makespan_s for method in METHODS)
        assert optimal <= search <= off, (num_micro_batches, ticks)
        assert optimal <= min(one, three), (num_micro_batches, ticks)


@pytest.mark.parametrize(
    ("num_micro_batches", "ticks", "optimal", "search"),
    [(5, Ticks(10, 1, 3), 19, 23), (7, Ticks(10, 1, 1), 13, 21), (9, Ticks(100, 14, 1), 121, 201)],
)
def test_optimal_is_strictly_better_where_assistance_is_fast(
    num_micro_batches: int, ticks: Ticks, optimal: int, search: int
) -> None:
    assert plan(num_micro_batches, ticks, "optimal").makespan_s == optimal
    assert plan(num_micro_batches, ticks, "search").makespan_s == search


def closed_form(num_micro_batches: int, num_assisted: int, ticks: Ticks) -> int:
    """Makespan of so many assists at once and then updates; the trainer waits for arrivals from the first late one."""
    num_generated = num_micro_batches - num_assisted
    first_late = num_assisted * ticks.assist // ticks.generate + 1
    terms = [num_assisted * ticks.assist + num_micro_batches * ticks.update]
    if num_generated > 0 and first_late <= num_generated:
        terms.append(num_generated * ticks.generate + ticks.update)
        terms.append(first_late * ticks.generate + (num_generated - first_late + 1) * ticks.update)
    return max(terms)


def most_feasible(num_micro_batches: int, ticks: Ticks) -> int:
    """Assists that find a micro-batch unassigned when taken at once."""
    for index in range(num_micro_batches):
        started = index * ticks.assist // ticks.generate + 1
        if not min(num_micro_batches - index, started) + index < num_micro_batches:
            return index
    return num_micro_batches


def test_static_and_off_have_the_closed_form() -> None:
    for num_micro_batches, ticks in random_starts(7, 300, largest=40):
        most = most_feasible(num_micro_batches, ticks)
        for wanted in (0, 1, 2, most, most + 1, 100):
            made = plan(num_micro_batches, ticks, f"static:{wanted}")
            assert made.num_assisted == min(wanted, most), (num_micro_batches, ticks, wanted)
            assert made.makespan_s == closed_form(num_micro_batches, made.num_assisted, ticks)
        off = plan(num_micro_batches, ticks, "off")
        assert (off.num_assisted, off.makespan_s) == (0, closed_form(num_micro_batches, 0, ticks))


def test_optimal_is_the_fewest_assists_with_the_least_closed_form() -> None:
    for num_micro_batches, ticks in random_starts(8, 1000, largest=60):
        counts = range(most_feasible(num_micro_batches, ticks) + 1)
        best = min(counts, key=lambda count: closed_form(num_micro_batches, count, ticks))
        made = plan(num_micro_batches, ticks, "optimal")
        assert (made.num_assisted, made.makespan_s) == (best, closed_form(num_micro_batches, best, ticks)), (
            num_micro_batches,
            ticks,
        )


def test_closed_form_needs_no_floor() -> None:
    for num_micro_batches, ticks in random_starts(9, 300, largest=30):
        for num_assisted in range(num_micro_batches):
            num_generated = num_micro_batches - num_assisted
            assert closed_form(num_micro_batches, num_assisted, ticks) == max(
                num_assisted * ticks.assist + num_micro_batches * ticks.update,
                num_generated * ticks.generate + ticks.update,
                ticks.generate + num_generated * ticks.update,
            )


def test_exact_multiples_as_floats_are_ties_that_generators_win() -> None:
    assert math.floor(0.3 / 0.1) == 2, "a plain floor would let the trainer take a micro-batch that is gone"
    # The generators take the fourth micro-batch at 0.3, when the first assist ends, so that none of five is left.
    assert plan_assist(5, generate_s=0.1, assist_s=0.3, update_s=0.0, method="static:2").num_assisted == 1
    assert plan_assist(5, generate_s=0.1, assist_s=0.2999, update_s=0.0, method="static:2").num_assisted == 2
    for count in range(2, 400):
        made = plan_assist(count + 2, generate_s=0.1, assist_s=count * 0.1, update_s=0.0, method="static:2")
        assert made.num_assisted == 1, count
        sooner = plan_assist(count + 2, generate_s=0.1, assist_s=count * 0.1 - 1e-6, update_s=0.0, method="static:2")
        assert sooner.num_assisted == 2, count


def test_a_micro_batch_is_taken_before_the_switch() -> None:
    costs = {"generate_s": 10.0, "assist_s": 10.0, "update_s": 1.0, "switch_s": 25.0}
    made = plan_assist(3, method="static:2", **costs)  # the other two are the generators', long before 25 s
    assert [(task.kind, task.start_s, task.end_s) for task in made.actions] == [
        ("assist", 0.0, 35.0),
        ("update", 35.0, 61.0),
        ("update", 61.0, 62.0),
        ("update", 62.0, 63.0),
    ]
    switched = AssistState(num_unassigned=2, num_ready=0, in_progress_s=(10.0,), is_switched=True)
    assert plan_remaining(switched, method="static:1", **costs).makespan_s == 10.0 + 25.0 + 3 * 1.0
    assert plan_remaining(switched, method="off", **costs).actions[0].end_s == 25.0, "it switches back as it waits"


def replay(made: AssistPlan, world: World, ticks: Ticks, unit: float) -> World:
    world = world.reach(world.now, ticks)
    for task in made.actions:
        assert task.start_s == close_to(world.now, unit)
        world = world.perform(task.kind, ticks)
        assert task.end_s == close_to(world.now, unit)
    return world


@pytest.mark.parametrize("method", METHODS)
def test_actions_replay_to_the_makespan(method: str) -> None:
    starts = [(World.start(count, ticks), ticks) for count, ticks in random_starts(10, 200, extras=True, largest=30)]
    for (world, ticks), unit in itertools.product([*starts, *random_moments(11, 400)], UNITS):
        made = plan_remaining(world.state(unit), method=method, **ticks.seconds(unit))
        end = replay(made, world, ticks, unit)
        assert end.is_finished
        assert made.makespan_s == close_to(end.now, unit)
        assert made.num_assisted == sum(task.kind == "assist" for task in made.actions)


def test_search_assists_only_at_bubbles() -> None:
    for moment, ticks in random_moments(12, 400):
        world = moment.reach(0, ticks)
        for task in plan_remaining(moment.state(), method="search", **ticks.seconds(1)).actions:
            assert task.kind == "update" or not world.num_ready, (moment, ticks)
            world = world.perform(task.kind, ticks)


@pytest.mark.parametrize("method", ["off", "search", "optimal"])
def test_planning_anew_at_every_decision_keeps_the_makespan(method: str) -> None:
    for moment, ticks in random_moments(13, 250):
        planned_s = plan_remaining(moment.state(), method=method, **ticks.seconds(1)).makespan_s
        world = moment.reach(0, ticks)
        while not world.is_finished:
            task = plan_remaining(world.state(), method=method, **ticks.seconds(1)).actions[0]
            world = world.perform(task.kind, ticks)
        assert world.now == planned_s, (moment, ticks)


def test_static_counts_what_was_assisted_before() -> None:
    state = AssistState(num_unassigned=6, num_ready=0, in_progress_s=(10.0,), num_assisted=2)
    costs = {"generate_s": 10.0, "assist_s": 1.0, "update_s": 1.0}
    assert plan_remaining(state, method="static:3", **costs).num_assisted == 1
    assert plan_remaining(replace(state, num_assisted=4), method="static:3", **costs).num_assisted == 0


@pytest.mark.parametrize("method", METHODS)
def test_next_task_is_the_first_action(method: str) -> None:
    for moment, ticks in random_moments(14, 400):
        actions = plan_remaining(moment.state(), method=method, **ticks.seconds(1)).actions
        is_due = 0 in moment.in_progress and not moment.num_ready
        first = actions[0].kind if actions else None
        expected = "wait" if is_due and first == "update" else first
        assert next_task(moment.state(), method=method, **ticks.seconds(1)) == expected, (moment, ticks)


@pytest.mark.parametrize("update_s", [0.1, 0.13, 0.2, 0.5])
def test_search_explores_few_states(update_s: float) -> None:
    rng = random.Random(15)
    for assist_s in [0.05, 0.1, 0.5, 1.0, 2.0, *(10 ** rng.uniform(-2.5, 0.5) for _ in range(50))]:
        made = plan_assist(128, generate_s=1.0, assist_s=assist_s, update_s=update_s, method="search")
        # At most 189 in 79,000 trials with random costs; 7,367 without the bound, half a million without the memo.
        assert 0 < made.num_states <= 210, assist_s


@pytest.mark.parametrize("num_micro_batches", [8, 128, 4096])
def test_optimal_evaluates_few_counts(num_micro_batches: int) -> None:
    for assist_s, update_s in itertools.product([0.1, 0.5, 1.0, 3.0], [0.01, 0.1, 0.5, 1.5]):
        made = plan_assist(num_micro_batches, generate_s=1.0, assist_s=assist_s, update_s=update_s)
        assert 0 < made.num_states <= 2 * math.log2(num_micro_batches) + 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_micro_batches": 0}, "`num_micro_batches` .* must be at least 1, got 0; "),
        ({"num_micro_batches": 2.5}, "`num_micro_batches` .* must be at least 1, got 2.5; "),
        ({"generate_s": 0}, "`generate_s` .* must be above 0 and finite, got 0; "),
        ({"generate_s": "fast"}, "`generate_s` .* must be above 0 and finite, got 'fast'; "),
        ({"assist_s": -1.0}, "`assist_s` .* must be at least 0 and finite, got -1.0; "),
        ({"update_s": math.nan}, "`update_s` .* must be at least 0 and finite, got nan; "),
        ({"score_s": math.inf}, "`score_s` .* must be at least 0 and finite, got inf; "),
        ({"switch_s": -0.5}, "`switch_s` .* must be at least 0 and finite, got -0.5; "),
        ({"method": "optimum"}, "`method` must be one of off, static:K, search, optimal, got 'optimum'; .* `optimal`"),
        ({"method": "Search"}, "got 'Search'; did you mean `search`"),
        ({"method": "statik:2"}, "got 'statik:2'; did you mean `static:K`"),
        ({"method": "greedy"}, "`method` must be one of off, static:K, search, optimal, got 'greedy'."),
        ({"method": "static"}, "`method` static:K takes a count K .* at least 0, got 'static'; write `static:2`"),
        ({"method": "static:-1"}, "at least 0, got 'static:-1'; write `static:2`"),
        ({"method": False}, "got False; write `off` in quotes"),
    ],
)
def test_what_is_out_of_bounds_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    arguments = {"num_micro_batches": 4, "generate_s": 1.0, "assist_s": 1.0, "update_s": 1.0, **changes}
    with pytest.raises(ValueError, match=message) as caught:
        plan_assist(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_unassigned": -1}, "`num_unassigned` .* at least 0, got -1"),
        ({"num_ready": 1.5}, "`num_ready` .* at least 0, got 1.5"),
        ({"num_assisted": -2}, "`num_assisted` .* at least 0, got -2"),
        ({"in_progress_s": (1.0, -0.1)}, "`in_progress_s` .* at least 0 and finite, got -0.1"),
        ({"in_progress_s": ()}, "`in_progress_s` must have at least 1 entry while .* got \\(\\)"),
    ],
)
def test_impossible_states_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"num_unassigned": 2, "num_ready": 0, "in_progress_s": (1.0,), **changes}
    with pytest.raises(ValueError, match=message):
        AssistState(**fields)


def test_a_method_is_checked_even_when_nothing_is_left() -> None:
    state = AssistState(num_unassigned=0, num_ready=0, in_progress_s=())
    costs = {"generate_s": 1.0, "assist_s": 1.0, "update_s": 1.0}
    assert plan_remaining(state, **costs) == AssistPlan(0.0, 0, (), num_states=1)
    assert next_task(state, **costs) is None
    for function in (plan_remaining, next_task):
        with pytest.raises(ValueError, match="`method`"):
            function(state, method="none", **costs)


def test_methods_are_checked_under_the_name_of_the_option() -> None:
    for method in METHODS:
        check_assist_method(method)
    with pytest.raises(ValueError, match="^`trainer_assist` must be one of .* did you mean `optimal`"):
        check_assist_method("optimale", name="trainer_assist")
