"""Where the ranks of a group of workers meet."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from digenrl.engines import Engine
from digenrl.strategies.workers import RankGroup


class Rendezvous:
    """Tells workers that compute together of each other, at a store of this process that is made when it is needed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store: TCPStore | None = None
        self._num_groups = 0

    def make_groups(self, name: str, ranks: Sequence[str]) -> list[RankGroup]:
        """Say to each of some running workers who the group is, under a name that no group had before."""
        if len(ranks) > 1 and self._store is None:
            self._store = TCPStore(self._engine.driver_address, 0, is_master=True, wait_for_workers=False)
        self._num_groups += 1
        hosts = tuple(self._engine.host(rank) for rank in ranks)
        return [
            RankGroup(
                self._engine.driver_address,
                self._store.port if self._store is not None else 0,
                f"{name}-{self._num_groups}",
                rank,
                hosts,
                self._engine.task_timeout_s,
            )
            for rank in range(len(ranks))
        ]

    def close(self) -> None:
        """Let go of the store, once the workers are gone."""
        self._store = None
