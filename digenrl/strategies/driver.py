"""The driver's side of a step: it carries out what the scheduler decides, and sees ids, seeds, rewards and times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from digenrl.engines import Engine, ObjectRef, Task
from digenrl.metrics import MetricAccumulator, MetricValue
from digenrl.module import DiffusionRLModule
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
)
from digenrl.strategies.workers import GenerateReport, ScoreReport, Span, UpdateReport
from digenrl.types import PromptBatch

_POLL_S = 0.2  # how long a signal may go unnoticed


@dataclass(frozen=True)
class WorkerSpan:
    """What a worker did, and when."""

    worker: str
    task: str
    detail: str
    span: Span


@dataclass(frozen=True)
class StepResult:
    """What the driver knows of a step once all its gradients are accumulated."""

    rewards: Tensor  # [B]
    advantages: Tensor  # [B]
    loss: float
    """Mean over the step's rows."""
    metrics: dict[str, MetricValue]


@dataclass
class _StepState:
    prompts: PromptBatch
    num_rows: int
    rewards: Tensor
    advantages: Tensor
    trajectories: dict[Slice, ObjectRef] = field(default_factory=dict)
    unreported_ranks: dict[MicroBatch, set[str]] = field(default_factory=dict)
    loss_sum: float = 0.0
    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    is_finished: bool = False


class StepDriver:
    """Runs steps on workers.

    A loop of three lines: hand events to the scheduler, submit the tasks of the actions it returns, wait for
    tasks and turn their reports into events. Trajectories stay where they were made; trainers read them there.
    """

    def __init__(
        self,
        engine: Engine,
        generators: Sequence[str],
        trainers: Sequence[str],
        *,
        policy_version: int,
        timestep_batch_size: int | None,
    ) -> None:
        self._engine = engine
        self._trainers = tuple(trainers)
        self._timestep_batch_size = timestep_batch_size
        self._scheduler = Scheduler(generators, policy_version=policy_version)
        self._pending: dict[Task, Callable[[], list[Event]]] = {}
        self._spans: list[WorkerSpan] = []

    def run_step(
        self,
        module: DiffusionRLModule,
        prompts: PromptBatch,
        micro_batches: tuple[MicroBatch, ...],
        *,
        policy_version: int,
        num_rows: int,
        poll: Callable[[], None],
    ) -> StepResult:
        """Generate, score and train one step's samples.

        Args:
            module: decides the advantages; its weights are not touched.
            prompts: the step's B samples.
            micro_batches: how they are cut.
            policy_version: of the weights that must make them.
            num_rows: the divisor of all losses.
            poll: called at least every 0.2 s; may raise to end the step.
        """
        empty = torch.full((len(prompts),), float("nan"))
        step = _StepState(prompts, num_rows, empty, empty.clone())
        events: deque[Event] = deque([StepStarted(micro_batches, policy_version)])
        while not step.is_finished:
            while events:
                for action in self._scheduler.observe(events.popleft()):
                    self._perform(action, module, step)
            if not step.is_finished:
                poll()
                for task in self._engine.wait(list(self._pending), _POLL_S):
                    events.extend(self._pending.pop(task)())
        self._free(step)
        return StepResult(step.rewards, step.advantages, step.loss_sum / num_rows, step.metrics.take())

    def expect_weights(self, loads: Mapping[str, Task], version: int) -> None:
        """Tell the scheduler of each generator's new weights once it has loaded them, during the next step."""
        for generator, task in loads.items():
            self._pending[task] = partial(self._on_loaded, generator, version, task)

    def take_spans(self) -> tuple[WorkerSpan, ...]:
        """Hand over what workers did since the last call."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def _perform(self, action: Action, module: DiffusionRLModule, step: _StepState) -> None:
        match action:
            case Generate(part, generator):
                prompts = step.prompts.select(slice(part.start, part.stop))
                task = self._engine.submit(generator, "generate", prompts)
                self._pending[task] = partial(self._on_generated, part, generator, task, step)
            case Score(part, generator):
                task = self._engine.submit(generator, "score", step.trajectories[part])
                self._pending[task] = partial(self._on_scored, part, generator, task, step)
            case Update(micro_batch):
                self._submit_update(micro_batch, module, step)
            case FinishStep():
                step.is_finished = True

    def _on_loaded(self, generator: str, version: int, task: Task) -> list[Event]:
        self._spans.append(WorkerSpan(generator, "sync", f"version {version}", task.result()))
        return [WeightsLoaded(generator, version)]

    def _on_generated(self, part: Slice, generator: str, task: Task, step: _StepState) -> list[Event]:
        report: GenerateReport = task.result()
        step.trajectories[part] = report.trajectory
        step.metrics.join(report.metrics)
        self._spans.append(WorkerSpan(generator, "generate", str(part), report.span))
        return [Generated(part, generator)]

    def _on_scored(self, part: Slice, generator: str, task: Task, step: _StepState) -> list[Event]:
        report: ScoreReport = task.result()
        step.rewards[part.start : part.stop] = torch.tensor(report.rewards)
        step.metrics.join(report.metrics)
        self._spans.append(WorkerSpan(generator, "score", str(part), report.span))
        return [Scored(part, generator)]

    def _submit_update(self, micro_batch: MicroBatch, module: DiffusionRLModule, step: _StepState) -> None:
        rows = slice(micro_batch.start, micro_batch.stop)
        rewards = step.rewards[rows].clone()
        group_ids = torch.tensor(step.prompts.group_ids[rows])
        step.advantages[rows] = module.advantages(rewards, group_ids).to(step.advantages.dtype)
        trajectories = [step.trajectories[part] for part in micro_batch.slices]
        step.unreported_ranks[micro_batch] = set(self._trainers)
        for trainer in self._trainers:
            task = self._engine.submit(
                trainer,
                "update",
                trajectories,
                rewards,
                step.advantages[rows].clone(),
                num_rows=step.num_rows,
                timestep_batch_size=self._timestep_batch_size,
            )
            self._pending[task] = partial(self._on_updated, micro_batch, trainer, task, step)

    def _on_updated(self, micro_batch: MicroBatch, trainer: str, task: Task, step: _StepState) -> list[Event]:
        report: UpdateReport = task.result()
        step.loss_sum += report.loss_sum
        step.metrics.join(report.metrics)
        self._spans.append(WorkerSpan(trainer, "update", str(micro_batch), report.span))
        waiting = step.unreported_ranks[micro_batch]
        waiting.remove(trainer)
        return [] if waiting else [Updated(micro_batch)]

    def _free(self, step: _StepState) -> None:
        """Let go of the step's trajectories; nobody reads them any more."""
        by_worker: dict[str, list[ObjectRef]] = {}
        for ref in step.trajectories.values():
            by_worker.setdefault(ref.worker, []).append(ref)
        self._engine.gather([self._engine.submit(worker, "free", refs) for worker, refs in by_worker.items()])
