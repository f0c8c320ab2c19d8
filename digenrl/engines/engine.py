"""What starts workers and carries calls to them, and how workers pass objects to each other."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

WORKER_VARIABLE = "DIGENRL_WORKER"
"""Of the environment of workers: their name."""

_DRIVER_HOST = "localhost"


class WorkerError(RuntimeError):
    """A worker could not do its task; the message names the worker, the task and the cause."""


class WorkerDied(WorkerError):
    """A worker's process ended."""

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message, worker)
        self.worker = worker
        """Which one."""

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerStartError(WorkerError):
    """A worker's object could not be made, by an error that its next start would meet again."""


class ObjectLost(WorkerError):
    """An object cannot be read, since the worker that kept it, `args[0]`, is gone."""

    def __str__(self) -> str:
        return f"an object that worker {self.args[0]} kept is gone."


class NoRoom(WorkerError):
    """A worker cannot be placed on any machine that is left."""


class WorkerTimeout(WorkerError):
    """A worker did not finish a task before its deadline."""

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message, worker)
        self.worker = worker
        """Which one."""

    def __str__(self) -> str:
        return str(self.args[0])


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in a worker, shown as the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Task:
    """A call on its way: the worker does its tasks in the order in which they were submitted."""

    def __init__(self, worker: str, name: str, timeout_s: float) -> None:
        self.worker = worker
        self.name = name
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._is_done

    @property
    def has_failed(self) -> bool:
        """Whether `result` would raise."""
        return self._error is not None

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Record the outcome."""
        self._is_done, self._value, self._error = True, value, error

    def result(self) -> Any:
        """Give the returned value, or raise the error that the worker raised."""
        assert self.is_done, "`result` of a task that is still running"
        if self._error is not None:
            raise self._error
        return self._value

    def __str__(self) -> str:
        return f"`{self.name}` on worker {self.worker}"


@dataclass(frozen=True)
class ObjectRef:
    """Names an object that a worker keeps; only this travels through the driver."""

    worker: str
    address: Any
    """Where the store finds the object; its form is the engine's own."""
    num_bytes: int


class ObjectStore(ABC):
    """A worker's side of passing objects: the maker keeps an object until it is freed, any worker may read it."""

    @abstractmethod
    def put(self, value: Any) -> ObjectRef:
        """Keep `value` for others to read."""

    @abstractmethod
    def get(self, ref: ObjectRef) -> Any:
        """Read an object that some worker keeps. Its tensors may be shared memory: treat them as read-only.

        Raises:
            ObjectLost: the worker that kept it is gone.
        """

    @abstractmethod
    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects that this worker keeps; readers that have them keep them."""


@dataclass(frozen=True)
class Requirements:
    """What a worker needs of the machine that it runs on."""

    role: str
    """Workers of a role are placed together where possible."""
    num_gpus: float = 0
    """Below 1 where several workers share one."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further ones, by the names that the cluster has given them."""
    unit: str = ""
    """Workers of one unit share a host; one that names none is a unit by itself."""


WorkerFactory = Callable[[ObjectStore], Any]
"""Makes the object whose methods are the worker's tasks; must be picklable by cloudpickle."""


class Engine(ABC):
    """Starts workers and carries calls to them. One thread of one process, the driver, owns it.

    Lifecycle: `start` workers, `submit` and `wait` any number of times, `shutdown` once. Every task has a
    deadline; a wait ends at the first one that passes.

    Example:
        >>> from digenrl.engines import InlineEngine
        >>> class Adder:
        ...     def __init__(self, store): pass
        ...     def add(self, a, b): return a + b
        >>> engine = InlineEngine()
        >>> engine.start("adder-0", Adder)
        >>> engine.call("adder-0", "add", 1, 2)
        3
        >>> engine.shutdown()
    """

    runs_beside_driver: ClassVar[bool] = True
    """Whether workers compute while the driver does something else."""

    store: ObjectStore
    """The driver's own access to what workers keep."""

    def __init__(self, task_timeout_s: float = 3600.0) -> None:
        if WORKER_VARIABLE in os.environ:
            raise RuntimeError(
                f"worker {os.environ[WORKER_VARIABLE]} would start workers of its own: it has imported a script that "
                "begins a run; put that under `if __name__ == '__main__':`."
            )
        self.task_timeout_s = task_timeout_s
        self.bytes_received = 0
        """Bytes of results that came to the driver; what a test of "the driver never holds a trajectory" counts."""

    def reserve(self, workers: Mapping[str, Requirements]) -> None:  # noqa: B027 (one host needs nothing)
        """Set aside what workers that will be started need; an engine of one host leaves that to the system.

        Raises:
            ValueError: the machines do not have it; the message says what they have.
        """

    def host(self, worker: str) -> str:
        """Give a name of the host that a running worker is on; equal names are the same host."""
        return _DRIVER_HOST

    @property
    def driver_address(self) -> str:
        """Network address under which workers reach this process."""
        return "127.0.0.1"

    def clock_offset_s(self, worker: str) -> float:
        """Give what is to be added to a worker's `time.monotonic()` to have this process's; 0 on the same host."""
        return 0.0

    def adopt(self, ref: ObjectRef) -> ObjectRef:
        """Keep an object alive though its maker may die; the driver's `store.free` lets go of it.

        Raises:
            ObjectLost: its maker is gone already.
        """
        return ref

    def free(self, refs: Sequence[ObjectRef]) -> list[Task]:
        """Let go of objects that workers keep, once what was submitted before has read them.

        Returns:
            The calls of the keepers' method `free`, where it is they who let go.
        """
        keepers: dict[str, list[ObjectRef]] = {}
        for ref in refs:
            keepers.setdefault(ref.worker, []).append(ref)
        return [self.submit(worker, "free", kept) for worker, kept in keepers.items()]

    def lost(self, refs: Sequence[ObjectRef]) -> list[ObjectRef]:
        """Name those of some objects that are gone with the host that kept them; on one host there are none."""
        return []

    def copy(self, ref: ObjectRef) -> Task | None:
        """Copy an object of the driver's to another host than its own; None if there is none.

        Returns:
            A task whose result is the copy's reference, or None where a host was lost meanwhile.
        """
        return None

    @abstractmethod
    def start(self, worker: str, factory: WorkerFactory, *, env: Mapping[str, str] | None = None) -> None:
        """Start a worker under a name that is not in use, with extra environment variables.

        Raises:
            NoRoom: no machine has what was reserved for it, since one was lost.
        """

    @abstractmethod
    def submit(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Task:
        """Queue a call of a method of the worker's object."""

    @abstractmethod
    def wait(self, tasks: Sequence[Task], timeout_s: float) -> list[Task]:
        """Wait until a task is done or `timeout_s` seconds have passed; give the tasks that are done.

        Raises:
            WorkerTimeout: a task passed its deadline.
        """

    @abstractmethod
    def unfinished(self, worker: str) -> list[Task]:
        """Give the tasks that a worker has not done; the first is the one it is at."""

    @abstractmethod
    def kill(self, worker: str) -> None:
        """End a worker at once; its tasks fail with `WorkerDied`."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers. Safe to call twice."""

    def gather(self, tasks: Sequence[Task]) -> list[Any]:
        """Wait for all tasks and give their results in order; the first failure is raised at once."""
        waiting = list(tasks)
        while waiting:
            for task in self.wait(waiting, timeout_s=0.2):
                task.result()
                waiting.remove(task)
        return [task.result() for task in tasks]

    def call(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a call and wait for its result."""
        return self.gather([self.submit(worker, method, *args, **kwargs)])[0]

    def drain(self, worker: str, timeout_s: float) -> None:
        """Wait until a worker, if it still runs, has nothing to do.

        Raises:
            WorkerTimeout: it does not within `timeout_s` seconds; the message names the task it is at.
        """
        end_s = time.monotonic() + timeout_s
        while tasks := self.unfinished(worker):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise WorkerTimeout(f"worker {worker} is still at task `{tasks[0].name}`.", worker)
            self.wait(tasks[-1:], left_s)

    def _check_deadlines(self, tasks: Sequence[Task]) -> None:
        now_s = time.monotonic()
        for task in tasks:
            if not task.is_done and now_s > task.deadline_s:
                self._dump_stacks(task.worker)
                raise WorkerTimeout(
                    f"{task} did not finish within {task.timeout_s:g} s; raise `task_timeout_s` if it may take longer.",
                    task.worker,
                )

    @abstractmethod
    def _dump_stacks(self, worker: str) -> None:
        """Have a worker print where it is, if it can."""
