"""What each worker did in some steps, and when: as a trace for Perfetto and as a picture."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from digenrl.callbacks.plotting import GRID, INK, QUIET, add_titles, new_plot, require_matplotlib
from digenrl.callbacks.run_folder import run_folder
from digenrl.strategies import DisaggregatedStrategy
from digenrl.strategies.span import Span
from digenrl.strategies.step_book import WorkerSpan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

TASK_COLORS = {
    "generate": "#4c78a8",
    "score": "#72b7b2",
    "assist": "#9c6bae",
    "update": "#f28e2b",
    "optimizer": "#d1495b",
    "sync": "#9aa0a8",
}
_OTHER_COLOR = "#d4a6c8"
_WIDE = 0.05  # share of the picture's width that has room for a label
_LONG_S = 10.0  # a picture of more than this has its axis in seconds


class Timeline(Callback):
    """Writes `timeline.json` and `timeline.png` to the run folder: a lane per worker, a bar per task.

    The JSON file is in Chrome's trace event format and opens in https://ui.perfetto.dev. Both are written at the
    first validation after the last of the steps, or at the end of the run.
    """

    def __init__(self, first_step: int = 2, num_steps: int = 3) -> None:
        """Choose the steps.

        Args:
            first_step: the first one to show, counted from 0; workers warm up in the first two.
            num_steps: how many to show.

        Raises:
            ValueError: a setting outside its bounds.
        """
        if first_step < 0:
            raise ValueError(f"`first_step` is counted from 0 and must be at least 0, got {first_step}.")
        if num_steps < 1:
            raise ValueError(f"`num_steps` is a count and must be at least 1, got {num_steps}.")
        self.first_step = first_step
        self.num_steps = num_steps
        self.spans: list[WorkerSpan] = []
        """What was collected."""
        self.pauses: list[Span] = []
        """Time between the steps: validations, checkpoints, sheets and Lightning itself."""
        self._pause_start_s: float | None = None
        self._workers: tuple[str, ...] = ()
        self._num_steps_seen = 0
        self._is_written = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there are workers, and something to draw with."""
        if not isinstance(trainer.strategy, DisaggregatedStrategy):
            raise TypeError(
                "`Timeline` shows the workers of a `DisaggregatedStrategy`, but the Trainer's strategy is "
                f"`{type(trainer.strategy).__name__}`, which has none: remove the callback or change the strategy."
            )
        require_matplotlib()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew."""
        self.spans, self.pauses, self._is_written = [], [], False
        self._num_steps_seen, self._pause_start_s = trainer.global_step, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End the pause before the step, which is no idle time of the pipeline."""
        if self._pause_start_s is not None and self._num_steps_seen < self.first_step + self.num_steps:
            self.pauses.append(Span(self._pause_start_s, time.monotonic()))
        self._pause_start_s = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect the spans of a step, once its optimizer step is done."""
        if trainer.global_step == self._num_steps_seen:
            return
        self._num_steps_seen = trainer.global_step
        if 0 <= self._num_steps_seen - 1 - self.first_step < self.num_steps:
            assert isinstance(trainer.strategy, DisaggregatedStrategy), "`setup` checks the type"
            self.spans.extend(
                trainer.strategy.last_step_spans if self.spans else _begun(trainer.strategy.last_step_spans)
            )
            # Not now: callbacks before this one may have spent time already.
            _, self._pause_start_s = _extent(trainer.strategy.last_step_spans)
            pool = trainer.strategy.pool
            self._workers = (*pool.generators, *pool.trainers, *pool.reward_workers)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write in a pause of the steps, not between two of them."""
        if self.spans and self._num_steps_seen >= self.first_step + self.num_steps:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what is not written yet."""
        if self.spans:
            self._write(trainer)
        else:
            log.warning(
                "no timeline was written: the run took no step from `first_step` %d on; it ended after %d.",
                self.first_step,
                trainer.global_step,
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the complete steps that there are."""
        if self.spans:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._is_written:
            return
        folder = run_folder(trainer)
        trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(self.spans, self._workers)}
        (folder / "timeline.json").write_text(json.dumps(trace), encoding="utf-8")
        # A step that an error ended has a pause before it, and no spans.
        _, end_s = _extent(self.spans)
        pauses = [pause for pause in self.pauses if pause.end_s <= end_s]
        draw_timeline(self.spans, self._workers, pauses).savefig(folder / "timeline.png")
        self._is_written = True


def trace_events(spans: Sequence[WorkerSpan], workers: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Describe spans as Chrome trace events: a thread per worker, times in microseconds from the first span.

    Args:
        spans: what the workers did; at least one.
        workers: names of workers that get a thread even without a span.
    """
    lanes = _lanes(spans, workers)
    start_s, _ = _extent(spans)
    names: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "digenrl"}}]
    for lane, worker in enumerate(lanes, 1):
        names.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": worker}})
        names.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": lane, "args": {"sort_index": lane}})
    return names + [
        {
            "name": entry.task,
            "cat": _group(entry.worker),
            "ph": "X",
            "pid": 1,
            "tid": lanes.index(entry.worker) + 1,
            "ts": round((entry.span.start_s - start_s) * 1e6, 3),
            "dur": round(entry.span.seconds * 1e6, 3),
            "args": {"detail": entry.detail},
        }
        for entry in sorted(spans, key=lambda entry: entry.span.start_s)
    ]


def utilization(
    spans: Sequence[WorkerSpan], workers: Iterable[str] = (), pauses: Iterable[Span] = ()
) -> dict[str, float]:
    """Give the share of the time between the first and the last span that each group of workers computes.

    Args:
        spans: what the workers did; moving weights does not count as computing.
        workers: names of workers that count even without a span.
        pauses: time between the steps, which does not count, as in the logged `util/*`.
    """
    lanes = _lanes(spans, workers)
    start_s, end_s = _extent(spans)
    total_s = end_s - start_s - sum(pause.seconds for pause in pauses)
    shares = {}
    for group in dict.fromkeys(_group(worker) for worker in lanes):
        num_workers = sum(_group(worker) == group for worker in lanes)
        busy_s = sum(entry.span.seconds for entry in spans if _group(entry.worker) == group and entry.task != "sync")
        shares[group] = busy_s / (total_s * num_workers)
    return shares


def draw_timeline(spans: Sequence[WorkerSpan], workers: Iterable[str] = (), pauses: Sequence[Span] = ()) -> Figure:
    """Draw a lane per worker, a bar per span and a line at each optimizer step.

    Args:
        spans: what the workers did; at least one.
        workers: names of workers that get a lane even without a span.
        pauses: time between the steps, shaded.
    """
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    lanes = _lanes(spans, workers)
    start_s, end_s = _extent(spans)
    total_s = end_s - start_s
    unit, factor = ("s", 1.0) if total_s > _LONG_S else ("ms", 1e3)
    figure, axes = new_plot(12, 1.9 + 0.5 * len(lanes))
    for entry in spans:
        color = TASK_COLORS.get(entry.task, _OTHER_COLOR)
        # A white edge parts neighbours of one task, and would cover the shortest bars.
        is_short = entry.span.seconds < 0.004 * total_s
        axes.barh(
            lanes.index(entry.worker),
            entry.span.seconds * factor,
            left=(entry.span.start_s - start_s) * factor,
            height=0.66,
            color=color,
            edgecolor=color if is_short else "white",
            linewidth=0.5,
        )
    for detail, step_end_s in _optimizer_steps(spans).items():
        x = (step_end_s - start_s) * factor
        axes.axvline(x, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            detail,
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=INK,
        )
    for pause in pauses:
        left, right = (pause.start_s - start_s) * factor, (pause.end_s - start_s) * factor
        axes.axvspan(left, right, color=GRID, linewidth=0, zorder=0)
        if pause.seconds > _WIDE * total_s:
            middle = ((left + right) / 2, (len(lanes) - 1) / 2)
            axes.text(*middle, "between steps", color=QUIET, fontsize=9, ha="center", va="center", rotation=90)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlim(0, total_s * factor * 1.005)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time from the first span, {unit}", color=INK)
    shares = utilization(spans, workers, pauses)
    busy = ", ".join(f"{group} {share:.0%} busy" for group, share in shares.items())
    add_titles(axes, "Worker timeline", busy, pad=20)
    tasks = [task for task in TASK_COLORS if any(entry.task == task for entry in spans)]
    axes.legend(
        handles=[Patch(color=TASK_COLORS[task], label=task) for task in tasks],
        # In the line of the title.
        loc="lower right",
        bbox_to_anchor=(1, 1),
        bbox_transform=axes.transAxes + ScaledTranslation(0, 32 / 72, figure.dpi_scale_trans),
        borderaxespad=0,
        ncols=len(tasks),
        columnspacing=1.4,
        handlelength=1.2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure


def _lanes(spans: Iterable[WorkerSpan], workers: Iterable[str]) -> list[str]:
    """Generators first, each group in the order of its numbers: `trainer-10` comes after `trainer-9`."""
    names = {*workers, *(entry.worker for entry in spans)}
    return sorted(names, key=lambda name: (_group(name), len(name), name))


def _extent(spans: Sequence[WorkerSpan]) -> tuple[float, float]:
    """When the first span starts and the last one ends."""
    return min(entry.span.start_s for entry in spans), max(entry.span.end_s for entry in spans)


def _begun(spans: Sequence[WorkerSpan]) -> list[WorkerSpan]:
    """Leave out the loads before the first step's own work: they belong to the step before, which is not shown."""
    start_s, _ = _extent([entry for entry in spans if entry.task != "sync"])
    return [entry for entry in spans if entry.span.end_s >= start_s]


def _group(worker: str) -> str:
    """`trainers` for `trainer-0`."""
    return worker.rpartition("-")[0] + "s"


def _optimizer_steps(spans: Iterable[WorkerSpan]) -> dict[str, float]:
    """When the slowest trainer finished each optimizer step, by its detail, which names the policy version."""
    ends: dict[str, float] = {}
    for entry in spans:
        if entry.task == "optimizer":
            ends[entry.detail] = max(entry.span.end_s, ends.get(entry.detail, entry.span.end_s))
    return ends
