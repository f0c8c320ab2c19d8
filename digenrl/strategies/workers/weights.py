"""The part of a worker that sends and receives weights."""

from __future__ import annotations

import time
from collections.abc import Sequence

from digenrl.strategies.weight_planes import ArenaLayout, WeightArena, WeightSyncError, WrittenWeights, weights_digest
from digenrl.strategies.workers.base import WorkerBase
from digenrl.strategies.workers.reports import Span


class Weights(WorkerBase):
    """A worker's end of the weight plane."""

    _arena: WeightArena

    def weights_layout(self) -> ArenaLayout:
        """Say what a transfer of the trained weights consists of."""
        return ArenaLayout.of(self._module.published_weights())

    def open_arena(self, paths: Sequence[str]) -> None:
        """Map the shared memory that weights travel through."""
        self._arena = WeightArena(paths, self.weights_layout())

    def write_weights(self, slot: int) -> WrittenWeights:
        """Write the weights that generators need; one rank does, all have the same."""
        published, trained = self._module.published_weights(), self._trained_parameters()
        if self._rank == 0:
            self._arena.write(slot, published)
        digest = weights_digest(published.items())
        return WrittenWeights(digest, digest if len(published) == len(trained) else weights_digest(trained.items()))

    def sampler_steps(self) -> int:
        """Give how many optimizer steps the copy that makes the samples has followed; 0 if there is none."""
        return self._module.sampler_steps

    def load_weights(self, slot: int, version: int, digest: str) -> Span:
        """Load published weights and check that they are those that were sent."""
        start_s = time.monotonic()
        published = self._module.published_weights()
        self._arena.read(slot, published)
        loaded = weights_digest(published.items())
        if loaded != digest:
            raise WeightSyncError(f"weights of version {version} arrived as {loaded}, but were sent as {digest}.")
        self.policy_version = version
        return Span(start_s, time.monotonic())
