"""Scheduling decisions, free of clocks, threads and tensors; needs the standard library only."""

from digenrl.scheduling.scheduler import (
    Action,
    Event,
    FinishStep,
    Generate,
    Generated,
    Scheduler,
    Score,
    Scored,
    StepStarted,
    Update,
    Updated,
    WeightsLoaded,
)
from digenrl.scheduling.work import MicroBatch, Slice, cut_step

__all__ = [
    "Action",
    "Event",
    "FinishStep",
    "Generate",
    "Generated",
    "MicroBatch",
    "Scheduler",
    "Score",
    "Scored",
    "Slice",
    "StepStarted",
    "Update",
    "Updated",
    "WeightsLoaded",
    "cut_step",
]
