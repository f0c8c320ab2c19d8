"""Weight planes carry new weights from trainers to generators."""

from digenrl.strategies.weight_planes.choice import PLANES, WeightPlaneName, choose_plane
from digenrl.strategies.weight_planes.chunks import Chunk, Holding, WeightSyncError, cut_chunks
from digenrl.strategies.weight_planes.collective import CollectivePlane
from digenrl.strategies.weight_planes.digests import weights_digest
from digenrl.strategies.weight_planes.object_store import ObjectStorePlane
from digenrl.strategies.weight_planes.plane import Opening, PlaneEnd, WeightPlane, WriteReport, WrittenWeights
from digenrl.strategies.weight_planes.shared_memory import SharedMemoryPlane, reads_token

__all__ = [
    "PLANES",
    "Chunk",
    "CollectivePlane",
    "Holding",
    "ObjectStorePlane",
    "Opening",
    "PlaneEnd",
    "SharedMemoryPlane",
    "WeightPlane",
    "WeightPlaneName",
    "WeightSyncError",
    "WriteReport",
    "WrittenWeights",
    "choose_plane",
    "cut_chunks",
    "reads_token",
    "weights_digest",
]
