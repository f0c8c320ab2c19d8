"""What runs in the process of a Ray worker: one task after another, in the order in which they came."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import ray
import torch

from digenrl.engines.engine import WORKER_VARIABLE
from digenrl.engines.fork_server import keep_freed_memory
from digenrl.engines.local_worker import portable_error
from digenrl.engines.ray.objects import Serial, WorkerStore
from digenrl.engines.ray.surroundings import take_over

_MOST_LOG_BYTES = 1 << 16  # in one reply; the rest comes with the next ones
_ALL_BYTES = 1 << 30


@dataclass(frozen=True)
class Machine:
    """What tells whether two processes share memory and a clock."""

    name: str
    boot_id: str
    pid_namespace: int

    @classmethod
    def here(cls) -> Machine:
        """Describe the machine of this process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(socket.gethostname(), boot_id, os.stat("/proc/self/ns/pid").st_ino)


@dataclass(frozen=True)
class Whereabouts:
    """Where a worker runs."""

    pid: int
    node_id: str
    address: str
    machine: Machine
    log_file: str


class TaskRunner:
    """Does the tasks of one worker."""

    def __init__(self, worker: str) -> None:
        """Get the process ready for whatever it will be."""
        self._worker = worker
        self._log_file = redirect_output(worker)
        self._log_position = 0
        keep_freed_memory()
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        self._store = WorkerStore(worker)
        self._target: Any = None

    def run(self, message: bytes, *values: Any) -> tuple[bytes, tuple[Any, ...]]:
        """Do a task.

        Args:
            message: pickle of the name of a method, of the worker's object or, where it begins with two underscores, of
                this one; of its pickled arguments; and of the serials of the objects that these refer to, those that
                this worker has made apart from others.
            *values: first, if there are objects of its own, a list of Ray's references to them, which are read only if
                the task reads them; then what the makers of the others put.

        Returns:
            The pickled reply, and what the task has put.
        """
        method, arguments, own, others = pickle.loads(message)
        held, arrived = (values[0], values[1:]) if own else ((), values)
        sources: dict[Serial, Any] = dict(zip([*own, *others], [*held, *arrived], strict=True))
        has_failed = False
        try:
            args, kwargs = self._store.load(arguments, sources)
            is_own = method.startswith("__")
            call = getattr(self, f"do_{method.strip('_')}") if is_own else getattr(self._target, method)
            value = call(*args, **kwargs)
            payload = self._store.dump((value, None))
        except Exception as error:
            has_failed = True
            payload = self._store.dump((None, portable_error(error)))
        made = self._store.take()
        if has_failed:  # nobody would know of them
            made = made._replace(values=(), num_objects=0, num_inline_bytes=0)
        sys.stdout.flush()
        sys.stderr.flush()
        most_bytes = _ALL_BYTES if method == "__stop__" else _MOST_LOG_BYTES
        text, self._log_position = read_log(self._log_file, self._log_position, most_bytes)
        return pickle.dumps((payload, *made[1:], text, self._log_position)), made.values

    def do_start(
        self, factory: bytes, env: Mapping[str, str], extra: Mapping[str, str], *, one_host: bool, kept: Sequence[str]
    ) -> Whereabouts:
        """Make the worker's object in the driver's environment; see `take_over`."""
        take_over(env, extra, one_host=one_host, kept=kept)
        os.environ[WORKER_VARIABLE] = self._worker
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._target = cloudpickle.loads(factory)(self._store)
        context = ray.get_runtime_context()
        return Whereabouts(
            os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), Machine.here(), self._log_file
        )

    def do_clock(self) -> float:
        """Read this host's monotonic clock, in seconds."""
        return time.monotonic()

    def do_stop(self) -> None:
        """Send all that was printed; nothing is asked after this."""


def redirect_output(worker: str) -> str:
    """Let what this process prints, natively too, go to a file among Ray's logs; returns its path."""
    ray_log = Path(os.readlink("/proc/self/fd/1"))
    folder = ray_log.parent if ray_log.is_file() else Path(tempfile.gettempdir())
    path = folder / f"digenrl-{worker}-{os.getpid()}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    return str(path)


def read_log(path: str, start: int, most_bytes: int = _ALL_BYTES) -> tuple[str, int]:
    """Read a file from a byte position, at most so many bytes; returns the text and the position after it."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(most_bytes)
    if len(data) == most_bytes:  # between lines, and so between characters
        data = data[: data.rfind(b"\n") + 1] or data
    return data.decode(errors="replace"), start + len(data)


def ask_for_stacks(pid: int) -> None:
    """Have a worker of this host print where it is."""
    os.kill(pid, signal.SIGUSR1)
