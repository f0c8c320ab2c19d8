from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from PIL import Image

from digenrl.callbacks import Timeline, trace_events
from digenrl.callbacks.timeline import TASK_COLORS, draw_timeline, utilization
from digenrl.strategies.driver import WorkerSpan
from digenrl.strategies.span import Span
from tests.callbacks.runs import StopAt, fit, inline

SPANS = [
    WorkerSpan("generator-0", "sync", "version 2", Span(10.0, 10.1)),
    WorkerSpan("generator-0", "generate", "samples 0-3 of step 2", Span(10.1, 10.5)),
    WorkerSpan("generator-0", "score", "samples 0-3 of step 2", Span(10.5, 10.6)),
    WorkerSpan("trainer-0", "update", "micro-batch 0 of step 2", Span(10.6, 10.8)),
    WorkerSpan("trainer-0", "optimizer", "version 3", Span(10.8, 10.9)),
    WorkerSpan("trainer-0", "sync", "version 3", Span(10.9, 11.0)),
]


class StepSpans(pl.Callback):
    """Keeps the spans of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[WorkerSpan, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps.append(trainer.strategy.last_step_spans)


class LoggedUtilization(pl.Callback):
    """Keeps what was logged last."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.last = {name: float(value) for name, value in trainer.callback_metrics.items()}


class FailIn(pl.Callback):
    """Raises at the start of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("enough")


def bars(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def threads(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_the_trace_holds_the_spans_of_the_chosen_steps(tmp_path: Path) -> None:
    kept = StepSpans()
    trainer, _ = fit(tmp_path, kept, Timeline(first_step=1, num_steps=2), strategy=inline(), max_steps=4)
    events = json.loads((Path(trainer.log_dir) / "timeline.json").read_text())["traceEvents"]
    # The loads before the first step shown belong to the step before.
    begin_s = min(entry.span.start_s for entry in kept.steps[1] if entry.task == "generate")
    spans = [*(entry for entry in kept.steps[1] if entry.span.end_s >= begin_s), *kept.steps[2]]
    assert len(bars(events)) == len(spans)
    seconds = sum(entry.span.seconds for entry in spans)
    assert sum(event["dur"] for event in bars(events)) == pytest.approx(seconds * 1e6, abs=0.001 * len(spans))
    assert list(threads(events).values()) == ["generator-0", "generator-1", "trainer-0"]
    details = {event["args"]["detail"] for event in bars(events) if event["name"] == "update"}
    assert details == {f"micro-batch {index} of step {step}" for index in (0, 1) for step in (1, 2)}


def test_a_picture_is_written_beside_it(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, Timeline(first_step=1, num_steps=1), strategy=inline())
    image = Image.open(Path(trainer.log_dir) / "timeline.png").convert("RGB")
    colors = {color for _, color in image.getcolors(maxcolors=1 << 24)}
    assert image.width == 1800
    expected = {tuple(bytes.fromhex(color[1:])) for task, color in TASK_COLORS.items() if task != "assist"}
    assert expected <= colors


def test_events_are_in_microseconds_from_the_first_span() -> None:
    first, generate, *_ = bars(trace_events(SPANS))
    assert (first["ts"], first["name"]) == (0, "sync")
    assert generate == {
        "name": "generate",
        "cat": "generators",
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "ts": pytest.approx(1e5),
        "dur": pytest.approx(4e5),
        "args": {"detail": "samples 0-3 of step 2"},
    }


def test_spans_of_a_worker_do_not_overlap(tmp_path: Path) -> None:
    timeline = Timeline(first_step=0, num_steps=3)
    fit(tmp_path, timeline, strategy=inline())
    for worker in ("generator-0", "generator-1", "trainer-0"):
        spans = sorted((e.span for e in timeline.spans if e.worker == worker), key=lambda span: span.start_s)
        assert all(before.end_s <= after.start_s for before, after in zip(spans, spans[1:], strict=False))


def test_workers_without_a_span_have_a_lane_too() -> None:
    workers = [*(f"generator-{index}" for index in range(11)), "trainer-0"]
    lanes = list(threads(trace_events(SPANS, workers)).values())
    assert lanes == workers  # generators first, 10 after 9
    labels = draw_timeline(SPANS, workers).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == workers


def test_utilization_counts_computing_only() -> None:
    assert utilization(SPANS) == {"generators": pytest.approx(0.5), "trainers": pytest.approx(0.3)}
    assert utilization(SPANS, ["generator-1"])["generators"] == pytest.approx(0.25)
    pause = Span(10.6, 10.7)
    assert utilization(SPANS, pauses=[pause])["generators"] == pytest.approx(0.5 / 0.9)


def test_the_picture_has_a_bar_per_span_and_a_line_per_optimizer_step() -> None:
    (axes,) = draw_timeline(SPANS).axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([entry.span.seconds * 1e3 for entry in SPANS])
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([900])
    assert axes.get_title(loc="left") == "generators 50% busy, trainers 30% busy"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        task for task in TASK_COLORS if task != "assist"
    ]


def test_long_pictures_are_in_seconds() -> None:
    spans = [*SPANS, WorkerSpan("trainer-0", "update", "", Span(20, 100))]
    assert draw_timeline(spans).axes[0].get_xlabel() == "time from the first span, s"


def test_the_time_between_steps_is_a_pause(tmp_path: Path) -> None:
    timeline = Timeline(first_step=1, num_steps=2)
    fit(tmp_path, timeline, strategy=inline(), max_steps=4, val_check_interval=2)
    (pause,) = timeline.pauses  # with a validation in it
    updates = [entry.span for entry in timeline.spans if entry.task == "update"]
    assert any(span.end_s <= pause.start_s for span in updates)
    assert any(span.start_s >= pause.end_s for span in updates)
    assert not any(pause.start_s < span.end_s and span.start_s < pause.end_s for span in updates)


def test_utilization_is_the_logged_one_over_the_shorter_time_between_first_and_last_span(tmp_path: Path) -> None:
    timeline, logged = Timeline(first_step=2, num_steps=1), LoggedUtilization()
    fit(tmp_path, timeline, logged, strategy=inline())
    shares = utilization(timeline.spans, pauses=timeline.pauses)
    for group in ("generators", "trainers"):
        assert logged.last[f"util/{group}"] * 0.999 <= shares[group] <= 1.0


def test_a_stock_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`Timeline` .* `SingleDeviceStrategy`.*: remove the callback") as caught:
        fit(tmp_path, Timeline())
    assert "\n" not in str(caught.value)


def test_a_run_that_is_too_short_leaves_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer, _ = fit(tmp_path, Timeline(first_step=9), strategy=inline(), max_steps=1)
    assert "no timeline was written" in caplog.text
    assert not (Path(trainer.log_dir) / "timeline.json").exists()


def test_an_interrupted_run_leaves_the_steps_there_are(tmp_path: Path) -> None:
    timeline = Timeline(first_step=0)
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, timeline, StopAt(1, RuntimeError("enough")), strategy=inline())
    (path,) = tmp_path.glob("*/timeline.json")
    assert len(bars(json.loads(path.read_text())["traceEvents"])) == len(timeline.spans)


def test_the_pause_before_a_step_that_failed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "digenrl.callbacks.timeline.draw_timeline",
        lambda spans, workers, pauses: drawn.extend(pauses) or draw_timeline(spans, workers, pauses),
    )
    timeline = Timeline(first_step=0)
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, timeline, FailIn(2), strategy=inline())
    assert len(timeline.pauses) == 2
    assert drawn == timeline.pauses[:1]


@pytest.mark.parametrize(("settings", "name"), [({"first_step": -1}, "first_step"), ({"num_steps": 0}, "num_steps")])
def test_settings_out_of_bounds_are_refused(settings: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` .* must be at least"):
        Timeline(**settings)
