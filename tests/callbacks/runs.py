"""Short runs of the toy with callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptBatch, PromptData, Trainer
from digenrl.algorithms import FlowGRPO
from tests.toy import WORDS, ToyPolicy, level_reward, toy_module


def inline() -> DisaggregatedStrategy:
    return DisaggregatedStrategy(engine="inline", generators=2, trainer_assist="off")


def toy_trainer(
    folder: Path,
    *callbacks: pl.Callback,
    strategy: Strategy | str = "auto",
    trainer_class: type[pl.Trainer] = Trainer,
    **settings: Any,
) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 3,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    return trainer_class(
        strategy=strategy, default_root_dir=str(folder), callbacks=list(callbacks), **{**defaults, **settings}
    )


def toy_data(**settings: Any) -> PromptData:
    defaults: dict[str, Any] = {"prompts_per_step": 2, "validation_prompts": WORDS, "seed": 0}
    return PromptData(WORDS, **{**defaults, **settings})


def fit(folder: Path, *callbacks: pl.Callback, **settings: Any) -> tuple[pl.Trainer, FlowGRPO]:
    trainer, module = toy_trainer(folder, *callbacks, **settings), toy_module()
    trainer.fit(module, toy_data())
    return trainer, module


def fails_in_step_1(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.full((len(prompts),), float("nan")) if prompts.step == 1 else level_reward(media, prompts)


def module_that_drops_step_1() -> FlowGRPO:
    """All groups of the second step are left out."""
    settings: dict[str, Any] = {"group_size": 4, "num_steps": 3, "seed": 0}
    return FlowGRPO(ToyPolicy(), fails_in_step_1, on_reward_error="drop_group", reward_retries=0, **settings)


class StopAt(pl.Callback):
    """Raises at the end of a step."""

    def __init__(self, step: int, exception: BaseException) -> None:
        self.step = step
        self.exception = exception

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise self.exception
