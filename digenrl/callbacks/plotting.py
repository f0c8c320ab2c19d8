"""What the callbacks' plots share: matplotlib, which is optional, and one look."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#2b2f36"
QUIET = "#6b7280"
GRID = "#e5e7eb"


def require_matplotlib() -> None:
    """Fail before a run rather than at its end.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the plots of a run need `matplotlib`, which is not installed: `pip install digenrl[plot]`."
        ) from error


def new_plot(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure of `width` x `height` inches with one set of axes.

    Without pyplot, which would keep every figure and might look for a display.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15)  # inches around the axes
    figure = Figure(figsize=(width, height), dpi=150, layout=layout, facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(colors=QUIET, labelsize=9, labelcolor=INK)
    axes.set_axisbelow(True)
    return figure, axes


def add_titles(axes: Axes, title: str, subtitle: str, *, pad: float = 8) -> None:
    """Put a title and a quieter line below it over the left edge of the axes, `pad` points above it."""
    axes.set_title(subtitle, loc="left", fontsize=9.5, color=QUIET, pad=pad)
    axes.annotate(
        title,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, pad + 18),
        textcoords="offset points",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
