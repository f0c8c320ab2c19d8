"""What runs in workers."""

from digenrl.strategies.workers.joining import even_shares, join_generate_reports, join_score_reports, join_spans
from digenrl.strategies.workers.reports import (
    AssistReport,
    BuildReport,
    GenerateReport,
    LogCall,
    ScoreReport,
    StepReport,
    UpdateReport,
)
from digenrl.strategies.workers.settings import (
    GradientSync,
    Precision,
    RankGroup,
    Sharding,
    TimestepBatchSize,
    WorkerSettings,
)
from digenrl.strategies.workers.timestep_batch_size import TrainerOutOfMemory
from digenrl.strategies.workers.worker import Worker

__all__ = [
    "AssistReport",
    "BuildReport",
    "GenerateReport",
    "GradientSync",
    "LogCall",
    "Precision",
    "RankGroup",
    "ScoreReport",
    "Sharding",
    "StepReport",
    "TimestepBatchSize",
    "TrainerOutOfMemory",
    "UpdateReport",
    "Worker",
    "WorkerSettings",
    "even_shares",
    "join_generate_reports",
    "join_score_reports",
    "join_spans",
]
