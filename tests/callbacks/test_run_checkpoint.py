from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from digenrl import DisaggregatedStrategy, Trainer
from digenrl.algorithms import FlowGRPO
from digenrl.callbacks import RunCheckpoint
from tests.integration.toy_runs import QUIET, toy_data
from tests.toy import ToyPolicy, level_reward, toy_module

SAVING = {name: value for name, value in QUIET.items() if name != "enable_checkpointing"}


def saved(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*.ckpt"))


def run(folder: Path, *callbacks: Callback, **settings: Any) -> None:
    strategy = DisaggregatedStrategy(engine="inline")
    trainer = Trainer(strategy=strategy, callbacks=list(callbacks), default_root_dir=str(folder), **SAVING, **settings)
    trainer.fit(toy_module(), toy_data())


class Stop(Callback):
    """Fails in the middle of a step."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            raise ZeroDivisionError("stop")


def test_a_run_without_checkpoint_callbacks_keeps_its_final_state(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    assert saved(tmp_path) == ["step=2.ckpt"]


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, ["step=5.ckpt"]), (-1, ["step=2.ckpt", "step=4.ckpt", "step=5.ckpt"])]
)
def test_as_many_states_are_kept_as_asked_for(tmp_path: Path, keep: int, expected: list[str]) -> None:
    run(tmp_path, RunCheckpoint(every_n_steps=2, keep=keep), max_steps=5)
    assert saved(tmp_path) == expected


def test_a_failed_run_keeps_what_its_last_whole_step_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, Stop(), max_steps=5)
    assert saved(tmp_path) == ["step=3.ckpt"]
    checkpoint = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)
    assert checkpoint["digenrl"]["step"] == 3


class Unbuilt(ToyPolicy):
    """Cannot be built."""

    def build(self) -> None:
        raise ZeroDivisionError("no weights")


class StopBefore(Callback):
    """Fails once the weights are there, and before training begins."""

    def on_fit_start(self, *args: Any) -> None:
        raise ZeroDivisionError("stop")


@pytest.mark.parametrize("strategy", ["auto", "digenrl"])
@pytest.mark.parametrize("is_built", [True, False])
def test_a_run_that_has_not_begun_leaves_no_state(tmp_path: Path, strategy: str, is_built: bool) -> None:
    how = DisaggregatedStrategy(engine="inline") if strategy == "digenrl" else "auto"
    callbacks = [StopBefore()] if is_built else []
    trainer = Trainer(strategy=how, callbacks=callbacks, default_root_dir=str(tmp_path), max_steps=2, **SAVING)
    module = FlowGRPO(ToyPolicy() if is_built else Unbuilt(), level_reward, group_size=4)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, toy_data())
    assert saved(tmp_path) == []


def test_no_state_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, enable_checkpointing=False)
    run(tmp_path, fast_dev_run=True)
    assert saved(tmp_path) == []


def test_interval_is_checked() -> None:
    with pytest.raises(ValueError, match="`every_n_steps` is a count and must be at least 1, got 0"):
        RunCheckpoint(every_n_steps=0)
