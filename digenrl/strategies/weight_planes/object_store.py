"""Weights through the engine's object store, between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from digenrl.engines import Engine, ObjectRef, ObjectStore
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.weight_planes.chunks import cut_bucket, cut_buckets
from digenrl.strategies.weight_planes.held_weights import HeldWeights
from digenrl.strategies.weight_planes.plane import Opening, PlaneEnd, WeightPlane, WrittenWeights


@dataclass(frozen=True)
class Bucket:
    """Chunks that are one object, one after another."""

    ref: ObjectRef
    chunks: tuple[int, ...]


class ObjectStoreEnd(PlaneEnd):
    """Puts buckets into a worker's store, or gets them from there."""

    def __init__(self, weights: HeldWeights, store: ObjectStore, buckets: Sequence[Sequence[int]]) -> None:
        super().__init__(weights)
        self._store = store
        self._buckets = buckets

    def write(self, version: int) -> WrittenWeights:
        """Put this trainer's share into the store; one bucket at a time is in this worker's own memory."""
        written: list[Bucket] = []
        digests = self.weights.send(self._places(written))
        return WrittenWeights(digests, tuple(written))

    def _places(self, written: list[Bucket]) -> Iterator[tuple[int, ByteView]]:
        for chunks in self._buckets:
            memory = torch.empty(sum(self.weights.chunks[index].num_bytes for index in chunks), dtype=torch.uint8)
            yield from zip(chunks, cut_bucket(memory, self.weights.chunks, chunks), strict=True)
            # As an array: stores pass its bytes beside the pickle.
            written.append(Bucket(self._store.put(memory.numpy()), tuple(chunks)))

    def read(self, version: int, source: Sequence[Bucket]) -> dict[int, bytes]:
        """Take what this worker holds out of the buckets."""
        return self.weights.receive(self._arriving(source))

    def _arriving(self, buckets: Sequence[Bucket]) -> Iterator[tuple[int, ByteView]]:
        held = set(self.weights.held)
        for bucket in buckets:
            array = self._store.get(bucket.ref)
            memory = torch.frombuffer(array, dtype=torch.uint8)
            for index, data in zip(bucket.chunks, cut_bucket(memory, self.weights.chunks, bucket.chunks), strict=True):
                if index in held:
                    yield index, data


@dataclass(frozen=True)
class ObjectStoreOpening(Opening):
    """Names the chunks of each bucket that a trainer puts."""

    buckets: tuple[tuple[int, ...], ...]

    def open(self, weights: HeldWeights, store: ObjectStore) -> ObjectStoreEnd:
        """Use the worker's store."""
        return ObjectStoreEnd(weights, store, self.buckets)


class ObjectStorePlane(WeightPlane):
    """Trainers put buckets into their stores, the driver passes the references on, and generators get the buckets.

    The buckets of a version are freed once a newer one is published and all loads of it are acknowledged, so that a
    generator that was started again always finds the last.
    """

    bucket_bytes: ClassVar[int] = 1 << 24
    """Most bytes of a bucket, and so of what a transfer needs of a worker's memory."""
    _outlives_trainers = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._published: dict[int, list[tuple[Bucket, ...]]] = {}
        """Buckets of each trainer, by version."""

    def _prepare(self) -> None:
        """Need nothing."""

    def _opening(self, worker: str, rank: int | None) -> ObjectStoreOpening:
        sent = [index for index, chunk in enumerate(self._chunks) if chunk.sender == rank]
        return ObjectStoreOpening(self._chunks, rank, tuple(cut_buckets(self._chunks, sent, self.bucket_bytes)))

    def _keep(self, version: int, sources: Sequence[Any]) -> None:
        self._published[version] = list(sources)

    def _source_for(self, rank: str, version: int) -> list[Bucket]:
        """Give the buckets that have something of what the rank holds."""
        held = set(self._held[rank])
        return [bucket for share in self._published[version] for bucket in share if not held.isdisjoint(bucket.chunks)]

    def _give_up(self, version: int) -> None:
        shares = self._published.pop(version, ())
        self._engine.gather(self._engine.free([bucket.ref for share in shares for bucket in share]))

    def _forget_trainers(self) -> None:
        """Their stores died with them."""
        self._published.clear()
