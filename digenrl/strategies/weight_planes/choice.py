"""Which weight plane a run takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from digenrl.engines import Engine
from digenrl.strategies.weight_planes.collective import CollectivePlane
from digenrl.strategies.weight_planes.object_store import ObjectStorePlane
from digenrl.strategies.weight_planes.plane import WeightPlane
from digenrl.strategies.weight_planes.shared_memory import SharedMemoryPlane, workers_without_memory

WeightPlaneName = Literal["auto", "shared_memory", "object_store", "collective"]

PLANES: Mapping[str, type[WeightPlane]] = {
    "shared_memory": SharedMemoryPlane,
    "object_store": ObjectStorePlane,
    "collective": CollectivePlane,
}


def choose_plane(name: WeightPlaneName, engine: Engine, workers: Sequence[str]) -> WeightPlane:
    """Make the plane of that name; `"auto"` is shared memory if all workers can map this process's.

    Raises:
        ValueError: `"shared_memory"`, and a worker cannot.
    """
    if name not in ("auto", "shared_memory"):
        return PLANES[name](engine)
    without = workers_without_memory(engine, workers)
    if name == "auto":
        return ObjectStorePlane(engine) if without else SharedMemoryPlane(engine)
    if without:
        raise ValueError(
            f"`weight_plane` shared_memory needs all workers on the host of this process, but {without[0]} is on "
            f"{engine.host(without[0])}: use object_store, collective or auto."
        )
    return SharedMemoryPlane(engine)
