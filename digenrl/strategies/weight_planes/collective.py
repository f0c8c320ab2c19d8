"""Weights by point-to-point messages of a collective library: gloo, or NCCL on GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from digenrl.engines import Engine, ObjectLost, ObjectStore, WorkerTimeout
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.weight_planes.chunks import cut_bucket, cut_buckets
from digenrl.strategies.weight_planes.held_weights import HeldWeights
from digenrl.strategies.weight_planes.plane import NUM_SLOTS, Opening, PlaneEnd, WeightPlane, WrittenWeights

_PATIENCE = 0.9
"""Part of a task's time after which its own waits give up, so that the error names whom it waited for."""

_OPEN_CHANNEL = "-"

_LEAVE_WITHIN_S = 1.0


@dataclass(frozen=True)
class Meeting:
    """Where a worker finds the others, and under which name."""

    address: str
    port: int
    name: str
    """Of this opening of the worker's end: a worker that is started again has a new one."""
    timeout_s: float

    def store(self) -> TCPStore:
        """Connect with the driver; each thread needs a connection of its own."""
        return TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))


class Channel:
    """A process group of one trainer and one generator, apart from the groups that compute."""

    def __init__(self, store: TCPStore, name: str, rank: int, device: torch.device, timeout_s: float) -> None:
        """Wait for the peer; the trainer has rank 0."""
        self._peer = 1 - rank
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(PrefixStore(name, store), rank, 2, options)
        else:
            self._group = dist.ProcessGroupGloo(PrefixStore(name, store), rank, 2, timeout)

    def send(self, memory: Tensor) -> None:
        """Send bytes [N] and wait until they are on their way."""
        self._group.send([memory], self._peer, 0).wait()

    def receive(self, memory: Tensor) -> Any:
        """Begin to receive bytes [N]; `wait()` of the result ends it."""
        return self._group.recv([memory], self._peer, 0)


class CollectiveSender(PlaneEnd):
    """A trainer's end: stages a copy of each version, which threads send to the generators that ask for it."""

    def __init__(
        self, weights: HeldWeights, buckets: Sequence[Sequence[int]], meeting: Meeting, generators: Sequence[str]
    ) -> None:
        super().__init__(weights)
        self._buckets = buckets
        self._meeting = meeting
        self._generators = generators
        self._device = weights.device
        self._store = meeting.store()
        sizes = [sum(weights.chunks[index].num_bytes for index in bucket) for bucket in buckets]
        pinned = self._device.type == "cuda"
        self._slots = [
            [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes] for _ in range(NUM_SLOTS)
        ]
        self._staged: list[int | None] = [None] * NUM_SLOTS
        # Daemons: none of them keeps the process alive.
        self._threads = [
            threading.Thread(target=self._serve, args=(generator,), name=f"weights-{generator}", daemon=True)
            for generator in generators
        ]
        for thread in self._threads:
            thread.start()

    def write(self, version: int) -> WrittenWeights:
        """Stage a copy of this trainer's share; who is to have it takes it later."""
        slot = version % NUM_SLOTS
        self._staged[slot] = None
        digests = self.weights.send(
            place
            for memory, bucket in zip(self._slots[slot], self._buckets, strict=True)
            for place in zip(bucket, cut_bucket(memory, self.weights.chunks, bucket), strict=True)
        )
        self._staged[slot] = version
        return WrittenWeights(digests)

    def close(self) -> None:
        """End the threads; one that is still sending ends with its channel's time."""
        with suppress(dist.DistNetworkError):  # the driver's plane is closed, and so the threads have ended
            for generator in self._generators:
                _ask(self._store, self._meeting.name, generator, "")
        for thread in self._threads:
            thread.join(_LEAVE_WITHIN_S)

    def _serve(self, generator: str) -> None:
        """Send what a generator asks for, until the end is closed or the driver is gone."""
        store = self._meeting.store()
        channel: Channel | None = None
        number = 0
        while True:
            try:
                request = _next_request(store, self._meeting.name, generator, number)
            except dist.DistNetworkError:
                return
            if request is None:
                continue
            if request == "":
                return
            number += 1
            name, version = request.split()
            try:
                if name != _OPEN_CHANNEL:
                    channel = None  # closed before another is opened
                    channel = Channel(store, name, 0, self._device, self._meeting.timeout_s)
                if channel is not None:
                    self._send(channel, int(version))
            except RuntimeError:  # the generator is gone, or has given up; if it lives, it says why
                channel = None

    def _send(self, channel: Channel, version: int) -> None:
        slot = version % NUM_SLOTS
        if self._staged[slot] != version:
            raise RuntimeError(f"version {version} is not staged")
        if self._device.type != "cuda":
            for memory in self._slots[slot]:
                channel.send(memory)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            for memory in self._slots[slot]:
                channel.send(memory.to(self._device, non_blocking=True))
            torch.cuda.current_stream().synchronize()


class CollectiveReceiver(PlaneEnd):
    """A generator's end: asks each trainer for its share and takes it bucket by bucket."""

    def __init__(
        self,
        weights: HeldWeights,
        buckets: Sequence[Sequence[Sequence[int]]],
        meeting: Meeting,
        trainers: Sequence[str],
        worker: str,
    ) -> None:
        super().__init__(weights)
        self._buckets = buckets
        self._meeting = meeting
        self._trainers = trainers
        self._worker = worker
        self._store = meeting.store()
        self._channels: dict[str, Channel] = {}
        self._num_channels = 0
        sizes = [sum(weights.chunks[index].num_bytes for index in bucket) for share in buckets for bucket in share]
        self._memory = [torch.empty(max(sizes, default=0), dtype=torch.uint8, device=weights.device) for _ in range(2)]

    def read(self, version: int, source: Sequence[str]) -> dict[int, bytes]:
        """Take what this worker holds; `source` is the name of each trainer's end."""
        try:
            return self.weights.receive(self._arriving(version, source))
        except BaseException:
            self._channels.clear()  # messages may still be under way
            raise

    def _arriving(self, version: int, names: Sequence[str]) -> Iterator[tuple[int, ByteView]]:
        held = set(self.weights.held)
        channels = [self._ask(rank, name, version) for rank, name in enumerate(names)]
        order = [
            (rank, bucket)
            for buckets in zip_longest(*self._buckets)
            for rank, bucket in enumerate(buckets)
            if bucket is not None
        ]
        works: list[Any] = []
        for place, (rank, bucket) in enumerate(order):
            for ahead, (sender, coming) in enumerate(order[len(works) : place + 2], len(works)):
                with self._waiting_for(sender, version):
                    works.append(channels[sender].receive(self._room(ahead, coming)))
            with self._waiting_for(rank, version):
                works[place].wait()
            pieces = cut_bucket(self._room(place, bucket), self.weights.chunks, bucket)
            for index, data in zip(bucket, pieces, strict=True):
                if index in held:
                    yield index, data

    def _room(self, place: int, bucket: Sequence[int]) -> Tensor:
        size = sum(self.weights.chunks[index].num_bytes for index in bucket)
        return self._memory[place % 2][:size]

    def _ask(self, rank: int, name: str, version: int) -> Channel:
        """Request a trainer's share; a first request, and one after an error, opens a channel."""
        channel = self._channels.get(name)
        if channel is None:
            self._num_channels += 1
        channel_name = f"{name}/{self._meeting.name}/{self._num_channels}" if channel is None else _OPEN_CHANNEL
        _ask(self._store, name, self._worker, f"{channel_name} {version}")
        if channel is None:
            with self._waiting_for(rank, version):
                channel = Channel(self._store, channel_name, 1, self.weights.device, self._meeting.timeout_s)
            self._channels[name] = channel
        return channel

    @contextmanager
    def _waiting_for(self, rank: int, version: int) -> Iterator[None]:
        """Say why a trainer's share does not come: it is late, or gone."""
        trainer, timeout_s, start_s = self._trainers[rank], self._meeting.timeout_s, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if time.monotonic() - start_s < timeout_s * _PATIENCE:
                raise ObjectLost(trainer) from error
            raise WorkerTimeout(
                f"worker {trainer} did not send weights of version {version} within {timeout_s:g} s.", trainer
            ) from error


@dataclass(frozen=True)
class CollectiveOpening(Opening):
    """Tells a worker whom it meets."""

    buckets: tuple[tuple[tuple[int, ...], ...], ...]
    """Chunks of each bucket of each trainer."""
    meeting: Meeting
    worker: str
    trainers: tuple[str, ...]
    generators: tuple[str, ...]

    def open(self, weights: HeldWeights, store: ObjectStore) -> PlaneEnd:
        """Begin to serve, or get ready to ask."""
        if self.rank is None:
            return CollectiveReceiver(weights, self.buckets, self.meeting, self.trainers, self.worker)
        return CollectiveSender(weights, self.buckets[self.rank], self.meeting, self.generators)


class CollectivePlane(WeightPlane):
    """Trainers stage a copy of each version and go on; threads of theirs send it to each generator when that asks.

    There is a channel for each pair of a trainer and a generator, so a slow or dead generator holds up nobody. Requests
    pass through a store of the driver. A worker that was started again meets the others under a new name.
    """

    bucket_bytes: ClassVar[int] = 1 << 24
    """Most bytes of a message, of which a generator has room for two."""
    _outlives_trainers = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._store: TCPStore | None = None
        self._names: dict[str, str] = {}
        self._num_names = 0

    def _prepare(self) -> None:
        """Begin to pass requests on."""
        self._store = TCPStore(self._engine.driver_address, 0, is_master=True, wait_for_workers=False)
        self._buckets = tuple(
            tuple(
                cut_buckets(
                    self._chunks,
                    [index for index, chunk in enumerate(self._chunks) if chunk.sender == rank],
                    self.bucket_bytes,
                )
            )
            for rank in range(len(self._trainers))
        )

    def _opening(self, worker: str, rank: int | None) -> CollectiveOpening:
        assert self._store is not None, "`_prepare` has made it"
        self._num_names += 1
        self._names[worker] = f"{worker}-{self._num_names}"
        meeting = Meeting(
            self._engine.driver_address,
            self._store.port,
            self._names[worker],
            self._engine.task_timeout_s * _PATIENCE,
        )
        generators = tuple(rank for ranks in self._generators.values() for rank in ranks)
        return CollectiveOpening(self._chunks, rank, self._buckets, meeting, worker, self._trainers, generators)

    def _source_for(self, rank: str, version: int) -> tuple[str, ...]:
        return tuple(self._names[trainer] for trainer in self._trainers)

    def close(self) -> None:
        """Stop passing requests on."""
        self._store = None


def _ask(store: TCPStore, trainer: str, generator: str, request: str) -> None:
    """Put a request into the line of a trainer's end for a generator."""
    number = store.add(f"{trainer}/{generator}/count", 1) - 1
    store.set(f"{trainer}/{generator}/{number}", request)


def _next_request(store: TCPStore, trainer: str, generator: str, number: int) -> str | None:
    """Wait for a request; None if there was none for long."""
    key = f"{trainer}/{generator}/{number}"
    try:
        store.wait([key])
    except dist.DistStoreError:
        return None
    request = store.get(key).decode()
    store.delete_key(key)
    return request
