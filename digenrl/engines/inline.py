"""Workers as plain objects in this process, for tests and for debugging with breakpoints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from digenrl.engines.engine import Engine, ObjectRef, ObjectStore, Task, WorkerDied, WorkerFactory


class InlineStore(ObjectStore):
    """Objects of one worker, passed by reference."""

    def __init__(self, worker: str, stores: dict[str, InlineStore]) -> None:
        self._worker = worker
        self._stores = stores
        self._objects: dict[int, Any] = {}
        self._keys = itertools.count()
        stores[worker] = self

    def put(self, value: Any) -> ObjectRef:
        """Keep `value`."""
        key = next(self._keys)
        self._objects[key] = value
        return ObjectRef(self._worker, key, num_bytes=0)

    def get(self, ref: ObjectRef) -> Any:
        """Give the very object that was put."""
        return self._stores[ref.worker]._objects[ref.address]

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects of this worker."""
        for ref in refs:
            del self._objects[ref.address]


class InlineEngine(Engine):
    """Runs each task when it is submitted."""

    runs_beside_driver = False

    def __init__(self, task_timeout_s: float = 3600.0) -> None:
        super().__init__(task_timeout_s)
        self._workers: dict[str, Any] = {}
        self._stores: dict[str, InlineStore] = {}
        self.store = InlineStore("driver", self._stores)

    def start(self, worker: str, factory: WorkerFactory, *, env: Mapping[str, str] | None = None) -> None:
        """Make the worker's object; `env` is for processes and does not apply."""
        assert worker not in self._workers, f"worker {worker} runs already"
        self._workers[worker] = factory(InlineStore(worker, self._stores))

    def submit(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Task:
        """Run the call now; an error is kept for `Task.result`."""
        task = Task(worker, method, self.task_timeout_s)
        if worker not in self._workers:
            task.finish(error=WorkerDied(f"worker {worker} is not running, task `{task.name}`.", worker))
            return task
        try:
            task.finish(getattr(self._workers[worker], method)(*args, **kwargs))
        except Exception as error:
            task.finish(error=error)
        return task

    def wait(self, tasks: Sequence[Task], timeout_s: float) -> list[Task]:
        """Give the tasks back: all are done."""
        return list(tasks)

    def unfinished(self, worker: str) -> list[Task]:
        """Give none: an inline task is done when it is submitted."""
        return []

    def _dump_stacks(self, worker: str) -> None:
        """Do nothing: an inline task is done when it is submitted."""

    def kill(self, worker: str) -> None:
        """Drop the worker's object and what it keeps."""
        self._workers.pop(worker, None)
        self._stores.pop(worker, None)

    def shutdown(self) -> None:
        """Drop all workers."""
        for worker in list(self._workers):
            self.kill(worker)
