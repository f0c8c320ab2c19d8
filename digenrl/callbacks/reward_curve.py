"""A plot of the rewards of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from digenrl.callbacks.plotting import GRID, INK, add_titles, new_plot, require_matplotlib
from digenrl.callbacks.reward_history import RewardHistory
from digenrl.callbacks.run_folder import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRAINING, _VALIDATION = "#4c78a8", "#e4572e"
_MIN_SMOOTHED = 10  # below this a line is short enough to be read as it is


class RewardCurve(Callback):
    """Writes `reward_curve.png` to the run folder, after each validation and at the end.

    Shows the mean reward of each step's training samples, and of the validation samples. The values are saved in
    checkpoints, so the curve of a resumed run begins where the run began.
    """

    def __init__(self) -> None:
        self.history = RewardHistory()
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is something to draw with."""
        require_matplotlib()
        # Here and not where it is needed: ranks agree on it, and after an error they may not meet again.
        self._folder = run_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or continue after a checkpoint was loaded."""
        self.history.begin(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the training reward."""
        self.history.record_training(trainer, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation reward and draw."""
        self.history.record_validation(trainer)
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Draw what there is."""
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Save what was recorded."""
        return self.history.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue what was recorded."""
        self.history.load_state_dict(state_dict)

    def _write(self, trainer: Trainer) -> None:
        training, validation = self.history.training, self.history.validation
        if trainer.is_global_zero and (training or validation):
            draw_rewards(training, validation).savefig(self._folder / "reward_curve.png")


def draw_rewards(training: Sequence[tuple[int, float]], validation: Sequence[tuple[int, float]]) -> Figure:
    """Plot rewards over optimizer steps, each given as (step, reward), at least one."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_plot(8, 4.5)
    if training:
        steps, rewards = zip(*training, strict=True)
        if len(training) < _MIN_SMOOTHED:
            axes.plot(steps, rewards, ".-", color=_TRAINING, linewidth=1.8, label="training")
        else:
            axes.plot(steps, rewards, color=_TRAINING, alpha=0.35, linewidth=1, label="training, each step")
            window = max(5, len(rewards) // 12)
            smoothed = moving_average(rewards, window)
            axes.plot(steps, smoothed, color=_TRAINING, linewidth=2, label=f"training, mean of {window} steps")
    if validation:
        steps, rewards = zip(*validation, strict=True)
        axes.plot(
            steps,
            rewards,
            color=_VALIDATION,
            linewidth=1.8,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label="validation",
            zorder=3,
        )
    axes.grid(color=GRID, linewidth=0.8)
    axes.margins(x=0.03, y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlabel("optimizer steps", color=INK)
    axes.set_ylabel("mean reward", color=INK)
    add_titles(axes, "Reward", _in_words(training, validation))
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Average each value with its neighbours, `window` in all, fewer at the ends: centred, so without a lag."""
    before, after = window // 2, window - window // 2
    spans = [values[max(0, index - before) : index + after] for index in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _in_words(training: Sequence[tuple[int, float]], validation: Sequence[tuple[int, float]]) -> str:
    name, series = ("validation", validation) if validation else ("training", training)
    first, last = series[0][1], series[-1][1]
    if len(series) == 1:
        return f"{name} {first:#.4g}"
    best_step, best = max(series, key=lambda point: point[1])
    return f"{name} {first:#.4g} → {last:#.4g}, best {best:#.4g} at step {best_step}"
