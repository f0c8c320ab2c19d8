"""Weights through shared memory of one host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.engines import Engine, ObjectStore
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.weight_planes.chunks import slot_bytes
from digenrl.strategies.weight_planes.held_weights import HeldWeights
from digenrl.strategies.weight_planes.plane import NUM_SLOTS, Opening, PlaneEnd, WeightPlane, WrittenWeights

_TOKEN_BYTES = 16


class SharedMemoryEnd(PlaneEnd):
    """A worker's view of the slots."""

    def __init__(self, weights: HeldWeights, slots: Sequence[Tensor], sent: Sequence[int]) -> None:
        super().__init__(weights)
        self._slots = slots
        self._views = [
            {
                index: ByteView(slot[chunk.start : chunk.start + chunk.num_bytes])
                for index, chunk in enumerate(weights.chunks)
            }
            for slot in slots
        ]
        self._places = [[(index, views[index]) for index in sent] for views in self._views]
        self._is_pinned = weights.device.type == "cuda"
        if self._is_pinned:
            for slot in slots:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.numel(), 0))

    def write(self, version: int) -> WrittenWeights:
        """Copy this trainer's share into the version's slot."""
        return WrittenWeights(self.weights.send(self._places[version % NUM_SLOTS]))

    def read(self, version: int, source: Any) -> dict[int, bytes]:
        """Copy what this worker holds out of the version's slot."""
        views = self._views[version % NUM_SLOTS]
        return self.weights.receive((index, views[index]) for index in self.weights.held)

    def close(self) -> None:
        """Unpin the slots."""
        if self._is_pinned:
            for slot in self._slots:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(slot.data_ptr()))


@dataclass(frozen=True)
class SharedMemoryOpening(Opening):
    """Names the slots' files."""

    paths: tuple[str, ...]
    num_bytes: int

    def open(self, weights: HeldWeights, store: ObjectStore) -> SharedMemoryEnd:
        """Map the slots."""
        slots = [torch.from_file(path, shared=True, size=self.num_bytes, dtype=torch.uint8) for path in self.paths]
        return SharedMemoryEnd(weights, slots, self.sent)


class SharedMemoryPlane(WeightPlane):
    """Trainers write into one of two slots of shared memory; generators copy it out when they are free.

    The slots are memfds of the driver, opened through `/proc/<pid>/fd/<n>`: they vanish with the driver, however
    it ends, and outlive any worker. A slot is written again only after every generator has acknowledged the version
    that lay in it.
    """

    _outlives_trainers = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._fds: list[int] = []

    def _prepare(self) -> None:
        """Create the slots."""
        self.close()
        self._fds = [os.memfd_create("digenrl-weights", os.MFD_CLOEXEC) for _ in range(NUM_SLOTS)]
        for fd in self._fds:
            os.ftruncate(fd, slot_bytes(self._chunks))

    def _opening(self, worker: str, rank: int | None) -> SharedMemoryOpening:
        paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds)
        return SharedMemoryOpening(self._chunks, rank, paths, slot_bytes(self._chunks))

    def close(self) -> None:
        """Give the slots back to the system."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def workers_without_memory(engine: Engine, workers: Sequence[str]) -> list[str]:
    """Give the workers that cannot map this process's memory: those on other hosts, or in other containers."""
    fd = os.memfd_create("digenrl-token", os.MFD_CLOEXEC)
    try:
        token = os.urandom(_TOKEN_BYTES)
        os.write(fd, token)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        reads = engine.gather([engine.submit(worker, "reads_token", path, token) for worker in workers])
        return [worker for worker, succeeds in zip(workers, reads, strict=True) if not succeeds]
    finally:
        os.close(fd)


def reads_token(path: str, token: bytes) -> bool:
    """Whether this process can open the driver's memory at `path`, and finds the token there."""
    try:
        with open(path, "rb") as file:
            return file.read(_TOKEN_BYTES) == token
    except OSError:  # another host's process, or another user's
        return False
