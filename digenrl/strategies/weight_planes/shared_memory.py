"""Weights through shared memory of one host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.engines import Engine, Task
from digenrl.strategies.weight_planes.plane import WeightPlane, WeightSyncError, WrittenWeights

_NUM_SLOTS = 2  # the version generators may still be reading, and the one being written
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies in a slot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class ArenaLayout:
    """What a slot holds; trainers and generators derive the same one from their own parameters."""

    extents: tuple[Extent, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ArenaLayout:
        """Lay tensors out one after another, aligned."""
        extents, end = [], 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            extents.append(Extent(name, tensor.dtype, tuple(tensor.shape), end, size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(extents), end)


class WeightArena:
    """A worker's view of the slots."""

    def __init__(self, paths: Sequence[str], layout: ArenaLayout) -> None:
        self._slots = [torch.from_file(path, shared=True, size=layout.num_bytes, dtype=torch.uint8) for path in paths]
        self._names = [extent.name for extent in layout.extents]
        self._views = [[_view(slot, extent) for extent in layout.extents] for slot in self._slots]

    @torch.no_grad()
    def write(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a trainer's tensors into a slot."""
        torch._foreach_copy_(self._views[slot], [tensors[name] for name in self._names])

    @torch.no_grad()
    def read(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a slot into a generator's tensors."""
        torch._foreach_copy_([tensors[name] for name in self._names], self._views[slot])


def _view(slot: Tensor, extent: Extent) -> Tensor:
    return slot[extent.start : extent.start + extent.num_bytes].view(extent.dtype).reshape(extent.shape)


class SharedMemoryPlane(WeightPlane):
    """Trainers write into one of two slots of shared memory; generators copy it out when they are free.

    The slots are memfds of the driver, opened through `/proc/<pid>/fd/<n>`: they vanish with the driver, however
    it ends. A slot is written again only after every generator has acknowledged the version that lay in it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._trainers: Sequence[str] = ()
        self._generators: Sequence[str] = ()
        self._fds: list[int] = []
        self._readers: list[list[Task]] = [[] for _ in range(_NUM_SLOTS)]
        self._digest: str | None = None
        self._trained_digest: str | None = None
        self._version: int | None = None

    def setup(self, trainers: Sequence[str], generators: Sequence[str]) -> None:
        """Create the slots and have all workers map them."""
        self._trainers, self._generators = trainers, generators
        workers = [*trainers, *generators]
        layouts = self._engine.gather([self._engine.submit(worker, "weights_layout") for worker in workers])
        for worker, layout in zip(workers, layouts, strict=True):
            if layout != layouts[0]:
                raise WeightSyncError(
                    f"worker {worker} built other trained parameters than {workers[0]}: `policy.build` must build "
                    "the same model in every process."
                )
        self._fds = [os.memfd_create("digenrl-weights", os.MFD_CLOEXEC) for _ in range(_NUM_SLOTS)]
        for fd in self._fds:
            os.ftruncate(fd, layouts[0].num_bytes)
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]
        self._engine.gather([self._engine.submit(worker, "open_arena", paths) for worker in workers])

    def publish(self, version: int, *, must_change: bool) -> None:
        """Write the slot that no generator reads any more."""
        slot = version % _NUM_SLOTS
        self._engine.gather(self._readers[slot])
        self._readers[slot] = []
        written: list[WrittenWeights] = self._engine.gather(
            [self._engine.submit(trainer, "write_weights", slot) for trainer in self._trainers]
        )
        if len(set(written)) != 1:
            digests = {trainer: entry.digest for trainer, entry in zip(self._trainers, written, strict=True)}
            raise WeightSyncError(f"the trainers' weights differ at version {version}: {digests}.")
        if must_change and written[0].trained_digest == self._trained_digest:
            raise WeightSyncError(
                f"version {version} has the very weights of version {version - 1} although the gradient was not "
                "zero: the optimizer does not hold the policy's parameters, or its step is below their resolution."
            )
        self._digest, self._trained_digest, self._version = written[0].digest, written[0].trained_digest, version

    def load(self, generator: str, version: int) -> Task:
        """Queue the load; it is checked against the digest of what was written."""
        assert version == self._version, f"version {version} is to be loaded, but {self._version} was published last"
        slot = version % _NUM_SLOTS
        task = self._engine.submit(generator, "load_weights", slot, version, self._digest)
        self._readers[slot].append(task)
        return task

    def close(self) -> None:
        """Give the slots back to the system."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
