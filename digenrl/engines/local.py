"""Workers as processes of this host."""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from digenrl.engines.engine import Engine, ObjectLost, ObjectRef, RemoteTraceback, Task, WorkerDied, WorkerFactory
from digenrl.engines.fork_server import ForkServer
from digenrl.engines.shared_memory import SharedMemoryStore, allow_open_files

_SLICE_S = 0.2  # longest wait without a look at signals and deadlines
_STOP_S = 5.0  # what a worker gets to end by itself

_fork_server = ForkServer()


class _Process:
    """The driver's view of one worker process."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        # A worker's own children may hold its end of the connection open, so that its death is not an end of file.
        self.death = os.pidfd_open(pid)
        self.connection = connection
        self.tasks: dict[int, Task] = {}


class LocalEngine(Engine):
    """Runs each worker in a process of its own, forked from a server that has the libraries imported (Linux).

    Workers ignore Ctrl-C and die with the driver. Their errors are raised here as they were raised there, with
    the worker's traceback as the cause. Several engines of one driver share the fork server.
    """

    def __init__(self, task_timeout_s: float = 3600.0) -> None:
        super().__init__(task_timeout_s)
        self._processes: dict[str, _Process] = {}
        self._causes: dict[str, str] = {}
        self._task_ids = itertools.count()
        self.store: SharedMemoryStore = SharedMemoryStore("driver")

    def start(self, worker: str, factory: WorkerFactory, *, env: Mapping[str, str] | None = None) -> None:
        """Fork a process and let it make its object; an error of the factory is raised here."""
        assert worker not in self._processes, f"worker {worker} runs already"
        ours, theirs = socket.socketpair()
        with theirs:
            pid = _fork_server.fork(worker, theirs)
        self._causes.pop(worker, None)
        process = self._processes[worker] = _Process(pid, Connection(ours.detach()))
        try:
            # The driver's surroundings of now; the server has those of its own start.
            process.connection.send_bytes(pickle.dumps(({**os.environ, **(env or {})}, sys.path, os.getcwd())))
            self.call(worker, "__start__", factory)
        except BaseException:
            self.kill(worker)
            raise

    def adopt(self, ref: ObjectRef) -> ObjectRef:
        """Hold the object's memory open in this process, too."""
        allow_open_files()  # each object kept is one
        return self.store.adopt(ref)

    def submit(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Task:
        """Send the call; fails at once if the worker has died."""
        task = Task(worker, method.strip("_"), self.task_timeout_s)
        process = self._processes.get(worker)
        if process is None:
            task.finish(error=self._death(task))
            return task
        task_id = next(self._task_ids)
        process.tasks[task_id] = task
        try:
            # The arguments apart: a task whose arguments do not load there fails by itself.
            process.connection.send_bytes(pickle.dumps((task_id, method, cloudpickle.dumps((args, kwargs)))))
        except OSError:
            self._bury(worker)
        return task

    def wait(self, tasks: Sequence[Task], timeout_s: float) -> list[Task]:
        """Receive results until one of `tasks` is done or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not any(task.is_done for task in tasks):
            self._check_deadlines(tasks)
            left_s = end_s - time.monotonic()
            self._receive(min(max(left_s, 0.0), _SLICE_S))
            if left_s <= 0:
                break
        return [task for task in tasks if task.is_done]

    def unfinished(self, worker: str) -> list[Task]:
        """Give what was sent to a worker and has brought no result."""
        process = self._processes.get(worker)
        return [] if process is None else list(process.tasks.values())

    def kill(self, worker: str) -> None:
        """Send SIGKILL and wait until the process is gone."""
        process = self._processes.get(worker)
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            self._bury(worker)

    def shutdown(self) -> None:
        """Ask the workers to stop; kill those that do not within five seconds."""
        for process in self._processes.values():
            try:
                process.connection.send_bytes(b"")
            except OSError:  # it died before
                continue
        end_s = time.monotonic() + _STOP_S
        while self._processes and time.monotonic() < end_s:
            self._receive(_SLICE_S)
        for worker in list(self._processes):
            self.kill(worker)

    def _receive(self, timeout_s: float) -> None:
        workers: dict[int, str] = {}
        for worker, process in self._processes.items():
            workers[process.connection.fileno()] = workers[process.death] = worker
        for file in _readable(workers, timeout_s):
            worker = workers[file]
            if worker in self._processes:  # not buried for its other source just now
                self._receive_from(worker, self._processes[worker])

    def _receive_from(self, worker: str, process: _Process) -> None:
        """Take a result, or bury a worker that has died and has left none."""
        file = process.connection.fileno()
        readable = _readable([file, process.death], 0.0)
        if not readable:  # a signal's handler has taken it meanwhile
            return
        try:
            message = process.connection.recv_bytes() if file in readable else None
        except (EOFError, OSError):
            message = None
        if message is None:
            self._bury(worker)
            return
        self.bytes_received += len(message)
        task_id, value, failure = pickle.loads(message)
        task = process.tasks.pop(task_id)
        if failure is None:
            task.finish(value)
        else:
            error, text = failure
            if isinstance(error, ObjectLost) and self._has_died(error.args[0]):
                # A reader may miss an object before the death of its maker, the cause, is noticed here.
                died = f"worker {error.args[0]} {self._causes[error.args[0]]}"
                error = WorkerDied(f"{died}, task `{task.name}` on worker {worker} needed what it kept.", error.args[0])
            error.__cause__ = RemoteTraceback(f"in worker {worker}, task `{task.name}`:\n{text}")
            task.finish(error=error)

    def _has_died(self, worker: str) -> bool:
        process = self._processes.get(worker)
        if process is not None and wait([process.death], _SLICE_S):
            self._bury(worker)
        return worker in self._causes

    def _bury(self, worker: str) -> None:
        process = self._processes.pop(worker)
        process.connection.close()
        os.close(process.death)
        code = _fork_server.reap(process.pid)
        self._causes[worker] = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        for task in process.tasks.values():
            task.finish(error=self._death(task))

    def _death(self, task: Task) -> WorkerDied:
        return WorkerDied(
            f"worker {task.worker} {self._causes.get(task.worker, 'is not running')}, task `{task.name}`.", task.worker
        )

    def _dump_stacks(self, worker: str) -> None:
        process = self._processes.get(worker)
        if process is not None:
            os.kill(process.pid, signal.SIGUSR1)  # prints its stacks to stderr


def _readable(files: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for files that have something to read, in a tenth of the time that a `multiprocessing` wait takes.

    The poll object is new each time: a signal's handler may wait while this waits.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(timeout_s * 1e3)]
