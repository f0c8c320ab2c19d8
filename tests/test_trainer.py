from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from digenrl import DisaggregatedStrategy, Trainer
from digenrl.callbacks import StepProgress
from tests.integration.toy_runs import QUIET, toy_data
from tests.toy import WORDS, toy_module


def test_defaults_are_those_of_an_rl_run(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", default_root_dir=str(tmp_path), max_steps=1)
    assert isinstance(trainer.strategy, DisaggregatedStrategy)
    assert trainer.log_dir == str(tmp_path / "version_0")
    assert (trainer.num_sanity_val_steps, trainer.check_val_every_n_epoch, trainer.log_every_n_steps) == (0, None, 1)
    assert any(isinstance(callback, StepProgress) for callback in trainer.callbacks)  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [True, [], TensorBoardLogger("unused")])
def test_every_logger_keeps_the_csv_of_the_run_folder_beside_it(tmp_path: Path, other: Any) -> None:
    trainer = Trainer(accelerator="cpu", default_root_dir=str(tmp_path), logger=other)
    assert isinstance(trainer.logger, CSVLogger)
    assert len(trainer.loggers) == (2 if isinstance(other, TensorBoardLogger) else 1)


def test_a_users_csv_logger_and_progress_bar_are_kept(tmp_path: Path) -> None:
    logger, bar = CSVLogger(tmp_path), RichProgressBar()
    trainer = Trainer(accelerator="cpu", logger=[logger], callbacks=bar)
    assert trainer.loggers == [logger]
    assert not any(isinstance(callback, StepProgress) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def test_logging_can_be_switched_off() -> None:
    assert Trainer(accelerator="cpu", logger=False).loggers == []


@pytest.mark.parametrize("as_keyword", [True, False])
def test_validate_first_puts_the_base_policy_at_step_zero(tmp_path: Path, as_keyword: bool) -> None:
    strategy = DisaggregatedStrategy(engine="inline")
    settings = {**QUIET, "logger": True, "default_root_dir": str(tmp_path), "max_steps": 2, "val_check_interval": 2}
    trainer = Trainer(strategy=strategy, validate_first=True, **settings)
    data = toy_data(validation_prompts=WORDS, validation_samples_per_prompt=2)
    module = toy_module(lr=1e-2)
    if as_keyword:
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data)
    rows = list(csv.DictReader((tmp_path / "version_0" / "metrics.csv").open()))
    validations = [(int(row["step"]), float(row["val/reward/mean"])) for row in rows if row["val/reward/mean"]]
    base = toy_module(lr=1e-2)
    base.configure_model()
    expected = Trainer(strategy="auto", **QUIET).validate(base, data, verbose=False)[0]["val/reward/mean"]
    assert [step for step, _ in validations] == [0, 1]
    assert validations[0][1] == pytest.approx(expected, abs=1e-6)
    assert validations[1][1] != validations[0][1]
