"""Validation by an average of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from digenrl import DisaggregatedStrategy, Trainer
from digenrl.module import DiffusionRLModule
from tests.integration.toy_runs import QUIET, fit, toy_data
from tests.toy import WORDS, toy_module


class Weights(Callback):
    """Keeps the trained weights after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: DiffusionRLModule, *args: Any) -> None:
        policy = {name: value.clone() for name, value in module.state_dict().items() if name.startswith("policy.")}
        self.steps.append(policy)


def validated(module: DiffusionRLModule, strategy: Any = "auto") -> float:
    data = toy_data(validation_prompts=WORDS, validation_samples_per_prompt=4)
    trainer = Trainer(strategy=strategy, **QUIET)
    reward: float = trainer.validate(module, data, verbose=False)[0]["val/reward/mean"]
    return reward


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_validation_samples_are_made_by_the_average(strategy: str) -> None:
    watch = Weights()
    chosen: Any = DisaggregatedStrategy(2, engine="inline") if strategy != "auto" else strategy
    data = toy_data(validation_prompts=WORDS, validation_samples_per_prompt=4)
    settings: dict[str, Any] = {"max_steps": 4, "val_check_interval": 4, "callbacks": [watch]}
    module = toy_module(lr=3e-2, ema_decay=0.9, ema_interval=2)
    trainer, _, _ = fit(chosen, module=module, data=data, **settings)
    # min((1 + g) / (10 + g), 0.9) at g = 1 and 3, by hand from the weights that the run went through.
    expected = toy_module()
    expected.configure_model()
    average = {name: value.clone() for name, value in expected.state_dict().items()}
    for step, decay in ((1, 2 / 11), (3, 4 / 13)):
        average = {name: decay * average[name] + (1 - decay) * watch.steps[step][name] for name in average}
    expected.load_state_dict(average)
    by_average = trainer.callback_metrics["val/reward/mean"].item()
    assert by_average == pytest.approx(validated(expected), abs=1e-6)
    expected.load_state_dict(watch.steps[-1])
    assert abs(by_average - validated(expected)) > 1e-5, "the weights themselves must score otherwise"


def test_the_average_does_not_touch_training() -> None:
    _, _, with_average = fit("auto", module=toy_module(ema_decay=0.9, ema_interval=1), max_steps=3)
    _, _, without = fit("auto", module=toy_module(), max_steps=3)
    for name, value in without.items():
        assert torch.equal(with_average[name], value)
