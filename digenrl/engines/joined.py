"""Calls of several workers that are one to the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from digenrl.engines.engine import Task


class JoinedTask(Task):
    """Done when all its parts are, or one has failed: its peers may then wait for it in vain."""

    def __init__(self, worker: str, parts: Sequence[Task], join: Callable[[list[Any]], Any]) -> None:
        """Join calls of the ranks of `worker`; `join` makes one result of theirs, in their order."""
        super().__init__(worker, parts[0].name, parts[0].timeout_s)
        self.parts = tuple(parts)
        self._join = join

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error."""
        return all(part.is_done for part in self.parts) or any(part.has_failed for part in self.parts)

    @property
    def has_failed(self) -> bool:
        """Whether a part has."""
        return any(part.has_failed for part in self.parts)

    def result(self) -> Any:
        """Give the joined result, or raise the first error."""
        for part in self.parts:
            if part.has_failed:
                part.result()
        return self._join([part.result() for part in self.parts])
