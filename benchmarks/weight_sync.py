"""How long new weights take from trainers to generators: `python -m benchmarks.weight_sync`.

Two sharded trainers (FSDP2) of this host publish 96 MB in float32, two generators load them: from the call of `publish`
to the last acknowledged load, with all digests. The unit is what the bare copies take in the same processes and by the
same calls: each trainer copies its half into shared memory, then each generator copies all of it out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard

from benchmarks.machine import OtherLoad
from digenrl.engines import Engine, LocalEngine, ObjectRef
from digenrl.strategies.weight_planes import PLANES, WeightPlane
from digenrl.strategies.workers.weights import Weights

NUM_BLOCKS, WIDTH = 24, 1024
"""Linear blocks of 4 MB: 96 MB in all."""
NUM_TRAINERS, NUM_GENERATORS = 2, 2
ROUNDS, WARM_UP, REPEATS = 4, 3, 8
"""The bare copies and the planes take turns, so that what else the machine does meets all of them."""
BARE = "bare copies"
MOST_RATIO, MOST_BLOCKED = 1.5, 0.5
"""Targets: time over that of the bare copies, and the share of it in which trainers do nothing else."""


class Blocks(nn.Module):
    """What is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def published_weights(self) -> dict[str, Tensor]:
        """Give all parameters."""
        return dict(self.named_parameters())


class SyncWorker(Weights):
    """A worker that has weights and nothing to do."""

    def join(self, port: int, rank: int) -> None:
        """Meet the other trainers."""
        store = PrefixStore("trainers", TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_TRAINERS)

    def make(self, *, is_sharded: bool) -> None:
        """Build the weights."""
        module = Blocks()
        if is_sharded:
            for block in module.blocks:
                fully_shard(block)
        self._module = module  # type: ignore[assignment]

    def change(self) -> None:
        """Do what an optimizer does: change every weight."""
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.add_(0.01)

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects that others have read."""
        self._store.free(refs)

    def map_slot(self, path: str, num_bytes: int) -> None:
        """Map shared memory for `bare_write` and `bare_read`."""
        self._slot = torch.from_file(path, shared=True, size=num_bytes // 4, dtype=torch.float32).numpy()
        self._own = np.ones(num_bytes // 4, np.float32)

    def bare_change(self) -> None:
        """Change all of it, as `change` does: caches and memory are then busy with the same."""
        self._own += 0.01

    def bare_write(self, start: int, stop: int) -> None:
        """Copy a part of as many bytes into shared memory."""
        np.copyto(self._slot[start:stop], self._own[start:stop])  # memcpy, which is faster than torch's loop

    def bare_read(self) -> None:
        """Copy all of it out."""
        np.copyto(self._own, self._slot)


@dataclass(frozen=True)
class Times:
    """Of a transfer, in milliseconds."""

    total_ms: float
    blocked_ms: float
    """Until `publish` returned."""


def main() -> None:
    """Print the table and how the targets are met."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    load = OtherLoad()
    engine = LocalEngine(120.0)
    try:
        trainers, generators = start(engine)
        times = measure_rounds(engine, trainers, generators)
        other_load = load.share()  # while the workers are there to be counted
    finally:
        engine.shutdown()
    print(
        f"{NUM_BLOCKS * (WIDTH + 1) * WIDTH * 4 / 2**20:.0f} MB from {NUM_TRAINERS} FSDP2 ranks to {NUM_GENERATORS} "
        f"generators, median of {ROUNDS * REPEATS}; other load on the machine {other_load:.0%}"
    )
    print(f"{'':<14} {'ms':>7} {'ratio':>6} {'trainers blocked, ms':>21} {'share':>6}")
    bare = times[BARE]
    for name, entry in times.items():
        print(
            f"{name:<14} {entry.total_ms:>7.1f} {entry.total_ms / bare.total_ms:>6.2f} {entry.blocked_ms:>21.1f} "
            f"{entry.blocked_ms / entry.total_ms:>6.2f}"
        )
    shared = times["shared_memory"]
    for what, value, most in (
        ("time over that of the bare copies", shared.total_ms / bare.total_ms, MOST_RATIO),
        ("share in which trainers are blocked", shared.blocked_ms / shared.total_ms, MOST_BLOCKED),
    ):
        print(f"shared_memory, {what}: {value:.2f}, target {most:g}: {'met' if value <= most else 'MISSED'}")


def start(engine: Engine) -> tuple[list[str], list[str]]:
    """Start the workers; returns the names of trainers and generators."""
    trainers = [f"trainer-{rank}" for rank in range(NUM_TRAINERS)]
    generators = [f"generator-{index}" for index in range(NUM_GENERATORS)]
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for worker in (*trainers, *generators):
        engine.start(worker, SyncWorker)
    engine.gather([engine.submit(trainer, "join", rendezvous.port, rank) for rank, trainer in enumerate(trainers)])
    engine.gather([engine.submit(trainer, "make", is_sharded=True) for trainer in trainers])
    engine.gather([engine.submit(generator, "make", is_sharded=False) for generator in generators])
    return trainers, generators


def measure_rounds(engine: Engine, trainers: Sequence[str], generators: Sequence[str]) -> dict[str, Times]:
    """Time the bare copies and each plane, again and again in turn."""
    samples: dict[str, list[Times]] = {name: [] for name in (BARE, *PLANES)}
    for _ in range(ROUNDS):
        samples[BARE] += measure_bare(engine, trainers, generators)
        for name, plane in PLANES.items():
            samples[name] += measure(engine, plane(engine), trainers, generators)
    return {
        name: Times(median(entry.total_ms for entry in entries), median(entry.blocked_ms for entry in entries))
        for name, entries in samples.items()
    }


def measure_bare(engine: Engine, trainers: Sequence[str], generators: Sequence[str]) -> list[Times]:
    """Time the copies alone."""
    num_words = NUM_BLOCKS * (WIDTH + 1) * WIDTH
    fd = os.memfd_create("digenrl-benchmark")
    os.ftruncate(fd, num_words * 4)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    engine.gather([engine.submit(worker, "map_slot", path, num_words * 4) for worker in (*trainers, *generators)])
    half = num_words // len(trainers)

    def change() -> None:
        engine.gather([engine.submit(trainer, "bare_change") for trainer in trainers])

    def write() -> None:
        engine.gather(
            [
                engine.submit(trainer, "bare_write", rank * half, (rank + 1) * half)
                for rank, trainer in enumerate(trainers)
            ]
        )

    def read() -> None:
        engine.gather([engine.submit(generator, "bare_read") for generator in generators])

    times = time_transfers(change, write, read)
    os.close(fd)
    return times


def measure(engine: Engine, plane: WeightPlane, trainers: Sequence[str], generators: Sequence[str]) -> list[Times]:
    """Time a plane."""
    plane.setup(trainers, {generator: (generator,) for generator in generators})
    version = 0

    def change() -> None:
        engine.gather([engine.submit(trainer, "change") for trainer in trainers])

    def publish() -> None:
        nonlocal version
        version += 1
        plane.publish(version, must_change=True)

    def load() -> None:
        engine.gather([task for generator in generators for task in plane.load(generator, version)])

    times = time_transfers(change, publish, load)
    plane.close()
    return times


def time_transfers(prepare: Callable[[], None], publish: Callable[[], None], load: Callable[[], None]) -> list[Times]:
    """Run a transfer several times."""
    times = []
    for repeat in range(WARM_UP + REPEATS):
        prepare()
        start_s = time.perf_counter()
        publish()
        published_s = time.perf_counter()
        load()
        end_s = time.perf_counter()
        if repeat >= WARM_UP:
            times.append(Times((end_s - start_s) * 1e3, (published_s - start_s) * 1e3))
    return times


if __name__ == "__main__":
    main()
