"""Runs of the toy, colocated and disaggregated, for tests that compare them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptData, Trainer
from digenrl.module import DiffusionRLModule
from tests.toy import WORDS, toy_module

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def toy_data(**settings: Any) -> PromptData:
    return PromptData(WORDS, **{"prompts_per_step": 4, "seed": 0, **settings})


def fit(
    strategy: str | DisaggregatedStrategy,
    *,
    module: DiffusionRLModule | None = None,
    data: Any = None,
    ckpt_path: str | None = None,
    trainer_class: type[pl.Trainer] = Trainer,
    **settings: Any,
) -> tuple[pl.Trainer, DiffusionRLModule, dict[str, Tensor]]:
    """Fit the toy; returns the trainer, the module and its final weights."""
    module = toy_module() if module is None else module
    trainer = trainer_class(strategy=strategy, **{**QUIET, "max_steps": 1, **settings})
    try:
        trainer.fit(module, toy_data() if data is None else data, ckpt_path=ckpt_path)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
    finally:
        if isinstance(strategy, DisaggregatedStrategy):
            strategy.shutdown()
    return trainer, module, weights


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference over the largest entry."""
    return largest_difference(ours, theirs) / max(value.abs().max().item() for value in theirs.values())
