"""Reinforcement learning for diffusion and flow models, on separate generator and trainer devices.

Names are imported on first use: `import digenrl` itself needs neither torch nor lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from digenrl.data import PromptData
    from digenrl.module import DiffusionRLModule
    from digenrl.policies import DiffusionPolicy
    from digenrl.strategies import DisaggregatedStrategy
    from digenrl.trainer import Trainer
    from digenrl.types import Condition, Prompt, PromptBatch, ScoredBatch, TimestepBatch, Trajectory

_HOMES = {
    "Condition": "digenrl.types",
    "DiffusionPolicy": "digenrl.policies",
    "DiffusionRLModule": "digenrl.module",
    "DisaggregatedStrategy": "digenrl.strategies",
    "Prompt": "digenrl.types",
    "PromptBatch": "digenrl.types",
    "PromptData": "digenrl.data",
    "ScoredBatch": "digenrl.types",
    "TimestepBatch": "digenrl.types",
    "Trainer": "digenrl.trainer",
    "Trajectory": "digenrl.types",
}

__all__ = [
    "Condition",
    "DiffusionPolicy",
    "DiffusionRLModule",
    "DisaggregatedStrategy",
    "Prompt",
    "PromptBatch",
    "PromptData",
    "ScoredBatch",
    "TimestepBatch",
    "Trainer",
    "Trajectory",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `digenrl` has no attribute `{name}`.")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
