"""Callbacks that leave pictures, a timeline and a summary in the run folder; all work with a stock Trainer, too."""

from digenrl.callbacks.reward_curve import RewardCurve
from digenrl.callbacks.run_checkpoint import RunCheckpoint
from digenrl.callbacks.run_profile import RunProfile
from digenrl.callbacks.run_summary import RunSummary
from digenrl.callbacks.sample_sheet import SampleSheet
from digenrl.callbacks.step_progress import StepProgress
from digenrl.callbacks.timeline import Timeline, trace_events

__all__ = [
    "RewardCurve",
    "RunCheckpoint",
    "RunProfile",
    "RunSummary",
    "SampleSheet",
    "StepProgress",
    "Timeline",
    "trace_events",
]
