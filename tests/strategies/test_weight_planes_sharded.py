"""Ranks that hold a part each give and take their rows alone, whatever the other side's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard

from digenrl.engines import Engine, LocalEngine, ObjectRef
from digenrl.strategies.sharding import full_tensor, local_tensor
from digenrl.strategies.weight_planes import PLANES, WeightPlane, WeightSyncError
from digenrl.strategies.workers.weights import Weights


class Blocks(nn.Module):
    """Blocks of which some have fewer rows than ranks, or another dtype, and a head that no rank shares."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 5), nn.Linear(300, 11), nn.Linear(5, 1), nn.Linear(3, 9).bfloat16()])
        self.head = nn.Linear(4, 3)
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def published_weights(self) -> dict[str, Tensor]:
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {**trained, "num_steps": self.num_steps}


class RankWorker(Weights):
    """A rank with a share of the blocks."""

    def make(self, port: int, group: str, rank: int, size: int, seed: int) -> None:
        torch.manual_seed(seed)
        module = Blocks()
        if size > 1:
            store = PrefixStore(group, TCPStore("127.0.0.1", port, is_master=False))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            for block in module.blocks:
                fully_shard(block)
        self._module = module  # type: ignore[assignment]

    def free(self, refs: Sequence[ObjectRef]) -> None:
        self._store.free(refs)

    def nudge(self) -> None:
        with torch.no_grad():
            for parameter in self._trained_parameters().values():
                local_tensor(parameter).add_(0.5)
            self._module.num_steps.add_(1)  # type: ignore[operator]

    def spoil_head(self) -> None:
        with torch.no_grad():
            self._module.head.bias.add_(1.0)  # type: ignore[union-attr, operator]

    def weights(self) -> dict[str, list[float]]:
        whole = {name: full_tensor(tensor.detach()) for name, tensor in self._module.published_weights().items()}
        return {name: tensor.double().flatten().tolist() for name, tensor in whole.items()}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Two trainers, a generator that is whole, and one of two ranks."""
    engine = LocalEngine(60.0)
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = {"trainers": ["t0", "t1"], "whole": ["whole"], "shared": ["s0", "s1"]}
    tasks = []
    for seed, (name, workers) in enumerate(groups.items()):
        for rank, worker in enumerate(workers):
            engine.start(worker, RankWorker)
            tasks.append(engine.submit(worker, "make", rendezvous.port, name, rank, len(workers), seed))
    engine.gather(tasks)
    yield engine
    engine.shutdown()


def make_plane(engine: Engine, kind: str) -> WeightPlane:
    plane = PLANES[kind](engine)
    plane.chunk_bytes = 4000  # type: ignore[misc]
    plane.setup(["t0", "t1"], {"whole": ["whole"], "shared": ["s0", "s1"]})
    return plane


def call_all(engine: Engine, method: str) -> list[dict[str, list[float]]]:
    return engine.gather([engine.submit(worker, method) for worker in ("t0", "t1", "whole", "s0", "s1")])


@pytest.mark.parametrize("kind", PLANES)
def test_shards_arrive_in_a_whole_and_in_a_shared_generator(engine: Engine, kind: str) -> None:
    plane = make_plane(engine, kind)
    for version in range(3):
        engine.gather([engine.submit(trainer, "nudge") for trainer in ("t0", "t1")])
        plane.publish(version, must_change=version > 0)
        loads = [*plane.load("whole", version), *plane.load("shared", version)]
        assert len(loads) == 3
        engine.gather(loads)
        expected, *others = call_all(engine, "weights")
        assert all(weights == expected for weights in others)
    sent = [sum(chunk.num_bytes for chunk in plane._chunks if chunk.sender == rank) for rank in (0, 1)]
    assert sum(sent) == sum(spec.num_rows * spec.row_bytes for spec in plane._holdings["t0"].tensors)
    assert all(plane._held[trainer] != list(range(len(plane._chunks))) for trainer in ("t0", "t1"))
    plane.close()


def test_what_is_not_sharded_is_compared_on_all_trainers(engine: Engine) -> None:
    plane = make_plane(engine, "shared_memory")
    plane.publish(0, must_change=False)
    engine.call("t1", "spoil_head")
    with pytest.raises(
        WeightSyncError, match="the trainers' weights differ at version 1: `head.weight` to `head.bias`"
    ):
        plane.publish(1, must_change=False)
    plane.close()
