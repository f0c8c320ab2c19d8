from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
from rich.console import Console

from digenrl.callbacks import RewardCurve, RunSummary, SampleSheet, Timeline
from digenrl.callbacks.reward_history import RewardHistory
from digenrl.callbacks.run_summary import RunFigures, duration, summary_table
from tests.callbacks.runs import StopAt, fit, inline, module_that_drops_step_1, toy_data, toy_trainer


class Metrics(pl.Callback):
    """Keeps what a run logged, and adds a staleness."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
        self.log("staleness", 0.125 * (trainer.global_step == 2))
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validations.append(float(trainer.callback_metrics["val/reward/mean"]))

    def mean(self, name: str) -> float:
        return sum(step[name] for step in self.steps) / len(self.steps)


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=120, file=io.StringIO())


@pytest.fixture
def _sigint() -> Iterator[None]:
    """Lightning ignores Ctrl+C from the first one on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def rows(console: Console) -> dict[str, str]:
    """The table by its first column; a line that has none continues the row before."""
    found: dict[str, str] = {}
    name = ""
    for line in console.export_text(clear=False).splitlines():
        if not line.strip():
            continue
        if line.startswith("   "):
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif line.startswith("  "):
            name, _, value = line.strip().partition("  ")
            found[name] = value.strip()
    return found


def test_the_numbers_are_those_of_the_run(tmp_path: Path, console: Console) -> None:
    metrics = Metrics()
    callbacks = [metrics, RunSummary(console), SampleSheet(), RewardCurve(), Timeline(1, 2)]
    settings = {"max_steps": 4, "val_check_interval": 2, "enable_checkpointing": True}
    trainer, _ = fit(tmp_path, *callbacks, strategy=inline(), **settings)
    table = rows(console)
    first, last = metrics.validations
    best = max(metrics.validations)
    step = 2 if best == first else 4
    assert table["validation reward"] == f"{first:#.4g} → {last:#.4g}, best {best:#.4g} (step {step})"
    rewards = [entry["reward/mean"] for entry in metrics.steps]
    assert table["training reward"] == f"{rewards[0]:#.4g} → {rewards[-1]:#.4g}"
    assert table["steps"] == "4"
    busy = [f"{metrics.mean(f'util/{group}'):.0%}" for group in ("generators", "trainers")]
    assert table["utilization"] == f"generators {busy[0]}, trainers {busy[1]}"
    ratios = [entry["ratio/max_abs_dev"] for entry in metrics.steps]
    assert table["largest |ratio - 1|"] == f"{max(ratios):.3g}"
    assert table["largest staleness"] == "0.125"
    # Within the step, as the strategy sees it; the summary adds what Lightning does around it.
    assert metrics.mean("time/step_s") <= float(table["seconds per step"]) < 2 * metrics.mean("time/step_s") + 0.1
    samples_per_step = 2 * 4
    rate = samples_per_step / float(table["seconds per step"])
    assert float(table["samples per second"]) == pytest.approx(rate, rel=0.02)
    assert table["run folder"] == trainer.log_dir
    checkpoint = Path(trainer.checkpoint_callback.best_model_path).name
    assert table["files"].split() == [
        "samples_before.png",
        "samples_after.png",
        "reward_curve.png",
        "timeline.json",
        "timeline.png",
        "metrics.csv",
        f"checkpoints/{checkpoint}",
    ]
    assert all((Path(trainer.log_dir) / name).exists() for name in table["files"].split())


def test_a_colocated_run_has_no_utilization(tmp_path: Path, console: Console) -> None:
    fit(tmp_path, RunSummary(console), trainer_class=pl.Trainer, logger=False)
    table = rows(console)
    assert "utilization" not in table
    assert "largest staleness" not in table
    assert table["steps"] == "3"
    assert table["run folder"] == str(tmp_path)


def test_a_last_step_of_which_all_groups_were_dropped_has_no_reward(tmp_path: Path, console: Console) -> None:
    summary = RunSummary(console)
    trainer = toy_trainer(tmp_path, summary, strategy=inline(), max_steps=2)
    trainer.fit(module_that_drops_step_1(), toy_data())
    ((step, reward),) = summary.history.training
    assert step == 0
    assert rows(console)["training reward"] == f"{reward:#.4g} → {reward:#.4g}"
    assert rows(console)["steps"] == "2"


@pytest.mark.usefixtures("_sigint")
def test_an_interrupted_run_is_summed_up(tmp_path: Path, console: Console) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, RunSummary(console), StopAt(2, KeyboardInterrupt()), strategy=inline())
    assert "Run stopped by KeyboardInterrupt at step 2" in console.export_text(clear=False)
    assert rows(console)["steps"] == "2"


def test_an_error_before_training_prints_nothing(tmp_path: Path, console: Console) -> None:
    with pytest.raises(TypeError, match="Timeline"):
        fit(tmp_path, RunSummary(console), Timeline())
    assert console.export_text() == ""


def test_a_resumed_run_says_from_where(console: Console) -> None:
    history = RewardHistory()
    table = summary_table(
        RunFigures(num_samples=80, training_s=4.0, wall_s=90.0),
        history,
        outcome="finished",
        first_step=10,
        last_step=12,
        folder=Path("runs/[bold]x"),
        files=[Path("runs/[bold]x/metrics.csv"), Path("/elsewhere/last.ckpt")],
    )
    console.print(table)
    assert rows(console) == {
        "steps": "2, from 10 to 12",
        "wall time": "90.0 s",
        "seconds per step": "2",
        "samples per second": "20.00",
        "run folder": "runs/[bold]x",  # no markup
        "files": "metrics.csv /elsewhere/last.ckpt",
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.25, "7.2 s"), (733, "12 min 13 s"), (18_725, "5 h 12 min"), (99.99, "100.0 s")]
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
