"""Engines start workers and carry calls to them."""

from digenrl.engines.engine import (
    Engine,
    ObjectLost,
    ObjectRef,
    ObjectStore,
    RemoteTraceback,
    Task,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from digenrl.engines.inline import InlineEngine
from digenrl.engines.local import LocalEngine

__all__ = [
    "Engine",
    "InlineEngine",
    "LocalEngine",
    "ObjectLost",
    "ObjectRef",
    "ObjectStore",
    "RemoteTraceback",
    "Task",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
]
