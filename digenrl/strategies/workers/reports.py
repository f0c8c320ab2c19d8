"""What workers tell the driver: ids, rewards and times, never latents or weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from digenrl.engines import ObjectRef
from digenrl.metrics import MetricValue
from digenrl.strategies.skeleton import ModuleOutline
from digenrl.strategies.span import Span


@dataclass(frozen=True)
class BuildReport:
    """What a worker built."""

    outlines: tuple[ModuleOutline, ...]
    frozen_digest: str
    """Of everything that is not trained, and so never synchronized."""


@dataclass(frozen=True)
class GenerateReport:
    """A trajectory was made and is kept by its maker."""

    trajectories: tuple[ObjectRef, ...]
    """One; as many as ranks made a part of it where several devices are one generator."""
    metrics: Mapping[str, MetricValue]
    span: Span
    score: ScoreReport | None = None
    """If its maker has scored it, too."""


@dataclass(frozen=True)
class ScoreReport:
    """Rewards of samples."""

    rewards: tuple[Any, ...]  # [B] numbers, or tuples of R; NaN where a reward failed and groups are dropped
    metrics: Mapping[str, MetricValue]
    span: Span


@dataclass(frozen=True)
class AssistReport:
    """A trainer has made its share of a micro-batch, and scored it where no reward workers do."""

    trajectories: tuple[ObjectRef, ...]  # one per slice
    rewards: tuple[tuple[Any, ...], ...]
    """Of each slice's samples; empty where they are still to be scored."""
    metrics: Mapping[str, MetricValue]
    switch_s: float
    """Seconds spent on making room for generation."""
    span: Span


@dataclass(frozen=True)
class UpdateReport:
    """A micro-batch's gradient was accumulated."""

    loss_sum: float
    """Sum of the unreduced losses of this rank's rows, without the regularizer."""
    regularizer_sum: float
    """Sum of the rows' `RowLosses.regularizer`."""
    metrics: Mapping[str, MetricValue]
    switch_s: float
    """Seconds spent on bringing the training state back."""
    span: Span
    out_of_memory: bool = False
    """Whether a rank's memory ran out half-way: the step's gradient is to be discarded, and its updates, this one
    included, made again. All ranks say it, and take half as many timesteps at a time from now on."""


@dataclass(frozen=True)
class StepReport:
    """The optimizer was stepped."""

    gradient_norm: float
    """Before clipping."""
    span: Span


@dataclass(frozen=True)
class LogCall:
    """One `self.log` of a worker, to be repeated in the driver."""

    name: str
    value: Any
    kwargs: Mapping[str, Any]
