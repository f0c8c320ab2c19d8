"""Engines start workers and carry calls to them."""

from digenrl.engines.engine import (
    Engine,
    ObjectLost,
    ObjectRef,
    ObjectStore,
    RemoteTraceback,
    Requirements,
    Task,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from digenrl.engines.inline import InlineEngine
from digenrl.engines.joined import JoinedTask
from digenrl.engines.local import LocalEngine

__all__ = [
    "Engine",
    "InlineEngine",
    "JoinedTask",
    "LocalEngine",
    "ObjectLost",
    "ObjectRef",
    "ObjectStore",
    "RemoteTraceback",
    "Requirements",
    "Task",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
]
