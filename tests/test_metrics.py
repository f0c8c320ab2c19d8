"""Metrics over rows, however the rows were batched."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from digenrl.metrics import MetricAccumulator, MetricValue, Reduction

ROWS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30)
CUTS = st.lists(st.integers(1, 29), max_size=4)


def parts_of(rows: list[float], cuts: list[int]) -> list[list[float]]:
    borders = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    return [rows[start:stop] for start, stop in zip(borders[:-1], borders[1:], strict=True)]


@given(ROWS, CUTS)
def test_a_mean_is_the_mean_over_all_rows(rows: list[float], cuts: list[int]) -> None:
    metrics = MetricAccumulator()
    for part in parts_of(rows, cuts):
        metrics.add_rows("loss", torch.tensor(part), "mean")
    value = metrics.take()["loss"]
    assert value.num_rows == len(rows)
    assert value.value == pytest.approx(math.fsum(rows) / len(rows), rel=1e-9, abs=1e-6)


@given(ROWS, CUTS)
def test_a_maximum_is_the_maximum_over_all_rows(rows: list[float], cuts: list[int]) -> None:
    metrics = MetricAccumulator()
    for part in parts_of(rows, cuts):
        metrics.add_rows("deviation", torch.tensor(part), "max")
    assert metrics.take()["deviation"].value == max(rows)


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("rows", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]])
def test_a_nan_shows_whatever_the_order(rows: list[float], reduction: Reduction) -> None:
    metrics = MetricAccumulator()
    for row in rows:
        metrics.add_rows("deviation", torch.tensor([row]), reduction)
    assert math.isnan(metrics.take()["deviation"].value)


@given(ROWS, CUTS, st.sampled_from(["mean", "max"]))
def test_workers_metrics_join_to_those_of_one_worker(rows: list[float], cuts: list[int], reduction: Reduction) -> None:
    alone, joined = MetricAccumulator(), MetricAccumulator()
    alone.add_rows("x", torch.tensor(rows), reduction)
    for part in parts_of(rows, cuts):
        worker = MetricAccumulator()
        worker.add_rows("x", torch.tensor(part), reduction)
        joined.join(worker.take())
    left, right = alone.take()["x"], joined.take()["x"]
    assert left.num_rows == right.num_rows
    assert left.value == pytest.approx(right.value, rel=1e-9, abs=1e-6)


def test_rows_of_low_precision_are_summed_in_double() -> None:
    metrics = MetricAccumulator()
    for _ in range(1000):
        metrics.add_rows("x", torch.full((1,), 0.1, dtype=torch.bfloat16), "mean")
    assert metrics.take()["x"].value == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)), rel=1e-12)


def test_rows_with_a_gradient_are_taken_without_it() -> None:
    metrics = MetricAccumulator()
    metrics.add_rows("x", torch.ones(3, requires_grad=True), "mean")
    assert metrics.take()["x"] == MetricValue("mean", 3.0, 3)


def test_taking_starts_anew_and_names_are_kept_apart() -> None:
    metrics = MetricAccumulator()
    metrics.add_rows("a", torch.tensor([1.0]), "mean")
    metrics.add_rows("b", torch.tensor([2.0]), "max")
    assert {name: value.value for name, value in metrics.take().items()} == {"a": 1.0, "b": 2.0}
    assert metrics.take() == {}


def test_one_metric_reduced_in_two_ways_is_a_bug() -> None:
    metrics = MetricAccumulator()
    metrics.add_rows("x", torch.tensor([1.0]), "mean")
    with pytest.raises(AssertionError, match="two ways"):
        metrics.add_rows("x", torch.tensor([1.0]), "max")
