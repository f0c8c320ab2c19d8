"""A table of what a run achieved, printed at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from digenrl.callbacks.reward_history import RewardHistory
from digenrl.callbacks.run_folder import run_folder
from digenrl.module import DiffusionRLModule

_MEANS = {"util/generators": "generators", "util/trainers": "trainers"}
_MAXIMA = {"ratio/max_abs_dev": "largest |ratio - 1|", "staleness": "largest staleness", "restarts": "restarts"}
_FILES = (
    "samples_before.png",
    "samples_step_*.png",
    "samples_after.png",
    "reward_curve.png",
    "timeline.*",
    "metrics.csv",
)
_MAX_LISTED = 3  # of files of one kind


class RunSummary(Callback):
    """Prints rewards, speed, utilization and files at the end of a run, also of an interrupted one.

    Best given last: after an error it lists what the callbacks before it have written.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Choose where to print.

        Args:
            console: None prints to the standard output.
        """
        self.history = RewardHistory()
        self._console = console
        self._figures: RunFigures | None = None
        self._first_step = 0
        self._run_start_s = 0.0
        self._batch_start_s = 0.0
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the run folder."""
        # Here and not where it is needed: ranks agree on it, and after an error they may not meet again.
        self._folder = run_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.history.begin(trainer)
        self._figures = RunFigures()
        self._first_step = trainer.global_step
        self._run_start_s = time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        self._batch_start_s = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a batch to the sums."""
        assert self._figures is not None, "`on_train_start` makes them"
        self.history.record_training(trainer, batch)
        figures = self._figures
        figures.training_s += time.monotonic() - self._batch_start_s
        if isinstance(pl_module, DiffusionRLModule):
            figures.num_samples += len(batch) * pl_module.group_size * trainer.world_size
        metrics = trainer.callback_metrics
        for name in _MEANS.keys() & metrics.keys():
            figures.means.setdefault(name, []).append(float(metrics[name]))
        for name in _MAXIMA.keys() & metrics.keys():
            figures.maxima[name] = max(float(metrics[name]), figures.maxima.get(name, 0.0))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation reward."""
        self.history.record_validation(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print, now that the other callbacks have written their files."""
        self._print(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Print what was reached, if training had begun."""
        self._print(trainer, f"stopped by {type(exception).__name__} at step {trainer.global_step}")

    def state_dict(self) -> dict[str, Any]:
        """Save the rewards."""
        return self.history.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the rewards."""
        self.history.load_state_dict(state_dict)

    def _print(self, trainer: Trainer, outcome: str) -> None:
        figures, self._figures = self._figures, None
        if figures is None or not trainer.is_global_zero:
            return
        figures.wall_s = time.monotonic() - self._run_start_s
        table = summary_table(
            figures,
            self.history,
            outcome=outcome,
            first_step=self._first_step,
            last_step=trainer.global_step,
            folder=self._folder,
            files=[*_files(self._folder), *_checkpoints(trainer)],
        )
        console = self._console or Console()
        console.print()
        console.print(table)


@dataclass
class RunFigures:
    """Sums over the steps of a run."""

    num_samples: int = 0
    training_s: float = 0.0
    """Time within steps."""
    wall_s: float = 0.0
    """All time, with validations, pictures and checkpoints."""
    means: dict[str, list[float]] = field(default_factory=dict)
    """Values per batch of the metrics whose mean is shown."""
    maxima: dict[str, float] = field(default_factory=dict)


def summary_table(
    figures: RunFigures,
    history: RewardHistory,
    *,
    outcome: str,
    first_step: int,
    last_step: int,
    folder: Path,
    files: Sequence[Path],
) -> Table:
    """Lay out the summary; what was not logged gets no row.

    Args:
        figures: sums over the run.
        history: its rewards.
        outcome: how it ended.
        first_step: optimizer steps before the run, above 0 in a resumed one.
        last_step: optimizer steps after it.
        folder: the run folder.
        files: what to list, shown relative to the folder.
    """
    table = Table(
        title=f"Run {outcome}", box=box.SIMPLE_HEAD, show_header=False, title_justify="left", title_style="bold"
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def add(name: str, value: str) -> None:
        table.add_row(name, Text(value))  # as Text: brackets in a path are no markup

    if history.validation:
        best_step, best = max(history.validation, key=lambda point: point[1])
        first, last = history.validation[0][1], history.validation[-1][1]
        add("validation reward", f"{first:#.4g} → {last:#.4g}, best {best:#.4g} (step {best_step})")
    if history.training:
        add("training reward", f"{history.training[0][1]:#.4g} → {history.training[-1][1]:#.4g}")
    num_steps = last_step - first_step
    add("steps", f"{num_steps}" if first_step == 0 else f"{num_steps}, from {first_step} to {last_step}")
    add("wall time", duration(figures.wall_s))
    if num_steps > 0:
        add("seconds per step", f"{figures.training_s / num_steps:.3g}")
    if figures.num_samples > 0 and figures.training_s > 0:
        add("samples per second", f"{figures.num_samples / figures.training_s:#.4g}")
    shares = [
        f"{group} {sum(figures.means[name]) / len(figures.means[name]):.0%}"
        for name, group in _MEANS.items()
        if name in figures.means
    ]
    if shares:
        add("utilization", ", ".join(shares))
    for name, title in _MAXIMA.items():
        if name in figures.maxima:
            add(title, f"{figures.maxima[name]:.3g}")
    add("run folder", str(folder))
    if files:
        add("files", "\n".join(_relative(path, folder) for path in files))
    return table


def duration(seconds: float) -> str:
    """Write seconds for people: `73.2 s`, `12 min 13 s`, `5 h 12 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _files(folder: Path) -> Iterable[Path]:
    """Only what a run writes: the folder of a Trainer without loggers may be anybody's."""
    for pattern in _FILES:
        found = sorted(folder.glob(pattern))
        # Of many sheets the first and the last are enough.
        yield from found if len(found) <= _MAX_LISTED else (found[0], found[-1])


def _checkpoints(trainer: Trainer) -> list[Path]:
    paths: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            paths.update((*callback.best_k_models, callback.best_model_path, callback.last_model_path))
    return sorted(Path(path) for path in paths if path and Path(path).exists())


def _relative(path: Path, folder: Path) -> str:
    path, folder = path.absolute(), folder.absolute()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
