"""What runs in a local worker's process: one task after another, in the order in which they came."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from digenrl.engines.engine import WORKER_VARIABLE


def serve(worker: str, fd: int) -> None:
    """Serve the driver's messages until it says stop or its end closes; does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The driver asks a worker that missed its deadline where it hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    from digenrl.engines.shared_memory import SharedMemoryStore, allow_open_files

    allow_open_files()
    connection = Connection(fd)
    try:
        first = connection.recv_bytes()
    except EOFError:  # the driver has died in between
        os._exit(1)
    env, sys.path[:], folder = pickle.loads(first)
    # The driver's environment of now, and nothing of that which the fork server was started in.
    os.environ.clear()
    os.environ.update(env)
    os.environ[WORKER_VARIABLE] = worker
    os.chdir(folder)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread reads, so that the driver never blocks on a worker that is itself sending.
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    target: Any = None
    while True:
        message = inbox.get()
        if message is None:
            break
        task_id, method, arguments = pickle.loads(message)
        try:
            args, kwargs = cloudpickle.loads(arguments)
            if method == "__start__":
                target, value = args[0](SharedMemoryStore(worker)), None
            else:
                value = getattr(target, method)(*args, **kwargs)
            reply = cloudpickle.dumps((task_id, value, None))
        except Exception as error:
            reply = cloudpickle.dumps((task_id, None, portable_error(error)))
        connection.send_bytes(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _receive(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)  # the driver is gone: nobody wants the rest
        inbox.put(message or None)


def portable_error(error: Exception) -> tuple[Exception, str]:
    """Give the error in a form that survives the way, with its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # any class may fail to pickle, in any way; the text says all there is
        return RuntimeError(f"{type(error).__name__}: {error}"), text
    return error, text
