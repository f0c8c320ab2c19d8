"""Engines start workers and carry calls to them."""

from typing import TYPE_CHECKING, Any

from digenrl.engines.engine import (
    Engine,
    NoRoom,
    ObjectLost,
    ObjectRef,
    ObjectStore,
    RemoteTraceback,
    Requirements,
    Task,
    WorkerDied,
    WorkerError,
    WorkerStartError,
    WorkerTimeout,
)
from digenrl.engines.inline import InlineEngine
from digenrl.engines.joined import JoinedTask
from digenrl.engines.local import LocalEngine

if TYPE_CHECKING:
    from digenrl.engines.ray import RayEngine

__all__ = [
    "Engine",
    "InlineEngine",
    "JoinedTask",
    "LocalEngine",
    "NoRoom",
    "ObjectLost",
    "ObjectRef",
    "ObjectStore",
    "RayEngine",
    "RemoteTraceback",
    "Requirements",
    "Task",
    "WorkerDied",
    "WorkerError",
    "WorkerStartError",
    "WorkerTimeout",
]


def __getattr__(name: str) -> Any:
    """Import the engine that needs Ray when it is asked for."""
    if name == "RayEngine":
        from digenrl.engines.ray import RayEngine

        return RayEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
