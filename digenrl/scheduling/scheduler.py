"""The scheduling core: a state machine over ids and seconds. Events go in, actions come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from digenrl.scheduling.assist import AssistState, TrainerTask, next_task
from digenrl.scheduling.durations import Durations
from digenrl.scheduling.events import (
    Action,
    Assist,
    Assisted,
    Event,
    FinishStep,
    Generate,
    Generated,
    LoadWeights,
    Paused,
    Resumed,
    SamplesLost,
    Score,
    Scored,
    StepAdded,
    StepStarted,
    Update,
    Updated,
    WeightsLoaded,
    WeightsPublished,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.policy import SchedulingPolicy
from digenrl.scheduling.step import StepWork
from digenrl.scheduling.work import Slice

_TRAINER = "trainer"  # the group's name in `_started_s`; workers' names are the engine's and differ


class Scheduler:
    """Decides who does what next. Owns no worker, no clock and no thread; a driver or a simulator carries it out.

    Generators: samples that wait for a reward are scored before new ones are made; steps are made in order; new weights
    are loaded between slices, as soon as they are published. A generator makes samples of a step with the weights that
    train it, or, within the policy's staleness bound, with the ones before (TCSS; docs/design/staleness.md); where both
    make the same samples (`StepAdded.shares_rollout`), either will do. Where all reward workers are lost for good,
    generators score.

    Trainers: they work on started steps only, in the order in which micro-batches become whole. Updates come before
    assistance, except where the assist plan says otherwise; the plan is made anew at every decision from the running
    averages of this run's own durations. What trainers make they score themselves, unless the run has reward workers.

    Invariants: each slice is made once and scored once, and each micro-batch updated once, after all its slices were
    scored (what a lost worker was at is begun again, and samples that are lost before they are scored are made again);
    a worker has one task at a time; no generator idles while there is work that it may do; policy versions of a step's
    samples differ from its own by one at most.

    Example:
        >>> from digenrl.scheduling import cut_step
        >>> step = cut_step(0, num_groups=1, group_size=2, groups_per_micro_batch=1, num_generators=1)
        >>> part = step[0].slices[0]
        >>> scheduler = Scheduler(["generator-0"])
        >>> scheduler.observe(StepAdded(step, policy_version=0), time_s=0.0) == [Generate(part, "generator-0")]
        True
        >>> scheduler.observe(StepStarted(0), time_s=0.0)
        []
        >>> scheduler.observe(Generated(part, "generator-0"), time_s=2.0) == [Score(part, "generator-0")]
        True
        >>> scheduler.observe(Scored(part, "generator-0"), time_s=2.5) == [Update(step[0])]
        True
        >>> scheduler.observe(Updated(step[0]), time_s=4.0)
        [FinishStep(step=0, num_stale_samples=0, num_assisted=0)]
    """

    def __init__(
        self,
        generators: Sequence[str],
        *,
        reward_workers: Sequence[str] = (),
        policy: SchedulingPolicy = SchedulingPolicy(),  # noqa: B008 (immutable)
        policy_version: int = 0,
    ) -> None:
        """Start with idle workers; all generators hold weights `policy_version`.

        Args:
            generators: names of the generators.
            reward_workers: names of the workers that score; without any, generators score what they made.
            policy: what may be done to keep workers busy.
            policy_version: of the weights at the start.
        """
        self.durations = Durations()
        """Seconds per sample of `generate`, `score`, `assist` and `update`, per load of `load` and `switch`."""
        self._policy = policy
        self._published_version = policy_version
        self._loaded_version = dict.fromkeys(generators, policy_version)  # or, while it loads, the version to come
        self._idle: dict[int, dict[str, None]] = {policy_version: dict.fromkeys(generators)}  # by loaded version
        self._reward_workers = set(reward_workers)
        self._trainers_score = not reward_workers  # what they make; also when all reward workers are lost
        self._idle_reward_workers = deque(reward_workers)
        self._scorers: dict[Slice, str] = {}
        self._scoring_queue: deque[Slice] = deque()
        self._steps: dict[int, StepWork] = {}  # in order; a finished step is removed
        self._started_step: int | None = None
        self._is_trainer_idle = True
        self._is_switched = False
        self._is_paused = False
        self._now_s = 0.0
        self._making: dict[str, tuple[Slice, float]] = {}  # what each generator makes or scores, and since when
        self._started_s: dict[str, float] = {}  # when each busy worker began its task

    def observe(self, event: Event, time_s: float) -> list[Action]:
        """Take in what happened and say what to start now.

        Args:
            event: what happened.
            time_s: when, in seconds of any clock that does not go back.
        """
        self._now_s = time_s
        actions = self._take_in(event)
        actions += self._assign_reward_workers()
        actions += self._assign_generators()
        actions += self._assign_trainer()
        return actions

    @property
    def is_quiet(self) -> bool:
        """Whether all generators are idle and hold the published weights; `Paused` leads there."""
        return len(self._idle.get(self._published_version, {})) == len(self._loaded_version)

    # ---- taking in -----------------------------------------------------------------------------------------

    def _take_in(self, event: Event) -> list[Action]:
        match event:
            case StepAdded():
                self._add_step(event)
            case StepStarted():
                self._started_step = event.step
            case WeightsPublished():
                self._published_version = event.policy_version
                self._give_up_early()
            case WeightsLoaded():
                self._measure("load", event.generator, event.seconds)
                self._free(event.generator)
            case Generated():
                return self._on_generated(event)
            case Scored():
                self._on_scored(event)
            case SamplesLost():
                self._on_samples_lost(event)
            case Assisted() | Updated():
                self._on_trainer_done(event)
            case WorkerLost():
                self._on_lost(event)
            case WorkerJoined(worker, policy_version):
                if policy_version is None:
                    self._reward_workers.add(worker)
                    self._idle_reward_workers.append(worker)
                else:
                    self._loaded_version[worker] = policy_version
                    self._free(worker)
            case Paused():
                self._is_paused = True
            case Resumed():
                self._is_paused = False
        return []

    def _add_step(self, event: StepAdded) -> None:
        assert event.micro_batches, "a step has at least one micro-batch"
        step = StepWork(event.micro_batches, event.policy_version, shares_rollout=event.shares_rollout)
        assert all(index < step.index for index in self._steps), "steps are added in order"
        assert step.policy_version - self._published_version in (0, 1), "a step is added one version ahead at most"
        self._steps[step.index] = step
        if self._policy.staleness_mode == "exact" and step.policy_version > self._published_version:
            step.demand_early(self._policy.staleness)

    def _on_generated(self, event: Generated) -> list[Action]:
        self._measure("generate", event.generator, event.seconds, len(event.slice))
        if self._reward_workers:
            self._scoring_queue.append(event.slice)
            self._free(event.generator)
            return []
        # Scoring comes before new generation, and the maker has the samples at hand.
        return [self._score(event.slice, event.generator)]

    def _on_scored(self, event: Scored) -> None:
        self._measure("score", event.worker, event.seconds, len(event.slice))
        self._end_scoring(event.slice, event.worker)
        self._steps[event.slice.step].mark_scored(event.slice)

    def _on_samples_lost(self, event: SamplesLost) -> None:
        del self._started_s[event.worker]
        self._end_scoring(event.slice, event.worker)
        self._steps[event.slice.step].lose(event.slice)

    def _end_scoring(self, part: Slice, worker: str) -> None:
        del self._scorers[part]
        if worker in self._reward_workers:
            self._idle_reward_workers.append(worker)
        else:
            self._free(worker)

    def _on_trainer_done(self, event: Assisted | Updated) -> None:
        kind = "assist" if isinstance(event, Assisted) else "update"
        self._measure(kind, _TRAINER, event.seconds, len(event.micro_batch), switch_s=event.switch_s)
        if event.switch_s > 0:
            self.durations.observe("switch", event.switch_s)
        self._is_trainer_idle = True
        self._is_switched = kind == "assist"
        step = self._steps[event.micro_batch.step]
        if kind == "update":
            step.mark_updated(event.micro_batch)
        elif not self._trainers_score:
            self._scoring_queue.extend(event.micro_batch.slices)
        else:
            step.mark_assisted(event.micro_batch)

    def _on_lost(self, event: WorkerLost) -> None:
        worker = event.worker
        self._started_s.pop(worker, None)
        in_hand, _ = self._making.get(worker, (None, 0.0))
        self._end_making(worker)
        if worker in self._loaded_version:
            self._idle.get(self._loaded_version.pop(worker), {}).pop(worker, None)
            if in_hand is not None and in_hand not in self._scorers:
                self._steps[in_hand.step].lose(in_hand)
        elif worker in self._reward_workers:
            self._idle_reward_workers = deque(other for other in self._idle_reward_workers if other != worker)
            if not event.returns:
                self._reward_workers.remove(worker)
        for part in [part for part, scorer in self._scorers.items() if scorer == worker]:
            del self._scorers[part]
            self._scoring_queue.appendleft(part)
        self._give_up_early()

    def _give_up_early(self) -> None:
        """Where losses leave no generator with the weights for them, let early slices be made like all others."""
        for step in self._steps.values():
            version = step.policy_version - 1
            if step.early and version < self._published_version and version not in self._loaded_version.values():
                step.give_up_early()

    def _free(self, generator: str) -> None:
        self._end_making(generator)
        self._idle.setdefault(self._loaded_version[generator], {})[generator] = None

    def _end_making(self, generator: str) -> None:
        if generator in self._making:
            part, begin_s = self._making.pop(generator)
            self._steps[part.step].note_ended(part, begin_s)

    def _measure(
        self, kind: str, worker: str, seconds: float | None, num_units: int = 1, *, switch_s: float = 0.0
    ) -> None:
        since_s = self._started_s.pop(worker)
        total_s = self._now_s - since_s if seconds is None else seconds
        self.durations.observe(kind, max(total_s - switch_s, 0.0), num_units)

    # ---- assigning -----------------------------------------------------------------------------------------

    def _assign_reward_workers(self) -> list[Action]:
        actions: list[Action] = []
        while self._scoring_queue and self._idle_reward_workers:
            actions.append(self._score(self._scoring_queue.popleft(), self._idle_reward_workers.popleft()))
        return actions

    def _score(self, part: Slice, worker: str) -> Score:
        self._scorers[part] = worker
        self._started_s[worker] = self._now_s
        return Score(part, worker)

    def _assign_generators(self) -> list[Action]:
        actions: list[Action] = []
        for version in sorted(self._idle):
            idle = self._idle[version]
            while idle:
                generator = next(iter(idle))
                action = self._next_task(generator, version)
                if action is None:  # nothing for one of them is nothing for the others
                    break
                del idle[generator]
                self._started_s[generator] = self._now_s
                if isinstance(action, Generate):
                    self._making[generator] = (action.slice, self._now_s)
                    self._steps[action.slice.step].note_begun(action.slice, self._now_s)
                elif isinstance(action, LoadWeights):
                    self._loaded_version[generator] = action.policy_version
                actions.append(action)
            if not idle:
                del self._idle[version]
        return actions

    def _next_task(self, generator: str, version: int) -> Generate | Score | LoadWeights | None:
        if self._scoring_queue and not self._reward_workers:  # all were lost, and left this behind
            return self._score(self._scoring_queue.popleft(), generator)
        is_outdated = version < self._published_version
        if self._is_paused and not is_outdated:
            return None
        for step in self._steps.values():
            part = step.peek()
            is_as_good = step.shares_rollout and version == step.policy_version - 1 and not is_outdated
            if part is not None and (version == step.policy_version or is_as_good):
                return Generate(step.take(is_stale=False), generator)
            if step.early and version == step.policy_version - 1:
                return Generate(step.take_early(), generator)
            if part is not None and not is_outdated and self._may_be_stale(step, part):
                return Generate(step.take(is_stale=True), generator)
        return LoadWeights(generator, self._published_version) if is_outdated else None

    def _may_be_stale(self, step: StepWork, part: Slice) -> bool:
        if self._policy.staleness_mode == "exact":
            return False
        return step.num_stale_samples + len(part) <= self._policy.staleness * step.num_samples + 1e-9

    def _assign_trainer(self) -> list[Action]:
        step = self._steps.get(self._started_step) if self._started_step is not None else None
        if step is None or not self._is_trainer_idle or step.policy_version != self._published_version:
            return []
        if step.is_trained:
            del self._steps[step.index]
            return [FinishStep(step.index, step.num_stale_samples, step.num_assisted)]
        task = self._trainer_task(step)
        if task == "wait":
            return []
        self._is_trainer_idle = False
        self._started_s[_TRAINER] = self._now_s
        if task == "assist":
            return [Assist(step.take_micro_batch())]
        return [Update(step.take_update())]

    def _trainer_task(self, step: StepWork) -> TrainerTask:
        method = self._policy.trainer_assist
        otherwise: TrainerTask = "update" if step.update_queue else "wait"
        if method == "off" or not step.unassigned or self._is_paused:
            return otherwise
        if method.startswith("static:"):
            return "assist" if step.num_assisted < int(method.removeprefix("static:")) else otherwise
        size = len(step.unassigned[0])
        generate_s, assist_s, update_s = (self._group_seconds(kind, size) for kind in ("generate", "assist", "update"))
        if assist_s is None:
            # The first bubble is assisted to get a measurement.
            return otherwise if step.update_queue else "assist"
        if not generate_s or update_s is None:  # not measured yet, or too short for the clock
            return otherwise
        num_unassigned, in_progress_s = self._outlook(step, generate_s)
        planned = next_task(
            AssistState(num_unassigned, len(step.update_queue), in_progress_s, step.num_assisted, self._is_switched),
            generate_s=generate_s,
            assist_s=assist_s,
            update_s=update_s,
            switch_s=self.durations.seconds("switch") or 0.0,
            method=method,
        )
        return "assist" if planned == "assist" else otherwise

    def _group_seconds(self, kind: str, num_samples: int) -> float | None:
        """Estimate what a group of workers takes for a micro-batch of `num_samples`."""
        seconds = self.durations.seconds(kind, num_samples)
        if kind != "generate" or seconds is None:
            return seconds
        if not self._reward_workers:
            seconds += self.durations.seconds("score", num_samples) or 0.0
        return seconds / max(len(self._loaded_version), 1)

    def _outlook(self, step: StepWork, generate_s: float) -> tuple[int, tuple[float, ...]]:
        """Say how many micro-batches are unassigned, and when the generators, as one group, are free to take one."""
        num_left = step.num_begun_samples
        if num_left == 0:
            # The generators are loading weights or end another step's work: they are as good as at the next one.
            return len(step.unassigned) - 1, (generate_s,)
        elapsed_s = step.mean_time_in_hand_s(self._now_s)
        return len(step.unassigned), (max(generate_s * num_left / len(step.unassigned[0]) - elapsed_s, 0.0),)
