"""The part of a worker that sends and receives weights."""

from __future__ import annotations

import time
from typing import Any

from digenrl.strategies.span import Span
from digenrl.strategies.weight_planes import Holding, Opening, PlaneEnd, WriteReport, reads_token
from digenrl.strategies.workers.base import WorkerBase


class Weights(WorkerBase):
    """A worker's end of the weight plane."""

    _end: PlaneEnd | None = None

    def reads_token(self, path: str, token: bytes) -> bool:
        """Whether this worker can map the driver's memory."""
        return reads_token(path, token)

    def weights_holding(self) -> Holding:
        """Say which rows of which tensors a transfer finds here."""
        return Holding.of(self._module.published_weights(), self._trained_parameters())

    def open_weights(self, opening: Opening) -> None:
        """Take up this worker's end of the plane."""
        if self._end is not None:
            self._end.close()
        self._end = opening.open_for(self._module.published_weights, self.weights_holding(), self._store)

    def write_weights(self, version: int) -> WriteReport:
        """Hand over this trainer's share of the weights that generators need."""
        assert self._end is not None, "`write_weights` comes after `open_weights`"
        start_s = time.monotonic()
        return WriteReport(self._end.write(version), Span(start_s, time.monotonic()))

    def sampler_steps(self) -> int:
        """Give how many optimizer steps the copy that makes the samples has followed; 0 if there is none."""
        return self._module.sampler_steps

    def load_weights(self, version: int, source: Any, digests: bytes) -> Span:
        """Load published weights and check that they are those that were sent."""
        assert self._end is not None, "`load_weights` comes after `open_weights`"
        start_s = time.monotonic()
        self._end.weights.check(version, self._end.read(version, source), digests)
        self.policy_version = version
        return Span(start_s, time.monotonic())
