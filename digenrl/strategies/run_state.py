"""The weights and the optimizer's state of a run, as checkpoints have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from digenrl.engines import ObjectRef, Task

if TYPE_CHECKING:
    from digenrl.strategies.pool import WorkerPool


class RunState:
    """Fetches the state of a run from its workers, and replaces it.

    It is that of the trainers, or of the first generator while there are none: one worker hands it over, but all who
    have a share of it put it together.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.frozen_digest = ""
        """Of the frozen weights that workers build."""
        self._pool = pool
        self._engine = pool.engine
        self._loaded: list[tuple[ObjectRef, bool]] = []
        """Weights that replaced what workers build, and that trainers do not send; each with whether it is all."""
        self._is_ahead = False
        """Whether workers had other weights loaded than they build, before there were trainers."""

    def await_free(self, timeout_s: float) -> None:
        """Wait until the workers that have the state are free.

        Raises:
            WorkerTimeout: one is not within `timeout_s` seconds.
        """
        end_s = time.monotonic() + timeout_s
        for keeper in self._keepers:
            self._engine.drain(keeper, max(end_s - time.monotonic(), 0.0))

    def fetch_weights(self) -> dict[str, Any]:
        """Fetch the weights: the trainers', if there are any."""
        return self._fetch(lambda: self._keepers, "state_dict")

    def push_weights(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Replace the weights of all workers."""
        pool = self._pool
        ref = self._engine.store.put(dict(state_dict))
        pool.change(
            lambda: [*pool.trainers, *pool.generator_ranks, *pool.reward_workers], "load_state_dict", ref, strict
        )
        self._is_ahead = self._is_ahead or not pool.trainers
        if pool.recovery.is_possible and self._must_be_loaded_again():
            if strict:
                self.free()
            self._loaded.append((ref, strict))
        else:
            self._engine.store.free([ref])

    def submit_loads(self, worker: str) -> list[Task]:
        """Queue on a worker that was started again, and builds, what replaced the frozen weights meanwhile."""
        return [self._engine.submit(worker, "load_state_dict", ref, strict) for ref, strict in self._loaded]

    def hand_over(self) -> None:
        """Give trainers that were just built the weights that others had loaded before there were any."""
        if not self._is_ahead:
            return
        pool = self._pool

        def hand_over() -> None:
            ref = pool.call(pool.ranks_of(pool.generators[0]), "state_dict")[0]
            pool.call(pool.trainers, "load_state_dict", ref, True)
            self._engine.gather(self._engine.free([ref]))

        pool.recovery.run(hand_over)
        self._is_ahead = False

    def fetch_optimizer_state(self) -> dict[str, Any]:
        """Fetch the optimizer's state by parameter name."""
        return self._fetch(lambda: self._pool.trainers, "optimizer_state")

    def push_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state on all trainers."""
        ref = self._engine.store.put(dict(state))
        self._pool.change(lambda: self._pool.trainers, "load_optimizer_state", ref)
        self._engine.store.free([ref])

    def free(self) -> None:
        """Let go of what was kept for workers that are started again."""
        self._engine.store.free([ref for ref, _ in self._loaded])
        self._loaded.clear()

    @property
    def _keepers(self) -> Sequence[str]:
        return self._pool.trainers or self._pool.ranks_of(self._pool.generators[0])

    def _must_be_loaded_again(self) -> bool:
        """Whether workers that are started again would lack something that was loaded, and trainers do not send."""
        pool = self._pool
        if pool.published_version is None:
            return True
        digests = pool.recovery.run(lambda: pool.call(pool.ranks_of(pool.generators[0]), "frozen_digest"))
        return bool(digests[0] != self.frozen_digest)

    def _fetch(self, workers: Callable[[], Sequence[str]], method: str) -> dict[str, Any]:
        """Have workers that share a state put it together, and take it from the first.

        They are asked for with each attempt anew: one may be given up in between.
        """

        def fetch() -> dict[str, Any]:
            ref = self._pool.call(workers(), method)[0]
            # A copy: what was read is memory that the worker is about to give back.
            state: dict[str, Any] = _clone_tensors(self._engine.store.get(ref))
            self._engine.gather(self._engine.free([ref]))
            return state

        self._pool.recovery.check_state()
        return self._pool.recovery.run(fetch)


def _clone_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("cpu", copy=True)  # quantized state of an optimizer has no `clone`
    if isinstance(value, dict):
        return {key: _clone_tensors(entry) for key, entry in value.items()}
    return value
