"""What the driver knows of a step: its plan, what has come in of it, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from digenrl.engines import ObjectRef
from digenrl.metrics import MetricAccumulator, MetricValue
from digenrl.module import advantages_of_kept
from digenrl.scheduling import FinishStep, MicroBatch, Slice
from digenrl.strategies.snapshots import MadeSlice, UpdateCall
from digenrl.strategies.span import Span
from digenrl.types import PromptBatch


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


@dataclass
class StepBook:
    """What the driver notes of a step under way."""

    plan: StepPlan
    waits_for_std: bool
    """Whether micro-batches are trained on centered rewards, because the step's std is known only at its end."""
    rewards: Tensor = field(init=False)
    advantages: Tensor = field(init=False)
    gradient_scale: float = 1.0
    trajectories: dict[Slice, tuple[ObjectRef, ...]] = field(default_factory=dict)
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

    @property
    def all_trajectories(self) -> list[ObjectRef]:
        """Of all slices that are made."""
        return [ref for refs in self.trajectories.values() for ref in refs]

    def prompts_of(self, part: Slice) -> PromptBatch:
        """Give what a slice is made of."""
        return self.plan.prompts.select(slice(part.start, part.stop))

    def note_rewards(self, part: Slice, rewards: Tensor) -> None:
        """Keep rewards [b] or [b, R] of a slice."""
        if not len(self.rewards):
            self.rewards = torch.full((len(self.plan.prompts), *rewards.shape[1:]), float("nan"))
        self.rewards[part.start : part.stop] = rewards
        self._scored.add(part)

    def is_scored(self, micro_batch: MicroBatch) -> bool:
        """Whether all rewards of a micro-batch are known."""
        return self._scored.issuperset(micro_batch.slices)

    def update_call(self, micro_batch: MicroBatch) -> UpdateCall:
        """Say what trainers are to do with a micro-batch whose advantages are known."""
        rows = slice(micro_batch.start, micro_batch.stop)
        return UpdateCall(
            micro_batch,
            tuple(MadeSlice(self.prompts_of(part), self.trajectories[part]) for part in micro_batch.slices),
            self.rewards[rows].tolist(),
            self.advantages[rows].tolist(),
            num_rows=self.plan.num_rows,
            keeps_parts_apart=self.waits_for_std,
        )

    def result(self) -> StepResult:
        """Sum the step up, once it is finished."""
        assert self.finish is not None, "all micro-batches of the step are in the gradient"
        self.metrics.join(self.update_metrics.take())
        row_scale = self.row_scale
        return StepResult(
            self.plan.prompts,
            self.rewards,
            self.advantages,
            self.gradient_scale,
            row_scale,
            self.num_dropped_groups,
            row_scale * (self.gradient_scale * self.loss_sum + self.regularizer_sum) / self.plan.num_rows,
            self.metrics.take(),
            self.finish.num_stale_samples,
            self.finish.num_assisted,
        )

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
