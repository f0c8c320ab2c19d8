"""The driver's side of a step: it carries out what the scheduler decides, and sees ids, seeds, rewards and times."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from digenrl.engines import Engine, ObjectRef, Task
from digenrl.metrics import MetricAccumulator, MetricValue
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
)
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.workers import AssistReport, GenerateReport, ScoreReport, Span, UpdateReport
from digenrl.types import PromptBatch

log = logging.getLogger(__name__)

_POLL_S = 0.2  # how long a signal may go unnoticed


@dataclass(frozen=True)
class WorkerSpan:
    """What a worker did, and when."""

    worker: str
    task: str
    detail: str
    span: Span


@dataclass(frozen=True)
class StepPlan:
    """A step's work."""

    prompts: PromptBatch  # B samples
    micro_batches: tuple[MicroBatch, ...]
    policy_version: int
    """Of the weights that train it."""
    num_rows: int
    """The divisor of all losses."""
    shares_rollout: bool = False
    """Whether its samples are made by the same weights as those of the step before."""


@dataclass(frozen=True)
class StepResult:
    """What the driver knows of a step once all its gradients are accumulated."""

    prompts: PromptBatch  # B samples
    rewards: Tensor  # [B] or [B, R]
    advantages: Tensor  # [B] or [B, R]
    gradient_scale: float
    """What the accumulated gradient of the policy is to be multiplied by."""
    row_scale: float
    """What all of the gradient is to be multiplied by, since groups were dropped; 0 if none is left."""
    num_dropped_groups: int
    loss: float
    """Mean over the step's rows."""
    metrics: dict[str, MetricValue]
    num_stale_samples: int
    num_assisted: int
    """Micro-batches that the trainers made."""


class StepDriver:
    """Runs steps on workers.

    A loop of three lines: hand events to the scheduler, submit the tasks of the actions it returns, wait for
    tasks and turn their reports into events. Trajectories stay where they were made; trainers read them there.
    """

    def __init__(
        self, pool: WorkerPool, scheduler: Scheduler, module: DiffusionRLModule, *, timestep_batch_size: int | None
    ) -> None:
        """Drive the workers of `pool`, which are idle; `module` decides advantages, its weights are not touched."""
        self._pool = pool
        self._engine: Engine = pool.engine
        self._scheduler = scheduler
        self._module = module
        self._timestep_batch_size = timestep_batch_size
        self._events: deque[Event] = deque()  # happened already
        self._scored: dict[Slice, ScoreReport] = {}  # scored by their makers, which the scheduler has not asked for yet
        self._pending: dict[Task, Callable[[], list[Event]]] = {}
        self._steps: dict[int, _StepBook] = {}
        self._spans: list[WorkerSpan] = []
        self._is_paused = False
        self._started_step: int | None = None
        self._has_said_barrier = False

    def add_step(self, plan: StepPlan) -> None:
        """Make a step's work known; generators may begin with it while the step before is trained."""
        waits_for_std = self._module.advantage_settings.need_batch_std and len(plan.micro_batches) > 1
        self._steps[plan.prompts.step] = _StepBook(plan, waits_for_std)
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

    def finish_step(self, step: int, poll: Callable[[], None]) -> StepResult:
        """Generate, score and train the rest of a started step.

        Args:
            step: its index.
            poll: called at least every 0.2 s; may raise to end the step.
        """
        book = self._steps[step]
        self._run(lambda: book.finish is not None, poll)
        assert book.finish is not None, "that is what `_run` waits for"
        if book.waits_for_std:
            self._apply_batch_std(book, poll)
        self._free(self._steps.pop(step))
        row_scale = book.row_scale
        return StepResult(
            book.plan.prompts,
            book.rewards,
            book.advantages,
            book.gradient_scale,
            row_scale,
            book.num_dropped_groups,
            row_scale * (book.gradient_scale * book.loss_sum + book.regularizer_sum) / book.plan.num_rows,
            book.take_metrics(),
            book.finish.num_stale_samples,
            book.finish.num_assisted,
        )

    def announce_weights(self, version: int) -> None:
        """Tell the scheduler that weights were published: generators load them when they are free."""
        self._observe(WeightsPublished(version))

    def pause(self, poll: Callable[[], None]) -> None:
        """Let generators finish what they make, load the published weights and wait; the next step resumes."""
        if not self._is_paused:
            self._is_paused = True
            self._observe(Paused())
        self._run(lambda: self._scheduler.is_quiet, poll)

    def close(self, poll: Callable[[], None]) -> None:
        """Pause, and let go of steps that were begun ahead and will not be trained, and of their gradient."""
        self.pause(poll)
        self._run(lambda: not self._pending, poll)
        if self._started_step in self._steps:
            self._wait_for([self._engine.submit(trainer, "discard_gradient") for trainer in self._pool.trainers], poll)
        for book in self._steps.values():
            self._free(book)
        self._steps.clear()

    def restart(self, scheduler: Scheduler) -> None:
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

    # ---- the loop ------------------------------------------------------------------------------------------

    def _run(self, is_over: Callable[[], bool], poll: Callable[[], None]) -> None:
        while not is_over():
            poll()
            for task in self._engine.wait(list(self._pending), _POLL_S):
                for event in self._pending.pop(task)():
                    self._observe(event)

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
                self._pending[task] = partial(self._on_generated, part, generator, task, book)
            case Score(part, worker) if part in self._scored:
                self._events.append(self._take_score(part, worker, self._scored.pop(part)))
            case Score(part, worker):
                book = self._steps[part.step]
                task = self._pool.score(worker, book.trajectories[part])
                self._pending[task] = partial(self._on_scored, part, worker, task, book)
            case LoadWeights(generator, version):
                task = self._pool.load_weights(generator, version)
                self._pending[task] = partial(self._on_loaded, generator, version, task)
            case Assist(micro_batch):
                self._submit_assist(micro_batch)
            case Update(micro_batch):
                self._submit_update(micro_batch)
            case FinishStep():
                self._steps[action.step].finish = action

    def _on_loaded(self, generator: str, version: int, task: Task) -> list[Event]:
        span: Span = task.result()
        self._spans.append(WorkerSpan(generator, "sync", f"version {version}", span))
        return [WeightsLoaded(generator, version, span.seconds)]

    def _on_generated(self, part: Slice, generator: str, task: Task, book: _StepBook) -> list[Event]:
        report: GenerateReport = task.result()
        book.trajectories[part] = report.trajectories
        book.metrics.join(report.metrics)
        self._spans.append(WorkerSpan(generator, "generate", str(part), report.span))
        if report.score is not None:
            self._scored[part] = report.score
        return [Generated(part, generator, report.span.seconds)]

    def _on_scored(self, part: Slice, worker: str, task: Task, book: _StepBook) -> list[Event]:
        return [self._take_score(part, worker, task.result())]

    def _take_score(self, part: Slice, worker: str, report: ScoreReport) -> Scored:
        book = self._steps[part.step]
        self._note_rewards(part, report.rewards, book)
        book.metrics.join(report.metrics)
        self._spans.append(WorkerSpan(worker, "score", str(part), report.span))
        return Scored(part, worker, report.span.seconds)

    def _note_rewards(self, part: Slice, rewards: Sequence[Any], book: _StepBook) -> None:
        """Keep a slice's rewards; where its micro-batch is whole now, compare them while trainers are busy."""
        book.note_rewards(part, torch.tensor(rewards))
        micro_batch = book.plan.micro_batches[part.micro_batch]
        if book.is_scored(micro_batch):
            compare = self._centered if book.waits_for_std else self._module.advantages
            book.compare(micro_batch, compare, self._module.kept_rows)

    def _centered(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return self._module.advantage_settings.centered(self._module.compared_rewards(rewards), group_ids)

    def _apply_batch_std(self, book: _StepBook, poll: Callable[[], None]) -> None:
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
        self._wait_for([self._engine.submit(trainer, "discard_gradient") for trainer in self._pool.trainers], poll)
        for micro_batch in book.plan.micro_batches:
            tasks = {trainer: self._send_update(trainer, micro_batch, book) for trainer in self._pool.trainers}
            self._wait_for(list(tasks.values()), poll)
            for trainer, task in tasks.items():
                self._on_update_report(trainer, book, micro_batch, task.result())

    def _wait_for(self, tasks: list[Task], poll: Callable[[], None]) -> None:
        """Wait for all of some tasks, and serve the others meanwhile."""

        def is_over() -> bool:
            return all(task.is_done for task in tasks)

        for task in tasks:
            self._pending[task] = partial(_no_events, task)
        self._run(is_over, poll)

    # ---- the trainer group ---------------------------------------------------------------------------------

    def _submit_assist(self, micro_batch: MicroBatch) -> None:
        """Let the ranks share a micro-batch's slices; each is the batch that a generator would have made."""
        book = self._steps[micro_batch.step]
        ranks = self._pool.trainers
        for rank, trainer in enumerate(ranks):
            parts = micro_batch.slices[rank :: len(ranks)]
            prompts = [book.prompts_of(part) for part in parts]
            num_missing = -(-len(micro_batch.slices) // len(ranks)) - len(parts)
            follows = [book.prompts_of(micro_batch.slices[0])] * (num_missing if self._pool.shards_trainers else 0)
            task = self._engine.submit(
                trainer, "assist", prompts, scores=not self._pool.reward_workers, follows=follows
            )
            self._expect_from_rank(trainer, micro_batch, task, partial(self._on_assist_report, parts, trainer, book))

    def _on_assist_report(
        self, parts: Sequence[Slice], trainer: str, book: _StepBook, micro_batch: MicroBatch, report: AssistReport
    ) -> float:
        book.trajectories.update((part, (ref,)) for part, ref in zip(parts, report.trajectories, strict=True))
        for part, rewards in zip(parts, report.rewards, strict=False):  # none where reward workers score
            self._note_rewards(part, rewards, book)
        book.metrics.join(report.metrics)
        self._spans.append(WorkerSpan(trainer, "assist", str(micro_batch), report.span))
        return report.switch_s

    def _submit_update(self, micro_batch: MicroBatch) -> None:
        book = self._steps[micro_batch.step]
        for trainer in self._pool.trainers:
            task = self._send_update(trainer, micro_batch, book)
            self._expect_from_rank(trainer, micro_batch, task, partial(self._on_update_report, trainer, book))

    def _send_update(self, trainer: str, micro_batch: MicroBatch, book: _StepBook) -> Task:
        rows = slice(micro_batch.start, micro_batch.stop)
        return self._engine.submit(
            trainer,
            "update",
            [ref for part in micro_batch.slices for ref in book.trajectories[part]],
            book.rewards[rows].tolist(),
            book.advantages[rows].tolist(),
            num_rows=book.plan.num_rows,
            timestep_batch_size=self._timestep_batch_size,
            keeps_parts_apart=book.waits_for_std,
        )

    def _on_update_report(self, trainer: str, book: _StepBook, micro_batch: MicroBatch, report: UpdateReport) -> float:
        book.loss_sum += report.loss_sum
        book.regularizer_sum += report.regularizer_sum
        book.update_metrics.join(report.metrics)
        self._spans.append(WorkerSpan(trainer, "update", str(micro_batch), report.span))
        return report.switch_s

    def _expect_from_rank(
        self,
        trainer: str,
        micro_batch: MicroBatch,
        task: Task,
        take: Callable[[MicroBatch, AssistReport | UpdateReport], float],
    ) -> None:
        book = self._steps[micro_batch.step]
        book.unreported_ranks.setdefault(micro_batch, {})[trainer] = None
        self._pending[task] = partial(self._on_rank_done, trainer, micro_batch, task, take)

    def _on_rank_done(
        self,
        trainer: str,
        micro_batch: MicroBatch,
        task: Task,
        take: Callable[[MicroBatch, AssistReport | UpdateReport], float],
    ) -> list[Event]:
        """The group is done when its last rank is; switching takes as long as the slowest rank needs."""
        report = task.result()
        ranks = self._steps[micro_batch.step].unreported_ranks[micro_batch]
        ranks[trainer] = take(micro_batch, report)
        if any(switch_s is None for switch_s in ranks.values()):
            return []
        switch_s = max(seconds for seconds in ranks.values() if seconds is not None)
        del self._steps[micro_batch.step].unreported_ranks[micro_batch]
        event = Assisted if isinstance(report, AssistReport) else Updated
        return [event(micro_batch, switch_s, report.span.seconds)]

    def _free(self, book: _StepBook) -> None:
        """Let go of a step's trajectories; nobody reads them any more."""
        by_worker: dict[str, list[ObjectRef]] = {}
        for ref in (ref for refs in book.trajectories.values() for ref in refs):
            by_worker.setdefault(ref.worker, []).append(ref)
        for worker, refs in by_worker.items():
            # Not waited for: a generator may be in the middle of the next step.
            task = self._engine.submit(worker, "free", refs)
            self._pending[task] = partial(_no_events, task)


@dataclass
class _StepBook:
    """What the driver notes of a step under way."""

    plan: StepPlan
    waits_for_std: bool
    """Whether micro-batches are trained on centered rewards, because the step's std is known only at its end."""
    rewards: Tensor = field(init=False)
    advantages: Tensor = field(init=False)
    gradient_scale: float = 1.0
    trajectories: dict[Slice, tuple[ObjectRef, ...]] = field(default_factory=dict)
    unreported_ranks: dict[MicroBatch, dict[str, float | None]] = field(default_factory=dict)
    loss_sum: float = 0.0
    regularizer_sum: float = 0.0
    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    """Of rollouts and scores."""
    update_metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    finish: FinishStep | None = None

    def __post_init__(self) -> None:
        self.rewards = self.advantages = torch.empty(0)
        self.is_kept = torch.ones(len(self.plan.prompts), dtype=torch.bool)
        self._scored: set[Slice] = set()

    @property
    def row_scale(self) -> float:
        """Planned samples over those that are left; 0 if none is."""
        num_kept = int(self.is_kept.sum())
        return len(self.is_kept) / num_kept if num_kept else 0.0

    @property
    def num_dropped_groups(self) -> int:
        """Groups whose reward has failed."""
        return len(torch.tensor(self.plan.prompts.group_ids)[~self.is_kept].unique())

    def prompts_of(self, part: Slice) -> PromptBatch:
        return self.plan.prompts.select(slice(part.start, part.stop))

    def note_rewards(self, part: Slice, rewards: Tensor) -> None:
        """Keep rewards [b] or [b, R] of a slice."""
        if not len(self.rewards):
            self.rewards = torch.full((len(self.plan.prompts), *rewards.shape[1:]), float("nan"))
        self.rewards[part.start : part.stop] = rewards
        self._scored.add(part)

    def is_scored(self, micro_batch: MicroBatch) -> bool:
        return self._scored.issuperset(micro_batch.slices)

    def take_metrics(self) -> dict[str, MetricValue]:
        """Hand over the metrics of all tasks."""
        self.metrics.join(self.update_metrics.take())
        return self.metrics.take()

    def compare(
        self,
        micro_batch: MicroBatch,
        compare: Callable[[Tensor, Tensor], Tensor],
        kept_rows: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Compare the rewards of a micro-batch that is whole; groups whose reward has failed have none."""
        rows = slice(micro_batch.start, micro_batch.stop)
        rewards, group_ids = self.rewards[rows].clone(), torch.tensor(self.plan.prompts.group_ids[rows])
        self.is_kept[rows] = kept_rows(rewards, group_ids)
        advantages = advantages_of_kept(rewards, self.is_kept[rows], group_ids, compare)
        if not len(self.advantages):
            self.advantages = torch.full((len(self.plan.prompts), *advantages.shape[1:]), float("nan"))
        self.advantages[rows] = advantages.float()


def _no_events(task: Task) -> list[Event]:
    task.result()
    return []
