"""Planners of trainer-assisted generation: how many micro-batches trainers make before they go on training.

Model, closed form and proof: docs/design/assist.md. The mechanism (TAG) and the bubble-triggered search are those of
DigenRL (arXiv:2606.24369).
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

TrainerTask = Literal["assist", "update", "wait"]

ASSIST_METHODS = ("off", "static:K", "search", "optimal")
"""Planners by name; K is a count of micro-batches."""

_TIE = 1e-9
"""Times closer than this fraction of a micro-batch's generation count as one time: a sum of floats may miss an exact
multiple (0.3 / 0.1 < 3) by more than one rounding, while no duration is measured as exactly."""


@dataclass(frozen=True)
class PlannedTask:
    """What the trainer does over a span of time.

    An `assist` ends when its micro-batch is made and scored. A switch of the trainer belongs to the task that needs it
    and stands at its start: to generation in an `assist`, back to training in an `update` or in a `wait`. A `wait`
    ends with the next micro-batch that generators have ready.
    """

    kind: TrainerTask
    start_s: float
    """Seconds since the moment for which the plan was made."""
    end_s: float
    """Seconds since the moment for which the plan was made."""


@dataclass(frozen=True)
class AssistPlan:
    """What the trainer does until the step's last update."""

    makespan_s: float
    """Seconds until the end of the last update."""
    num_assisted: int
    """Micro-batches that the trainer makes in this plan, without those made before it."""
    actions: tuple[PlannedTask, ...]
    """The trainer's tasks without gaps; the last one ends at `makespan_s`."""
    num_states: int
    """Candidates that the planner evaluated: counts of assisted micro-batches (`optimal`) or bubbles (`search`)."""


@dataclass(frozen=True)
class AssistState:
    """Where a step stands at a moment at which the trainer is free.

    Invariant: generators never idle while work is unassigned, so that micro-batches can be unassigned only while others
    are in progress. A generator group that is not ready yet, such as one that loads weights, counts as being at work on
    the micro-batch that it will take first.
    """

    num_unassigned: int
    """Micro-batches that neither a generator group nor the trainer has taken."""
    num_ready: int
    """Micro-batches made and scored that wait for their update."""
    in_progress_s: tuple[float, ...]
    """For each generator group at work: seconds until its micro-batch is made and scored, and the group free."""
    num_assisted: int = 0
    """Micro-batches that the trainer has made in this step so far; only `static:K` looks at it."""
    is_switched: bool = False
    """Whether the trainer is in generation state, and must switch back before an update."""

    def __post_init__(self) -> None:
        _check_count("num_unassigned", self.num_unassigned, least=0, meaning="micro-batches that no worker has taken")
        _check_count("num_ready", self.num_ready, least=0, meaning="micro-batches that wait for their update")
        _check_count("num_assisted", self.num_assisted, least=0, meaning="micro-batches that the trainer has made")
        for remaining_s in self.in_progress_s:
            _check_seconds("in_progress_s", remaining_s, meaning="remaining time of a micro-batch in progress")
        if self.num_unassigned and not self.in_progress_s:
            raise ValueError(
                f"`in_progress_s` must have at least 1 entry while micro-batches are unassigned, got () with "
                f"`num_unassigned` {self.num_unassigned}; let each free generator group take one first."
            )


def plan_assist(
    num_micro_batches: int,
    *,
    generate_s: float,
    assist_s: float,
    update_s: float,
    score_s: float = 0.0,
    switch_s: float = 0.0,
    method: str = "optimal",
) -> AssistPlan:
    """Plan a whole step: which micro-batches the trainer makes itself, and when (TAG of DigenRL, arXiv:2606.24369).

    Model: identical micro-batches; the generator group makes them one after another and takes the next unassigned one
    as soon as it is free; the trainer does one task at a time, without preemption. A micro-batch is taken when the task
    of its maker starts, and at a tie the generator group takes first, so the trainer may start assisted micro-batch j
    (counted from 0) at time t only if min(B - j, floor(t / g) + 1) + j < B, with g = generate_s + score_s.

    Methods:
        `off`: the trainer only updates.
        `static:K`: it makes K micro-batches at once, or as many as it gets, and then updates.
        `search`: skip or insert at every bubble, a moment at which the trainer is idle, no micro-batch is ready and
            generation is unfinished; the best of all such schedules (bubble-triggered search, algorithm 2 of DigenRL).
        `optimal`: the best of all schedules (proof in docs/design/assist.md).

    Example:
        >>> plan = plan_assist(5, generate_s=10, assist_s=1, update_s=3)
        >>> plan.num_assisted, plan.makespan_s
        (4, 19.0)
        >>> [task.kind for task in plan.actions]
        ['assist', 'assist', 'assist', 'assist', 'update', 'update', 'update', 'update', 'update']
        >>> plan_assist(5, generate_s=10, assist_s=1, update_s=3, method="search").makespan_s
        23.0

    Args:
        num_micro_batches: micro-batches of the step.
        generate_s: seconds in which the generator group makes one micro-batch.
        assist_s: seconds in which the trainer makes one.
        update_s: seconds in which the trainer trains one.
        score_s: seconds to score one, paid by its maker: by the generator group before it makes the next, by the
            trainer right after its assist. 0 where rewards have workers of their own.
        switch_s: seconds that the trainer needs to switch from training to generation, and again to switch back: a
            contiguous block of assists costs 2 * switch_s. The step starts in training state, at no cost. The block's
            first micro-batch is taken before the switch.
        method: one of `ASSIST_METHODS`.

    Raises:
        ValueError: a count, a time or the method is out of its bounds.
    """
    _check_count("num_micro_batches", num_micro_batches, least=1, meaning="micro-batches of a step")
    _check_costs(generate_s, assist_s, update_s, score_s, switch_s)
    return plan_remaining(
        # The generator group takes the first micro-batch before anyone else can.
        AssistState(num_unassigned=num_micro_batches - 1, num_ready=0, in_progress_s=(generate_s + score_s,)),
        generate_s=generate_s,
        assist_s=assist_s,
        update_s=update_s,
        score_s=score_s,
        switch_s=switch_s,
        method=method,
    )


def plan_remaining(
    state: AssistState,
    *,
    generate_s: float,
    assist_s: float,
    update_s: float,
    score_s: float = 0.0,
    switch_s: float = 0.0,
    method: str = "optimal",
) -> AssistPlan:
    """Plan the rest of a step from a moment at which the trainer is free; times as in `plan_assist`.

    Several generator groups take micro-batches in the order in which they become free, each `generate_s` long.
    `optimal` is exact here too: it takes the best number of assisted micro-batches now, and then updates.

    Raises:
        ValueError: a time or the method is out of its bounds.
    """
    _check_costs(generate_s, assist_s, update_s, score_s, switch_s)
    model = _Model(state, generate_s + score_s, assist_s + score_s, update_s, switch_s)
    decisions = _decide(model, method)
    actions = _carry_out(model, decisions.num_assisted_after)
    makespan_s = actions[-1].end_s if actions else 0.0
    expected_s = decisions.makespan_s
    assert math.isclose(makespan_s, expected_s, rel_tol=1e-6, abs_tol=1e-6 * generate_s), (state, method, expected_s)
    return AssistPlan(
        makespan_s=makespan_s,
        num_assisted=sum(decisions.num_assisted_after.values()),
        actions=actions,
        num_states=decisions.num_states,
    )


def next_task(
    state: AssistState,
    *,
    generate_s: float,
    assist_s: float,
    update_s: float,
    score_s: float = 0.0,
    switch_s: float = 0.0,
    method: str = "optimal",
) -> TrainerTask | None:
    """Say what the trainer should do now; None when nothing is left to update.

    The first action of `plan_remaining`, without its list of all actions: with `optimal` and one generator group it
    costs O(log B), so that a scheduler can ask at every decision. It is `wait` for as long as no micro-batch is ready,
    even if one is due at this very moment.

    Raises:
        ValueError: a time or the method is out of its bounds.
    """
    _check_costs(generate_s, assist_s, update_s, score_s, switch_s)
    model = _Model(state, generate_s + score_s, assist_s + score_s, update_s, switch_s)
    if model.num_updates == 0:
        check_assist_method(method)
        return None
    if _decide(model, method).num_assisted_after.get(0, 0):
        return "assist"
    return "update" if state.num_ready else "wait"


def check_assist_method(method: str, *, name: str = "method") -> None:
    """Refuse what is not one of `ASSIST_METHODS`.

    Args:
        method: what the user gave.
        name: the option's name in the message.

    Raises:
        ValueError: there is no such planner.
    """
    if not isinstance(method, str):
        remedy = "; write `off` in quotes" if method is False else ""  # YAML reads a bare off as false
        raise ValueError(f"`{name}` must be one of {', '.join(ASSIST_METHODS)}, got {method!r}{remedy}.")
    head, _, count = method.partition(":")
    if head == "static" and not count.isdecimal():
        raise ValueError(
            f"`{name}` static:K takes a count K of micro-batches of at least 0, got {method!r}; write `static:2` to "
            f"assist with two."
        )
    if head != "static" and method not in ASSIST_METHODS:
        close = difflib.get_close_matches(method.lower(), ASSIST_METHODS, n=1)
        remedy = f"; did you mean `{close[0]}`?" if close else "."
        raise ValueError(f"`{name}` must be one of {', '.join(ASSIST_METHODS)}, got {method!r}{remedy}")


class _Model:
    """A state and its costs, with scoring counted into the time of the maker.

    What generators do does not depend on what the trainer does, but for the number of micro-batches left to them: with
    n of the unassigned ones they take those that they would take first anyway, at the same times.
    """

    def __init__(
        self, state: AssistState, generate_s: float, assist_s: float, update_s: float, switch_s: float
    ) -> None:
        self.state = state
        self.generate_s = generate_s
        self.assist_s = assist_s
        self.update_s = update_s
        self.switch_s = switch_s
        self.tie_s = _TIE * generate_s
        self.num_unassigned = state.num_unassigned
        self.in_progress_s = sorted(state.in_progress_s)
        self.num_updates = state.num_ready + len(self.in_progress_s) + state.num_unassigned
        self._several_claims_s: list[float] = []
        if len(self.in_progress_s) > 1:
            claims = heapq.merge(*(_progression(first_s, generate_s) for first_s in self.in_progress_s))
            self._several_claims_s = list(itertools.islice(claims, self.num_unassigned))

    def claim_s(self, index: int) -> float:
        """When generators take the unassigned micro-batch `index`, if it is left to them."""
        if self._several_claims_s:
            return self._several_claims_s[index]
        return self.in_progress_s[0] + index * self.generate_s

    def arrivals_s(self, num_generated: int) -> list[float]:
        """When generators have micro-batches ready, sorted, if `num_generated` unassigned ones are left to them."""
        made = [self.claim_s(index) + self.generate_s for index in range(num_generated)]
        return sorted([*self.in_progress_s, *made])

    def can_assist(self, num_assisted: int, start_s: float) -> bool:
        """Whether one is unassigned at `start_s`, `num_assisted` having gone to the trainer: generators take first."""
        left = self.num_unassigned - num_assisted
        return left > 0 and self.claim_s(left - 1) > start_s + self.tie_s

    def assist_start_s(self, index: int) -> float:
        """When assisted micro-batch `index` starts if all are taken at once."""
        return self._switch_in_s + index * self.assist_s if index else 0.0

    def trainer_bound_s(self, num_assisted: int) -> float:
        """End of the last update if the trainer takes all assists at once and never waits."""
        if self.num_updates == 0:
            return 0.0
        is_switched = num_assisted > 0 or self.state.is_switched
        switches_s = (self._switch_in_s if num_assisted else 0.0) + (self.switch_s if is_switched else 0.0)
        return switches_s + num_assisted * self.assist_s + self.num_updates * self.update_s

    def generator_bound_s(self, num_assisted: int) -> float:
        """End of the last update if updates wait for nothing but generators: from any arrival on, one by one."""
        num_generated = self.num_unassigned - num_assisted
        if len(self.in_progress_s) == 1:  # evenly spaced arrivals: the first or the last one decides
            first_s = self.in_progress_s[0]
            last_s = first_s + num_generated * self.generate_s
            return max(first_s + (num_generated + 1) * self.update_s, last_s + self.update_s)
        arrivals_s = self.arrivals_s(num_generated)
        count = len(arrivals_s)
        return max((at_s + (count - index) * self.update_s for index, at_s in enumerate(arrivals_s)), default=0.0)

    def makespan_s(self, num_assisted: int) -> float:
        """End of the last update if the trainer takes all assists at once and then updates."""
        return max(self.trainer_bound_s(num_assisted), self.generator_bound_s(num_assisted))

    @property
    def _switch_in_s(self) -> float:
        return 0.0 if self.state.is_switched else self.switch_s


def _progression(first_s: float, step_s: float) -> Iterator[float]:
    return (first_s + index * step_s for index in itertools.count())


@dataclass(frozen=True)
class _Decisions:
    num_assisted_after: Mapping[int, int]
    """By the number of updates done: how many micro-batches the trainer makes before the next update."""
    makespan_s: float
    num_states: int


def _decide(model: _Model, method: str) -> _Decisions:
    check_assist_method(method)
    if method == "optimal":
        return _choose_count(model)
    if method == "search" and model.num_unassigned:
        return _BubbleSearch(model).run()
    wanted = int(method.removeprefix("static:")) - model.state.num_assisted if method.startswith("static:") else 0
    num_assisted = max(0, min(wanted, _most_at_once(model)))
    return _Decisions({0: num_assisted}, model.makespan_s(num_assisted), num_states=1)


def _most_at_once(model: _Model) -> int:
    """Count the micro-batches that the trainer can take at once; each one starts later, so the first no is final."""
    return bisect_left(
        range(model.num_unassigned), True, key=lambda index: not model.can_assist(index, model.assist_start_s(index))
    )


def _choose_count(model: _Model) -> _Decisions:
    """Find the fewest assists at once with the least makespan, the larger of two bounds.

    The trainer's bound grows with the count and the generators' bound falls, so the best is where they cross, and a
    bisection finds it.
    """
    evaluated = set[int]()

    def first(counts: range, is_reached: Callable[[int], bool]) -> int:
        def key(num_assisted: int) -> bool:
            evaluated.add(num_assisted)
            return is_reached(num_assisted)

        return bisect_left(counts, True, key=key)

    counts = range(_most_at_once(model) + 1)
    crossing = first(counts, lambda count: model.trainer_bound_s(count) >= model.generator_bound_s(count))
    best_s = min(model.makespan_s(count) for count in (crossing - 1, crossing) if count in counts)
    fewest = first(range(crossing), lambda count: model.generator_bound_s(count) <= best_s + model.tie_s)
    return _Decisions({0: fewest}, model.makespan_s(fewest), num_states=len(evaluated))


def _carry_out(model: _Model, num_assisted_after: Mapping[int, int]) -> tuple[PlannedTask, ...]:
    """List the trainer's tasks: assists where decided, and otherwise updates as soon as a micro-batch is ready."""
    arrivals_s = model.arrivals_s(model.num_unassigned - sum(num_assisted_after.values()))
    tasks: list[PlannedTask] = []
    now_s, is_switched = 0.0, model.state.is_switched
    num_given = model.state.num_ready  # ready at the start or made by the trainer
    for num_updated in range(model.num_updates):
        for _ in range(num_assisted_after.get(num_updated, 0)):
            end_s = now_s + (0.0 if is_switched else model.switch_s) + model.assist_s
            tasks.append(PlannedTask("assist", now_s, end_s))
            now_s, is_switched = end_s, True
            num_given += 1
        if num_updated >= num_given:
            arrival_s = arrivals_s[num_updated - num_given]
            if arrival_s > now_s + model.tie_s:
                end_s = max(arrival_s, now_s + (model.switch_s if is_switched else 0.0))
                tasks.append(PlannedTask("wait", now_s, end_s))
                now_s, is_switched = end_s, False
        end_s = now_s + (model.switch_s if is_switched else 0.0) + model.update_s
        tasks.append(PlannedTask("update", now_s, end_s))
        now_s, is_switched = end_s, False
    return tuple(tasks)


class _Bubble(NamedTuple):
    """The trainer is idle and nothing is ready: the `num_updated` micro-batches that are ready so far are done."""

    clock_s: float
    num_updated: int
    num_assisted: int
    is_switched: bool
    bound_s: float
    """No schedule that goes on from here ends before."""
    path: _Path | None


class _Path(NamedTuple):
    """Decisions that led to a bubble: assists after so many updates, and the decisions before."""

    num_updated: int
    before: _Path | None


class _BubbleSearch:
    """Bubble-triggered search (algorithm 2 of DigenRL, arXiv:2606.24369), depth first and inserting before skipping.

    A bubble's state is compressed to (pending, ready, done, generator and trainer clocks), of which the counts of
    updated and of assisted micro-batches and the trainer's clock say all: nothing is ready at a bubble, and the
    generators' clocks follow. Of two bubbles with equal counts the earlier one is never worse, as it can repeat the
    decisions of the later one; so the memo keeps the earliest clock by count and cuts the rest. A bubble whose bound is
    not below the best makespan so far is cut. An explicit stack takes the place of the recursion, which Python limits.
    """

    def __init__(self, model: _Model) -> None:
        self._model = model
        self._claims_s = [model.claim_s(index) for index in range(model.num_unassigned)]
        # With fewer micro-batches left to generators, their arrivals are the first ones of these, unless one in
        # progress takes longer than a whole new one.
        self._arrivals_s = [model.arrivals_s(model.num_unassigned)]
        if model.in_progress_s[-1] > model.in_progress_s[0] + model.generate_s:
            self._arrivals_s += [model.arrivals_s(left) for left in reversed(range(model.num_unassigned))]
        self._open: list[_Bubble] = []
        self._earliest_s: dict[tuple[int, int], float] = {}
        self._best_s = math.inf
        self._best_path: _Path | None = None

    def run(self) -> _Decisions:
        """Search until no open bubble can lead to a better schedule."""
        num_states = 0
        self._go_on(0.0, 0, 0, self._model.state.is_switched, None)
        while self._open:
            bubble = self._open.pop()
            if self._is_promising(bubble.bound_s):  # a better schedule may have been found since it was opened
                num_states += 1
                self._skip(bubble)
                self._insert(bubble)
        num_assisted_after = {}
        path = self._best_path
        while path is not None:
            num_assisted_after[path.num_updated] = 1
            path = path.before
        return _Decisions(num_assisted_after, self._best_s, num_states)

    def _skip(self, bubble: _Bubble) -> None:
        clock_s, num_updated, num_assisted, is_switched, _, path = bubble
        index = num_updated - num_assisted - self._model.state.num_ready
        arrival_s = self._arrivals(num_assisted)[index]
        clock_s = max(arrival_s, clock_s + (self._model.switch_s if is_switched else 0.0))
        self._go_on(clock_s, num_updated, num_assisted, False, path)

    def _insert(self, bubble: _Bubble) -> None:
        clock_s, num_updated, num_assisted, is_switched, _, path = bubble
        clock_s += (0.0 if is_switched else self._model.switch_s) + self._model.assist_s
        self._go_on(clock_s, num_updated, num_assisted + 1, True, _Path(num_updated, path))

    def _go_on(
        self, clock_s: float, num_updated: int, num_assisted: int, is_switched: bool, path: _Path | None
    ) -> None:
        """Update what is ready, up to the next bubble or to the end of the step."""
        model = self._model
        arrivals_s = self._arrivals(num_assisted)
        num_given = model.state.num_ready + num_assisted
        while num_updated < model.num_updates:
            if num_updated >= num_given and arrivals_s[num_updated - num_given] > clock_s + model.tie_s:
                if model.can_assist(num_assisted, clock_s):
                    self._open_bubble(clock_s, num_updated, num_assisted, is_switched, path)
                    return
                clock_s += model.switch_s if is_switched else 0.0
                clock_s = max(arrivals_s[num_updated - num_given], clock_s)
                is_switched = False
            clock_s += (model.switch_s if is_switched else 0.0) + model.update_s
            is_switched = False
            num_updated += 1
        if self._is_promising(clock_s):
            self._best_s, self._best_path = clock_s, path

    def _open_bubble(
        self, clock_s: float, num_updated: int, num_assisted: int, is_switched: bool, path: _Path | None
    ) -> None:
        counts = num_updated, num_assisted
        if clock_s >= self._earliest_s.get(counts, math.inf):
            return
        self._earliest_s[counts] = clock_s
        bound_s = self._bound_s(clock_s, num_updated, num_assisted)
        if self._is_promising(bound_s):
            self._open.append(_Bubble(clock_s, num_updated, num_assisted, is_switched, bound_s, path))

    def _is_promising(self, makespan_s: float) -> bool:
        return makespan_s < self._best_s - self._model.tie_s

    def _bound_s(self, clock_s: float, num_updated: int, num_assisted: int) -> float:
        """Bound the makespan from below, over the number of assists that still follow.

        Each one costs its time and two switches and is followed by its update before the next one can start, while
        generators go on taking micro-batches. More of them mean more work for the trainer and earlier last arrivals.
        It holds for a trainer in training state, and so at every bubble except perhaps the very first; that one is
        never cut, as no makespan is known yet.
        """
        model = self._model
        arrivals_s = self._arrivals(num_assisted)
        next_index = num_updated - num_assisted - model.state.num_ready
        next_s = arrivals_s[next_index]
        num_left = model.num_unassigned - num_assisted
        each_s = model.assist_s + 2 * model.switch_s
        updates_s = (model.num_updates - num_updated) * model.update_s

        def is_taken(index: int) -> bool:
            return self._claims_s[num_left - 1 - index] <= clock_s + index * (each_s + model.update_s) + model.tie_s

        def trainer_s(count: int) -> float:
            return clock_s + count * each_s + updates_s

        def generators_s(count: int) -> float:
            num_arrivals = len(model.in_progress_s) + num_left - count
            last_s = arrivals_s[num_arrivals - 1]
            return max(next_s + (num_arrivals - next_index) * model.update_s, last_s + model.update_s)

        counts = range(bisect_left(range(num_left), True, key=is_taken) + 1)
        crossing = bisect_left(counts, True, key=lambda count: trainer_s(count) >= generators_s(count))
        bound_s = trainer_s(crossing) if crossing in counts else math.inf
        return min(bound_s, generators_s(crossing - 1)) if crossing else bound_s

    def _arrivals(self, num_assisted: int) -> list[float]:
        return self._arrivals_s[num_assisted if len(self._arrivals_s) > 1 else 0]


def _check_costs(generate_s: float, assist_s: float, update_s: float, score_s: float, switch_s: float) -> None:
    _check_seconds("generate_s", generate_s, meaning="time in which generators make a micro-batch", is_positive=True)
    _check_seconds("assist_s", assist_s, meaning="time in which the trainer makes a micro-batch")
    _check_seconds("update_s", update_s, meaning="time in which the trainer trains a micro-batch")
    _check_seconds("score_s", score_s, meaning="time to score a micro-batch")
    _check_seconds("switch_s", switch_s, meaning="time of a switch of the trainer")


def _check_seconds(name: str, value: float, *, meaning: str, is_positive: bool = False) -> None:
    is_number = isinstance(value, Real) and math.isfinite(value)
    if not is_number or value < 0 or (is_positive and value == 0):
        bound = "above 0" if is_positive else "at least 0"
        raise ValueError(
            f"`{name}` is the {meaning} and must be {bound} and finite, got {value!r}; give seconds, measured or "
            f"estimated."
        )


def _check_count(name: str, value: int, *, least: int, meaning: str) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` counts the {meaning} and must be at least {least}, got {value!r}; give a whole number."
        )
