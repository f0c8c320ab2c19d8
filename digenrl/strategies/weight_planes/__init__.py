"""Weight planes carry new weights from trainers to generators."""

from digenrl.strategies.weight_planes.plane import WeightPlane, WeightSyncError, WrittenWeights, weights_digest
from digenrl.strategies.weight_planes.shared_memory import ArenaLayout, SharedMemoryPlane, WeightArena

__all__ = [
    "ArenaLayout",
    "SharedMemoryPlane",
    "WeightArena",
    "WeightPlane",
    "WeightSyncError",
    "WrittenWeights",
    "weights_digest",
]
