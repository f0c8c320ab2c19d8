"""What is transferred: which tensors, who holds which rows of them, and the chunks in which they travel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from digenrl.strategies.sharding import local_rows
from digenrl.strategies.weight_planes.byte_view import ByteView

_ALIGNMENT = 64  # bytes; a cache line, and enough for any dtype


class WeightSyncError(RuntimeError):
    """Weights did not arrive as they were sent, or there was nothing new to send."""


@dataclass(frozen=True)
class TensorSpec:
    """A published tensor, as a whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_trained: bool
    """Copies of weights are not: they change even where the optimizer changes nothing."""

    @property
    def num_rows(self) -> int:
        """Length of the first axis; a tensor without axes has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Holding:
    """What a worker has of the published tensors."""

    tensors: tuple[TensorSpec, ...]
    """Whole ones: all workers must give the same."""
    rows: tuple[tuple[int, int], ...]
    """Of each tensor, the rows [start, stop) that this worker holds."""

    @classmethod
    def of(cls, published: Mapping[str, Tensor], trained: Collection[str]) -> Holding:
        """Describe published tensors, whole or sharded."""
        specs = [TensorSpec(name, t.dtype, tuple(t.shape), name in trained) for name, t in published.items()]
        return cls(tuple(specs), tuple(local_rows(tensor) for tensor in published.values()))

    def has(self, tensor: int, start: int, stop: int) -> bool:
        """Whether all of these rows are held."""
        return self.rows[tensor][0] <= start and stop <= self.rows[tensor][1]


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of a whole tensor, given by its index."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """A unit of transfer: every worker holds all of it or nothing."""

    parts: tuple[Part, ...]
    num_bytes: int
    start: int
    """First byte in a slot that has room for all chunks."""
    sender: int
    """Index of the trainer that hands it over, of those that hold it."""
    is_trained: bool


def cut_chunks(
    trainers: Mapping[str, Holding], generators: Mapping[str, Sequence[Holding]], chunk_bytes: int
) -> tuple[Chunk, ...]:
    """Cut the published tensors wherever a worker's rows end, and into at most `chunk_bytes`.

    Small tensors that the same workers hold are joined. Trainers that hold the same share the sending of it.

    Args:
        trainers: what each holds.
        generators: what each of a generator's ranks holds.
        chunk_bytes: most bytes of a chunk.

    Raises:
        WeightSyncError: rows that no trainer holds, or that a generator lacks.
    """
    tensors = next(iter(trainers.values())).tensors
    everyone = [*trainers.values(), *(rank for ranks in generators.values() for rank in ranks)]
    open_chunks: dict[tuple[tuple[bool, ...], bool], list[Part]] = {}
    closed: list[tuple[tuple[bool, ...], bool, list[Part]]] = []
    for index, spec in enumerate(tensors):
        borders = sorted({border for holding in everyone for border in holding.rows[index]} | {0, spec.num_rows})
        for start, stop in pairwise(borders):
            _check_held(index, start, stop, trainers, generators)
            key = (tuple(holding.has(index, start, stop) for holding in everyone), spec.is_trained)
            for part in _cut(Part(index, start * spec.row_bytes, stop * spec.row_bytes), chunk_bytes):
                if 2 * (part.stop - part.start) > chunk_bytes:  # or it would part the small tensors around it
                    closed.append((*key, [part]))
                    continue
                waiting = open_chunks.setdefault(key, [])
                if waiting and _num_bytes(waiting) + part.stop - part.start > chunk_bytes:
                    closed.append((*key, waiting))
                    waiting = open_chunks[key] = []
                waiting.append(part)
    closed.extend((*key, parts) for key, parts in open_chunks.items() if parts)
    return _place(closed, len(trainers))


def held_chunks(chunks: Sequence[Chunk], holding: Holding) -> list[int]:
    """Give the indices of the chunks that a worker holds."""

    def holds(part: Part) -> bool:
        row_bytes = holding.tensors[part.tensor].row_bytes
        start, stop = holding.rows[part.tensor]
        return start * row_bytes <= part.start and part.stop <= stop * row_bytes

    return [index for index, chunk in enumerate(chunks) if holds(chunk.parts[0])]


def slot_bytes(chunks: Sequence[Chunk]) -> int:
    """Give the bytes of a slot with room for all chunks; never 0, since such memory cannot be mapped."""
    return max((chunk.start + chunk.num_bytes for chunk in chunks), default=0) or _ALIGNMENT


def cut_buckets(chunks: Sequence[Chunk], sent: Sequence[int], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Put chunks, given by index, one after another into buckets of at most `bucket_bytes`."""
    buckets: list[list[int]] = []
    size = 0
    for index in sent:
        if not buckets or size + chunks[index].num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += chunks[index].num_bytes
    return [tuple(bucket) for bucket in buckets]


def cut_bucket(memory: Tensor, chunks: Sequence[Chunk], indices: Sequence[int]) -> list[ByteView]:
    """Give the bytes of each chunk in a bucket's memory [N] (uint8)."""
    return [ByteView(piece) for piece in memory.split([chunks[index].num_bytes for index in indices])]


def _check_held(
    index: int, start: int, stop: int, trainers: Mapping[str, Holding], generators: Mapping[str, Sequence[Holding]]
) -> None:
    spec = next(iter(trainers.values())).tensors[index]
    if not any(holding.has(index, start, stop) for holding in trainers.values()):
        raise WeightSyncError(f"no trainer holds rows {start} to {stop} of `{spec.name}`.")
    for name, ranks in generators.items():
        if not any(holding.has(index, start, stop) for holding in ranks):
            raise WeightSyncError(f"worker {name} has no place for rows {start} to {stop} of `{spec.name}`.")


def _cut(part: Part, chunk_bytes: int) -> Iterable[Part]:
    for start in range(part.start, part.stop, chunk_bytes):
        yield Part(part.tensor, start, min(start + chunk_bytes, part.stop))


def _num_bytes(parts: Iterable[Part]) -> int:
    return sum(part.stop - part.start for part in parts)


def _place(closed: Sequence[tuple[tuple[bool, ...], bool, list[Part]]], num_trainers: int) -> tuple[Chunk, ...]:
    """Lay the chunks one after another and give each to the holder that has least to send."""
    chunks, end, sent = [], 0, [0] * num_trainers
    for holders, is_trained, parts in closed:
        size = _num_bytes(parts)
        sender = min((rank for rank in range(num_trainers) if holders[rank]), key=lambda rank: sent[rank])
        sent[sender] += size
        chunks.append(Chunk(tuple(parts), size, end, sender, is_trained))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(chunks)
