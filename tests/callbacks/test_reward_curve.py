from __future__ import annotations

import csv
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from digenrl.callbacks import RewardCurve
from digenrl.callbacks.reward_curve import draw_rewards, moving_average
from tests.callbacks.runs import StopAt, fit, inline, module_that_drops_step_1, toy_data, toy_trainer
from tests.toy import toy_module


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    with (folder / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


@pytest.mark.parametrize("name", ["colocated", "inline"])
def test_the_recorded_rewards_are_the_logged_ones(tmp_path: Path, name: str) -> None:
    curve = RewardCurve()
    strategy = inline() if name == "inline" else "auto"
    trainer, _ = fit(tmp_path, curve, strategy=strategy, max_steps=4, val_check_interval=2)
    folder = Path(trainer.log_dir)
    assert curve.history.training == logged(folder, "reward/mean")
    # Lightning logs a validation under the batch before it; the curve, under the number of steps done.
    assert curve.history.validation == [(step + 1, reward) for step, reward in logged(folder, "val/reward/mean")]
    assert Image.open(folder / "reward_curve.png").size == (1200, 675)


def test_a_validation_before_training_is_the_first_point(tmp_path: Path) -> None:
    curve = RewardCurve()
    trainer, module, data = toy_trainer(tmp_path, curve, val_check_interval=2), toy_module(), toy_data()
    first = trainer.validate(module, data, verbose=False)[0]["val/reward/mean"]
    trainer.fit(module, data)
    assert curve.history.validation[0] == (0, pytest.approx(first))
    assert [step for step, _ in curve.history.validation] == [0, 2]


def test_it_works_with_a_stock_trainer_without_a_logger(tmp_path: Path) -> None:
    fit(tmp_path, RewardCurve(), trainer_class=pl.Trainer, logger=False)
    assert (tmp_path / "reward_curve.png").exists()


class BatchRewards(pl.Callback):
    """Keeps the reward of every batch."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.rewards.append(float(trainer.callback_metrics["reward/mean"]))


@pytest.mark.parametrize("name", ["colocated", "inline"])
def test_the_batches_of_an_accumulation_window_are_one_step(tmp_path: Path, name: str) -> None:
    curve, batches = RewardCurve(), BatchRewards()
    strategy = inline() if name == "inline" else "auto"
    fit(tmp_path, curve, batches, strategy=strategy, max_steps=2, accumulate_grad_batches=2)
    first, second, third, fourth = batches.rewards
    assert curve.history.training == [(0, (first + second) / 2), (1, (third + fourth) / 2)]


@pytest.mark.parametrize("name", ["colocated", "inline"])
def test_a_step_of_which_all_groups_were_dropped_is_no_point(tmp_path: Path, name: str) -> None:
    curve, batches = RewardCurve(), BatchRewards()
    trainer = toy_trainer(tmp_path, curve, batches, strategy=inline() if name == "inline" else "auto")
    trainer.fit(module_that_drops_step_1(), toy_data())
    assert trainer.global_step == 3
    assert curve.history.training == [(0, batches.rewards[0]), (2, batches.rewards[2])]


def test_a_resumed_run_continues_the_curve(tmp_path: Path) -> None:
    whole, continued = RewardCurve(), RewardCurve()
    fit(tmp_path / "whole", whole, max_steps=4, val_check_interval=2)
    save = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=2)
    fit(tmp_path, RewardCurve(), save, max_steps=2, val_check_interval=2, enable_checkpointing=True)
    trainer = toy_trainer(tmp_path, continued, max_steps=4, val_check_interval=2)
    trainer.fit(toy_module(), toy_data(), ckpt_path=tmp_path / "last.ckpt")
    assert [step for step, _ in continued.history.training] == [0, 1, 2, 3]
    assert continued.history.training == whole.history.training


def test_an_interrupted_run_leaves_a_curve(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, RewardCurve(), StopAt(2, RuntimeError("enough")))
    assert len(list(tmp_path.glob("*/reward_curve.png"))) == 1


def test_the_plot_shows_each_value_and_a_smoothed_line() -> None:
    training = [(step, float(step % 3)) for step in range(30)]
    validation = [(0, 0.5), (15, 1.0), (30, 0.8)]
    (axes,) = draw_rewards(training, validation).axes
    each, smoothed, validated = axes.lines
    assert list(zip(*each.get_data(), strict=True)) == training
    assert list(smoothed.get_ydata()) == moving_average([reward for _, reward in training], 5)
    assert list(zip(*validated.get_data(), strict=True)) == validation
    assert axes.get_title(loc="left") == "validation 0.5000 → 0.8000, best 1.000 at step 15"


def test_a_moving_average_is_centred() -> None:
    assert moving_average([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


def test_a_missing_matplotlib_is_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install digenrl\[plot\]"):
        fit(tmp_path, RewardCurve())
