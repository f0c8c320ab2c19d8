"""The driver's side of a step: it carries out what the scheduler decides, and sees ids, seeds, rewards and times."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from digenrl.engines import Engine, NoRoom, ObjectLost, ObjectRef, Task, WorkerError
from digenrl.metrics import MetricAccumulator
from digenrl.module import DiffusionRLModule, advantages_of_kept
from digenrl.scheduling import (
    Action,
    Assist,
    Assisted,
    Durations,
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
)
from digenrl.strategies.parity import ParityReport
from digenrl.strategies.parity_gate import measure_parity
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.recovery import TRAINERS
from digenrl.strategies.snapshots import UpdateCall
from digenrl.strategies.span import Span
from digenrl.strategies.step_book import StepBook, StepPlan, StepResult, WorkerSpan
from digenrl.strategies.task_loop import TaskLoop, take_nothing
from digenrl.strategies.trainer_group import GroupTask, shares, trajectories_made
from digenrl.strategies.workers import AssistReport, GenerateReport, ScoreReport, TimestepBatchSize, UpdateReport
from digenrl.types import PromptBatch

log = logging.getLogger(__name__)

T = TypeVar("T")


class StepDriver:
    """Runs steps on workers.

    A loop of three lines: hand events to the scheduler, submit the tasks of the actions it returns, wait for
    tasks and turn their reports into events. Trajectories stay where they were made; trainers read them there.

    Workers that die are started again where the run allows it (docs/design/restarts.md): others are served meanwhile,
    the scheduler hands out anew what a lost generator was at, and the trainers do their task once more.
    """

    def __init__(
        self,
        pool: WorkerPool,
        scheduler: Scheduler,
        module: DiffusionRLModule,
        *,
        timestep_batch_size: TimestepBatchSize,
        poll: Callable[[], None],
    ) -> None:
        """Drive the workers of `pool`, which are idle.

        Args:
            pool: of running workers.
            scheduler: decides who does what.
            module: decides advantages; its weights are not touched.
            timestep_batch_size: of all updates.
            poll: called at least every 0.2 s during a wait; may raise to end it.
        """
        self._pool = pool
        self._engine: Engine = pool.engine
        self._recovery = pool.recovery
        self._recovery.observer = self
        self._recovery.timestep_batch_size = timestep_batch_size
        self._scheduler = scheduler
        self._module = module
        self._loop = TaskLoop(
            pool.engine, poll=poll, observe=self._observe, recover=self._recover, end_hung=pool.recovery.end_hung
        )
        self._events: deque[Event] = deque()  # happened already
        self._scored: dict[Slice, ScoreReport] = {}  # scored by their makers, which the scheduler has not asked for yet
        self._group: GroupTask | None = None
        self._restarting: set[str] = set()
        self._steps: dict[int, StepBook] = {}
        self._spans: list[WorkerSpan] = []
        self._is_paused = False
        self._started_step: int | None = None
        self._has_said_barrier = False

    def check_parity(self, prompts: PromptBatch) -> ParityReport:
        """Compare what generators and trainers compute of a few samples, before any step; see `measure_parity`."""
        return self._repeat(lambda: measure_parity(self._pool, prompts, self._loop.gather))

    def add_step(self, plan: StepPlan) -> None:
        """Make a step's work known; generators may begin with it while the step before is trained."""
        waits_for_std = self._module.advantage_settings.need_batch_std and len(plan.micro_batches) > 1
        self._steps[plan.prompts.step] = StepBook(plan, waits_for_std)
        self._observe(StepAdded(plan.micro_batches, plan.policy_version, plan.shares_rollout))

    def has_step(self, step: int) -> bool:
        """Whether a step was added and is not finished."""
        return step in self._steps

    def start_step(self, step: int) -> PromptBatch:
        """Let the trainers begin with a step that was added, if they have not; returns its samples."""
        if self._is_paused:
            self._is_paused = False
            self._observe(Resumed())
        if self._started_step != step:
            self._started_step = step
            self._observe(StepStarted(step))
        return self._steps[step].plan.prompts

    def finish_step(self, step: int) -> StepResult:
        """Generate, score and train the rest of a started step."""
        book = self._steps[step]
        self._loop.run(lambda: book.finish is not None)
        if book.waits_for_std:
            self._apply_batch_std(book)
        self._recovery.journal.keep(book.all_trajectories)
        return self._steps.pop(step).result()

    def announce_weights(self, version: int) -> None:
        """Tell the scheduler that weights were published: generators load them when they are free.

        The trainers keep them for the case that one dies, or what trained them is given up.
        """
        self._observe(WeightsPublished(version))
        for trainer, task in self._recovery.request_snapshot().items():
            self._loop.add(task, partial(self._on_snapshot, trainer, task))
        self._flush()

    def pause(self) -> None:
        """Let generators finish what they make, load the published weights and wait; the next step resumes."""
        if not self._is_paused:
            self._is_paused = True
            self._observe(Paused())
        self._loop.run(lambda: self._scheduler.is_quiet and not self._restarting)

    def close(self) -> None:
        """Pause, and let go of steps that were begun ahead and will not be trained, and of their gradient."""
        self.pause()
        self._loop.run(lambda: self._loop.is_idle)
        if self._started_step in self._steps:
            self._recovery.free(self._recovery.journal.give_up())
            self._repeat(lambda: self._recovery.train_again([], self._loop.gather))
        for book in self._steps.values():
            self._recovery.free(book.all_trajectories)
        self._steps.clear()
        self._flush()
        self._loop.run(lambda: self._loop.is_idle)

    def begin_anew(self, scheduler: Scheduler) -> None:
        """Go on with a new scheduler after `close`; it knows already what tasks take."""
        scheduler.durations = self._scheduler.durations
        self._scheduler, self._started_step, self._is_paused = scheduler, None, False
        self._scored.clear()

    @property
    def durations(self) -> Durations:
        """Running averages of what tasks take, as the scheduler sees them."""
        return self._scheduler.durations

    def take_spans(self) -> tuple[WorkerSpan, ...]:
        """Hand over what workers did since the last call."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def note_span(self, worker: str, task: str, detail: str, span: Span) -> None:
        """Keep what a worker did, by this process's clock."""
        offset_s = self._pool.clock_offset_s(worker)
        self._spans.append(WorkerSpan(worker, task, detail, Span(span.start_s + offset_s, span.end_s + offset_s)))

    # ---- the loop ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer workers that are done, without waiting for any; where this process is at something long."""
        if self._engine.runs_beside_driver:
            self._loop.serve()

    def _repeat(self, call: Callable[[], T]) -> T:
        """Call, and again where workers have died meanwhile."""
        return self._recovery.run(call, self._loop.gather)

    def _observe(self, event: Event) -> None:
        self._events.append(event)
        while self._events:
            for action in self._scheduler.observe(self._events.popleft(), time.monotonic()):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Generate(part, generator):
                book = self._steps[part.step]
                task = self._pool.generate(generator, book.prompts_of(part))
                self._loop.add(task, partial(self._on_generated, part, generator, task, book))
            case Score(part, worker) if part in self._scored:
                self._events.append(self._take_score(part, worker, self._scored.pop(part)))
            case Score(part, worker):
                book = self._steps[part.step]
                task = self._pool.score(worker, book.trajectories[part])
                self._loop.add(task, partial(self._on_scored, part, worker, task, book))
            case LoadWeights(generator, version):
                task = self._pool.load_weights(generator, version)
                self._loop.add(task, partial(self._on_loaded, generator, version, task))
            case Assist() | Update():
                self._group = GroupTask(action)
                self._submit_group()
            case FinishStep():
                self._steps[action.step].finish = action

    def _on_loaded(self, generator: str, version: int, task: Task) -> list[Event]:
        span: Span = task.result()
        self.note_span(generator, "sync", f"version {version}", span)
        return [WeightsLoaded(generator, version, span.seconds)]

    def _on_generated(self, part: Slice, generator: str, task: Task, book: StepBook) -> list[Event]:
        report: GenerateReport = task.result()
        book.trajectories[part] = tuple(self._recovery.adopt(ref) for ref in report.trajectories)
        book.metrics.join(report.metrics)
        self.note_span(generator, "generate", str(part), report.span)
        if report.score is not None:
            self._scored[part] = report.score
        return [Generated(part, generator, report.span.seconds)]

    def _on_scored(self, part: Slice, worker: str, task: Task, book: StepBook) -> list[Event]:
        try:
            report: ScoreReport = task.result()
        except ObjectLost:
            if not self._engine.lost(book.trajectories[part]):
                raise
            self._recovery.note_made_again(1)
            self._recovery.free(book.trajectories.pop(part))
            return [SamplesLost(part, worker)]
        return [self._take_score(part, worker, report)]

    def _take_score(self, part: Slice, worker: str, report: ScoreReport) -> Scored:
        book = self._steps[part.step]
        self._note_rewards(part, report.rewards, book)
        book.metrics.join(report.metrics)
        self.note_span(worker, "score", str(part), report.span)
        return Scored(part, worker, report.span.seconds)

    def _note_rewards(self, part: Slice, rewards: Sequence[Any], book: StepBook) -> None:
        """Keep a slice's rewards; where its micro-batch is whole now, compare them while trainers are busy."""
        book.note_rewards(part, torch.tensor(rewards))
        micro_batch = book.plan.micro_batches[part.micro_batch]
        if book.is_scored(micro_batch):
            compare = self._centered if book.waits_for_std else self._module.advantages
            book.compare(micro_batch, compare, self._module.kept_rows)

    def _centered(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return self._module.advantage_settings.centered(self._module.compared_rewards(rewards), group_ids)

    def _apply_batch_std(self, book: StepBook) -> None:
        """Turn a gradient of centered rewards into that of advantages, which the whole step's std divides.

        Where an advantage would be clipped, the gradient is no multiple of what was accumulated: the step is trained
        again, now that all advantages are known.
        """
        group_ids, is_kept = torch.tensor(book.plan.prompts.group_ids), book.is_kept
        advantages = advantages_of_kept(book.rewards, is_kept, group_ids, self._module.advantages)
        book.advantages = advantages.to(torch.float32)
        if not is_kept.any():
            return
        compared = self._module.compared_rewards(book.rewards[is_kept])
        scale = self._module.advantage_settings.gradient_scale(compared, group_ids[is_kept])
        if scale is not None:
            book.gradient_scale = scale
            return
        if not self._has_said_barrier:
            self._has_said_barrier = True
            log.warning(
                "An advantage of step %d exceeds `advantage_clip`, so the step is trained again with all rewards known "
                "(said once); with `groups_per_micro_batch: all` steps wait for all rewards instead.",
                book.plan.prompts.step,
            )
        book.loss_sum, book.regularizer_sum, book.update_metrics = 0.0, 0.0, MetricAccumulator()
        self._recovery.journal.forget_updates()
        calls = [book.update_call(micro_batch) for micro_batch in book.plan.micro_batches]
        for call, reports in zip(calls, self._train_again(calls), strict=True):
            self._recovery.journal.note_update(call)
            self._note_update(call, reports, book)

    def _train_again(self, calls: Sequence[UpdateCall]) -> list[list[UpdateReport]]:
        return self._repeat(lambda: self._recovery.train_again(calls, self._loop.gather))

    # ---- the trainer group ---------------------------------------------------------------------------------

    def _submit_group(self) -> None:
        """Let the trainers begin what the scheduler wants of them, or do it once more; if they are there."""
        if self._group is None or self._recovery.is_rebuilding:
            return
        book = self._steps[self._group.action.micro_batch.step]
        self._group.submit(self._pool, book)
        for task in self._group.tasks.values():
            self._loop.add(task, partial(self._on_rank_done, self._group, task, book))

    def _on_rank_done(self, group: GroupTask, task: Task, book: StepBook) -> list[Event]:
        """The group is done when its last rank is; only then is anything of it noted, as it may be done again."""
        is_missing = self._recovery.is_possible and group.misses_samples
        if not is_missing:
            task.result()
        if self._group is not group or not group.is_done:
            return []
        reports = [] if is_missing else [task.result() for task in group.tasks.values()]
        micro_batch = group.action.micro_batch
        if isinstance(group.action, Assist):
            self._note_assist(micro_batch, reports, book)
        elif group.made_again and not is_missing:
            self._note_made_again(group.made_again, reports, book)
            self._submit_group()
            return []
        else:
            self._group = None
            call = book.update_call(micro_batch)
            self._recovery.journal.note_update(call)
            if is_missing or any(report.out_of_memory for report in reports):
                # A part of the failed micro-batch may be in the gradient; where memory ran out, the ranks have agreed
                # on smaller batches.
                reports = self._train_again(self._recovery.journal.open.updates)[-1]
            self._note_update(call, reports, book)
        # Switching takes as long as the slowest rank needs.
        switch_s, seconds = max(report.switch_s for report in reports), reports[-1].span.seconds
        event = Assisted if isinstance(group.action, Assist) else Updated
        return [event(micro_batch, switch_s, seconds)]

    def _note_assist(self, micro_batch: MicroBatch, reports: Sequence[AssistReport], book: StepBook) -> None:
        adopted = [[self._recovery.adopt(ref) for ref in report.trajectories] for report in reports]
        self._group = None  # only now: if one is lost, the micro-batch is made again
        for (trainer, parts), report, refs in zip(
            shares(micro_batch.slices, self._pool.trainers).items(), reports, adopted, strict=True
        ):
            book.trajectories.update((part, (ref,)) for part, ref in zip(parts, refs, strict=True))
            for part, rewards in zip(parts, report.rewards, strict=False):  # none where reward workers score
                self._note_rewards(part, rewards, book)
            book.metrics.join(report.metrics)
            self.note_span(trainer, "assist", str(micro_batch), report.span)

    def _note_made_again(self, parts: Sequence[Slice], reports: Sequence[AssistReport], book: StepBook) -> None:
        """Take samples that were lost with a host; their rewards are known, and their metrics noted."""
        for part, ref in zip(parts, trajectories_made(reports, len(parts)), strict=True):
            self._recovery.free(book.trajectories[part])
            book.trajectories[part] = (self._recovery.adopt(ref),)
        self._recovery.note_made_again(len(parts))

    def _note_update(self, call: UpdateCall, reports: Sequence[UpdateReport], book: StepBook) -> None:
        for trainer, report in zip(self._pool.trainers, reports, strict=True):
            book.loss_sum += report.loss_sum
            book.regularizer_sum += report.regularizer_sum
            book.update_metrics.join(report.metrics)
            self.note_span(trainer, "update", str(call.micro_batch), report.span)

    def _on_snapshot(self, trainer: str, task: Task) -> list[Event]:
        adopted, copy = self._recovery.note_snapshot(trainer, task.result())
        if copy is not None:
            self._loop.add(copy, partial(self._on_copied, trainer, adopted, copy))
        self._flush()
        return []

    def _on_copied(self, trainer: str, adopted: ObjectRef, task: Task) -> list[Event]:
        self._recovery.note_copy(trainer, adopted, task.result())
        self._flush()
        return []

    def _flush(self) -> None:
        for task in self._recovery.flush():
            self._loop.add(task, partial(take_nothing, task))

    # ---- restarts ------------------------------------------------------------------------------------------

    def _recover(self, error: Exception, worker: str) -> None:
        """Start those again whom an error shows to be lost; the error is raised where nobody is, or the run ends."""
        unit = self._recovery.lost_unit(error, worker)
        if unit == TRAINERS:
            self._recovery.restart(unit, self._loop.gather)
            self._load_again(worker)
            return
        self._recovery.forget(unit)
        self.on_lost(unit)
        self._restarting.add(unit)
        try:
            tasks = self._recovery.launch(unit)
        except NoRoom as failure:
            self._recovery.give_up(unit, failure)
            return
        except WorkerError as failure:
            self._recover(failure, unit)
            return
        for task in tasks:
            self._loop.add(task, partial(take_nothing, task))
        self._loop.add(tasks[-1], partial(self._on_launched, unit, tasks[-1]))

    def _load_again(self, worker: str) -> None:
        """Let a generator that lives do what the trainers' loss has ended: it was loading what was lost with them."""
        generator = self._pool.unit_of(worker)
        if generator not in self._pool.generators or self._pool.published_version is None:
            return
        if generator in self._restarting:
            self._load_and_join(generator, self._pool.published_version)
        else:
            self._perform(LoadWeights(generator, self._pool.published_version))

    def _on_launched(self, unit: str, task: Task) -> list[Event]:
        task.result()
        self._pool.rejoin(unit)
        version = self._version_of(unit)
        if version is None:
            return self._join(unit, None)
        self._load_and_join(unit, version)
        return []

    def _load_and_join(self, unit: str, version: int) -> None:
        loading = self._pool.load_weights(unit, version)
        self._loop.add(loading, partial(self._on_rejoined, unit, version, loading))

    def _on_rejoined(self, unit: str, version: int, task: Task) -> list[Event]:
        task.result()
        return self._join(unit, version)

    def _join(self, unit: str, version: int | None) -> list[Event]:
        self._restarting.discard(unit)
        return [WorkerJoined(unit, version)]

    def _version_of(self, unit: str) -> int | None:
        """Give the version that a unit must have to go on; reward workers need none."""
        return None if unit in self._pool.reward_workers else self._pool.published_version

    def on_lost(self, unit: str) -> None:
        """Forget what the workers of a unit were at; the scheduler hands it out anew."""
        self._loop.drop(lambda task: self._pool.unit_of(task.worker) == unit)
        self._restarting.discard(unit)
        if unit != TRAINERS:
            self._observe(WorkerLost(unit, returns=True))

    def on_back(self, unit: str) -> None:
        """Let them go on: trainers do their task again."""
        if unit == TRAINERS:
            self._submit_group()
        else:
            self._observe(WorkerJoined(unit, self._version_of(unit)))

    def on_given_up(self, unit: str) -> None:
        """Wait for them no more; others have taken over what they were at."""
        self._restarting.discard(unit)
