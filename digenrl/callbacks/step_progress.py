"""A progress bar that counts optimizer steps, which is what an RL run is measured in."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from digenrl.callbacks.reward_history import TRAINING_REWARD, VALIDATION_REWARD, has_training_reward

_SHOWN = (TRAINING_REWARD, VALIDATION_REWARD, "time/step_s")


class StepProgress(ProgressBar):
    """Shows steps done, time and rewards: a bar on a terminal, a line every few seconds in a log file.

    Args:
        console: where to print; None is standard error.
        line_every_s: seconds between lines where there is no terminal.
    """

    def __init__(self, console: Console | None = None, line_every_s: float = 10.0) -> None:
        super().__init__()
        self._console = Console(stderr=True) if console is None else console
        self._line_every_s = line_every_s
        self._last_line_s = float("-inf")
        self._is_enabled = True
        self._has_reward = False  # the newest batch
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def enable(self) -> None:
        """Show progress."""
        self._is_enabled = True

    def disable(self) -> None:
        """Show nothing, as on all ranks but the first."""
        self._is_enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar."""
        if self._is_enabled and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[metrics]}"),
                console=self._console,
            )
            total = trainer.max_steps if trainer.max_steps > 0 else None
            self._task = self._progress.add_task("", total=total, completed=trainer.global_step, metrics="")
            self._progress.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        self._has_reward = has_training_reward(trainer, batch)
        self._show(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the new validation reward."""
        self._show(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the bar."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        self._console.print(*args, **kwargs)

    def _show(self, trainer: Trainer) -> None:
        names = [name for name in _SHOWN if self._has_reward or name != TRAINING_REWARD]
        metrics = "  ".join(
            f"{name} {trainer.callback_metrics[name]:.3f}" for name in names if name in trainer.callback_metrics
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=trainer.global_step, metrics=metrics)
        elif self._is_enabled and not self._console.is_terminal:
            now_s = time.monotonic()
            if now_s - self._last_line_s >= self._line_every_s:
                self._last_line_s = now_s
                total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
                self._console.print(f"step {trainer.global_step}{total}  {metrics}", highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
