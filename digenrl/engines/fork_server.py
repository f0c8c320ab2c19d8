"""A process that has imported the heavy libraries once and forks workers from there.

A fork takes hundredths of a second and shares the imported pages, where a fresh interpreter takes seconds and
its own copy. It is not `multiprocessing`'s server because that runs the user's main script again in every
child. The driver sends requests over a socket pair and passes each worker its end of another.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress

from digenrl.engines.local_worker import serve

PRELOAD = ("torch", "lightning.pytorch", "cloudpickle", "digenrl.module")
"""What a worker imports before it is told its task."""

_MAX_REQUEST_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES, _LARGEST_KEPT_BYTES = 1 << 29, 1 << 25


class ForkServer:
    """The driver's side: starts the server on first use, asks it to fork, asks how a worker ended."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._num_requests = 0

    def fork(self, worker: str, connection: socket.socket) -> int:
        """Fork a worker that serves `connection`; returns its process id."""
        if not self._is_running():
            self._start()
        pid = self._request(("fork", worker), [connection.fileno()])
        assert isinstance(pid, int)
        return pid

    def reap(self, pid: int) -> int:
        """Wait for a worker that has ended or is about to; returns its exit code, negative for a signal."""
        killed_with_server = -int(signal.SIGKILL)
        if not self._is_running():
            return killed_with_server
        try:
            code = self._request(("reap", pid), [])
        except (OSError, EOFError):
            return killed_with_server
        assert isinstance(code, int)
        return code

    def stop(self) -> None:
        """End the server; its workers die with it."""
        if self._socket is not None and self._process is not None:
            # Said, not only closed: a child of the driver's own may hold a copy of the socket.
            with suppress(OSError):
                self._socket.send(pickle.dumps((0, "stop")))
            self._socket.close()
            self._process.wait()
            self._socket = self._process = None

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _request(self, request: tuple[object, ...], fds: list[int]) -> object:
        assert self._socket is not None
        self._num_requests += 1
        socket.send_fds(self._socket, [pickle.dumps((self._num_requests, *request))], fds)
        while True:
            number, answer = pickle.loads(self._socket.recv(_MAX_REQUEST_BYTES))
            if number == self._num_requests:  # an earlier one is of a request that Ctrl-C has cut short
                return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", f"from digenrl.engines.fork_server import main; main({theirs.fileno()})"]
        with theirs:
            # Its own session: Ctrl-C reaches the driver alone, which then ends the workers in order.
            self._process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
            )
        self._socket = ours
        atexit.register(self.stop)


def main(fd: int) -> None:
    """Serve requests until the driver closes its end or dies."""
    die_with_parent()
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection in a child would touch, and so copy, every shared page
    server = socket.socket(fileno=fd)
    while True:
        message, fds, _, _ = socket.recv_fds(server, _MAX_REQUEST_BYTES, 1)
        if not message:
            return
        match pickle.loads(message):
            case (number, "fork", worker):
                pid = os.fork()
                if pid == 0:
                    server.close()
                    _run_worker(worker, fds[0])
                os.close(fds[0])
                answer = number, pid
            case (_, "stop"):
                return
            case (number, "reap", pid):
                answer = number, _wait_for(pid)
        try:
            server.send(pickle.dumps(answer))
        except BrokenPipeError:  # the driver ends, and has not waited for it
            return


def _wait_for(pid: int) -> int:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # a child of an earlier server, with which it died
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status)


def _run_worker(worker: str, fd: int) -> None:
    die_with_parent()
    code = 1
    try:
        serve(worker, fd)
    except BaseException as error:  # such as `sys.exit` in a task: say why before the process ends
        traceback.print_exc()
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
    finally:
        os._exit(code)  # never return into the server's loop


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that dies (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def keep_freed_memory() -> None:
    """Have glibc keep freed host memory for the next tensor, in this process and those forked from it.

    A worker frees and allocates the same tensors at every step; by default each large one goes back to the kernel, and
    comes back as zeroed pages, one fault each. Keeps at most half a GiB of free memory per process.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)  # the largest that glibc allows
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_TOP_PAD, _KEPT_BYTES // 8)
