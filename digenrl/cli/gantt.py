"""A picture of the execution modes below each other: what workers do in each of them, in the same seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from digenrl.scheduling.simulate import Cluster, Mode, SimulatedSpan, SimulationResult, group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#2b2f36"
QUIET = "#6b7280"
EMPTY = "#f3f4f6"
EDGE = "white"

COLORS = {
    "generate": "#4c78a8",
    "generate, one version early": "#9ecae9",
    "score": "#72b7b2",
    "update": "#f28e2b",
    "assist": "#9c6bae",
    "optimizer": "#d1495b",
    "sync": "#9aa0a8",
    "switch": "#d3c6a6",
}
"""Those of a real run's timeline, and a lighter one for samples made before their step has begun."""

_MAX_LANES = 8  # of a group of workers
_NUM_STEPS = 2  # of the naive mode that the picture is long
_FIRST_STEP = 2  # the schedule has settled then, and assistance is measured
_LANE_IN = 0.135  # inches
_GROUP_GAP = 0.5  # lanes between generators and trainers


def draw_modes(cluster: Cluster, modes: Sequence[Mode], *, seed: int = 0) -> Figure:
    """Draw the modes in the same stretch of time: as long as the naive one takes for two steps.

    Generators, or devices, have a lane each, at most eight; trainers work as one and share a lane.

    Args:
        cluster: the workers.
        modes: the ladder, or some of it.
        seed: of the jitter.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    results = _settled(cluster, modes, seed)
    horizon_s = _NUM_STEPS * max(_step_s(result) for result in results)
    slowest_s = horizon_s / _NUM_STEPS
    lanes = [_lanes(result) for result in results]
    heights = [_height(workers) for workers in lanes]
    top_in, bottom_in, gap_in = 1.12, 0.5, 0.34
    total_in = sum(heights) * _LANE_IN + gap_in * (len(modes) - 1) + top_in + bottom_in
    figure = Figure(figsize=(12, total_in), dpi=150, facecolor="white")
    y_in = total_in - top_in
    unit, factor = _unit(horizon_s)
    used: set[str] = set()
    for number, (mode, result, workers, height) in enumerate(zip(modes, results, lanes, heights, strict=True)):
        y_in -= height * _LANE_IN
        axes = figure.add_axes((0.085, y_in / total_in, 0.805, height * _LANE_IN / total_in))
        used |= _draw_mode(axes, result, workers, height, horizon_s, factor)
        _label(axes, mode, _step_s(result), slowest_s, result)
        is_last = number == len(modes) - 1
        axes.tick_params(axis="x", labelbottom=is_last, length=3 if is_last else 0, labelsize=9, labelcolor=INK)
        if is_last:
            axes.set_xlabel(f"time, {unit}", color=INK, fontsize=9.5)
        y_in -= gap_in
    left, title_y = 0.085, 1 - 0.33 / total_in
    figure.text(left, title_y, "One workload, one cluster, different schedules", fontsize=14, weight="bold", color=INK)
    figure.text(left, title_y - 0.24 / total_in, _subtitle(cluster, modes), fontsize=9.5, color=QUIET)
    shown = [task for task in COLORS if task in used]
    figure.legend(
        handles=[Patch(color=COLORS[task], label=task) for task in shown],
        loc="upper left",
        bbox_to_anchor=(left, title_y - 0.36 / total_in),
        borderaxespad=0,
        borderpad=0,
        ncols=len(shown),
        columnspacing=1.3,
        handlelength=1.0,
        handletextpad=0.5,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure


def _settled(cluster: Cluster, modes: Sequence[Mode], seed: int) -> list[SimulationResult]:
    """Simulate as many steps of each mode as fill the picture."""
    num_steps = _FIRST_STEP + _NUM_STEPS
    firsts = [mode.simulate(cluster, num_steps=num_steps, seed=seed, record_spans=False) for mode in modes]
    slowest_s = max(_step_s(result) for result in firsts)
    return [
        mode.simulate(
            cluster, num_steps=num_steps + 1 + math.ceil(1.1 * _NUM_STEPS * slowest_s / _step_s(result)), seed=seed
        )
        for mode, result in zip(modes, firsts, strict=True)
    ]


def _step_s(result: SimulationResult) -> float:
    """Mean seconds of a settled step."""
    settled = result.step_s[_FIRST_STEP:]
    return sum(settled) / len(settled)


def _lanes(result: SimulationResult) -> list[str]:
    """Name a lane for each generator, or device, and one for all trainers."""
    lanes: list[str] = []
    for group in dict.fromkeys(group_of(worker) for worker in result.workers):
        members = [worker for worker in result.workers if group_of(worker) == group]
        num_lanes = 1 if group == "trainers" else min(len(members), _MAX_LANES)
        # Evenly spread, so that workers of all speeds are among them.
        lanes += [members[lane * len(members) // num_lanes] for lane in range(num_lanes)]
    # Trainers last, below the workers that feed them.
    return sorted(lanes, key=lambda worker: group_of(worker) == "trainers")


def _height(workers: Sequence[str]) -> float:
    """Give the height of a panel in lanes: trainers' lane is as high as two."""
    groups = [group_of(worker) for worker in workers]
    return len(workers) + groups.count("trainers") + _GROUP_GAP * (len(set(groups)) - 1)


def _draw_mode(
    axes: Axes, result: SimulationResult, workers: Sequence[str], height: float, horizon_s: float, factor: float
) -> set[str]:
    """Fill a panel; returns the tasks that are seen in it."""
    starts_s = [sum(result.step_s[:step]) for step in range(result.num_steps + 1)]
    begin_s = starts_s[_FIRST_STEP]
    rows: dict[str, tuple[float, float]] = {}
    y = 0.0
    group = group_of(workers[0])
    middles: dict[str, list[float]] = {}
    for worker in workers:
        if group_of(worker) != group:
            group, y = group_of(worker), y + _GROUP_GAP
        lane = 2.0 if group == "trainers" else 1.0
        rows[worker] = (y, lane)
        middles.setdefault(group, []).append(y + lane / 2)
        axes.broken_barh([(0, horizon_s * factor)], (y + 0.04, lane - 0.08), facecolors=EMPTY, linewidth=0)
        y += lane
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in result.spans:
        if span.worker in rows and begin_s < span.end_s and span.start_s < begin_s + horizon_s:
            first_s, last_s = max(span.start_s, begin_s), min(span.end_s, begin_s + horizon_s)
            task = _task(span, starts_s)
            bars.setdefault((span.worker, task), []).append(((first_s - begin_s) * factor, (last_s - first_s) * factor))
    for (worker, task), pieces in bars.items():
        y, lane = rows[worker]
        edges = [EDGE if width > 0.003 * horizon_s * factor else COLORS[task] for _, width in pieces]
        axes.broken_barh(pieces, (y + 0.04, lane - 0.08), facecolors=COLORS[task], edgecolors=edges, linewidth=0.35)
    for end_s in starts_s[_FIRST_STEP + 1 :]:
        if end_s < begin_s + horizon_s * 1.0001:
            axes.axvline((end_s - begin_s) * factor, color=INK, linewidth=0.9, linestyle=(0, (4, 2.5)))
    axes.set_xlim(0, horizon_s * factor)
    axes.set_ylim(height, 0)
    axes.spines[:].set_visible(False)
    names = [group.replace("-", "\n") for group in middles]
    axes.set_yticks([sum(values) / len(values) for values in middles.values()], names)
    axes.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK, pad=5)
    return {task for _, task in bars}


def _task(span: SimulatedSpan, starts_s: Sequence[float]) -> str:
    if span.task == "generate" and "of step" in span.detail:
        step = int(span.detail.rpartition(" ")[2])
        if span.start_s < starts_s[step] * (1 - 1e-12):
            return "generate, one version early"
    return span.task


def _label(axes: Axes, mode: Mode, step_s: float, slowest_s: float, result: SimulationResult) -> None:
    """Write the mode's name over its panel, and its figures to the right."""
    name = axes.annotate(
        mode.name,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=10.5,
        weight="bold",
        color=INK,
    )
    axes.annotate(
        mode.change,
        (1, 0),
        xycoords=name,
        xytext=(8, 2.5),
        textcoords="offset points",
        fontsize=9,
        color=QUIET,
    )
    unit, factor = _unit(step_s)
    beside: dict[str, Any] = {"xy": (1.012, 0.5), "xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(f"{slowest_s / step_s:.2f}x", xytext=(0, 6), fontsize=13, weight="bold", color=INK, **beside)
    figures = f"{step_s * factor:.4g} {unit} a step\n{result.bubble_share:.0%} bubbles"
    axes.annotate(figures, xytext=(0, 0), fontsize=8.5, color=QUIET, va="top", **beside)


def _subtitle(cluster: Cluster, modes: Sequence[Mode]) -> str:
    workload = modes[-1].workload
    lanes = f" ({_MAX_LANES} shown)" if cluster.generators > _MAX_LANES else ""
    return (
        f"{cluster.generators} generators{lanes} and {cluster.trainers} trainers, which work as one; "
        f"{workload.num_groups} groups of {workload.group_size} samples a step; dashed: new weights, the end of a step"
    )


def _unit(seconds: float) -> tuple[str, float]:
    return ("ms", 1e3) if seconds < 2 else ("s", 1.0)
