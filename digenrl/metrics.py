"""Metrics of one step, gathered row by row and joined exactly, whichever way the rows were batched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Reduction = Literal["mean", "max"]


@dataclass(frozen=True)
class MetricValue:
    """A metric over some rows, ready to be joined with the same metric over other rows."""

    reduction: Reduction
    total: float
    """Sum of the rows, or their maximum."""
    num_rows: int

    def join(self, other: MetricValue) -> MetricValue:
        """Give the metric over both sets of rows."""
        assert self.reduction == other.reduction, "one metric was reduced in two ways"
        if self.reduction == "mean" or math.isnan(self.total):
            total = self.total + other.total
        else:
            total = other.total if math.isnan(other.total) else max(self.total, other.total)
        return MetricValue(self.reduction, total, self.num_rows + other.num_rows)

    @property
    def value(self) -> float:
        """The reduced value."""
        return self.total if self.reduction == "max" else self.total / self.num_rows


class MetricAccumulator:
    """Collects the metrics of a step; `take` hands them over and starts anew."""

    def __init__(self) -> None:
        self._values: dict[str, MetricValue] = {}

    def add_rows(self, name: str, rows: Tensor, reduction: Reduction) -> None:
        """Add a metric's values [N] of some rows."""
        rows = rows.detach().double()
        total = (rows.max() if reduction == "max" else rows.sum()).item()
        self.join({name: MetricValue(reduction, total, rows.numel())})

    def join(self, values: Mapping[str, MetricValue]) -> None:
        """Add what another accumulator took."""
        for name, value in values.items():
            self._values[name] = self._values[name].join(value) if name in self._values else value

    def take(self) -> dict[str, MetricValue]:
        """Hand over what was collected since the last call."""
        values, self._values = self._values, {}
        return values
