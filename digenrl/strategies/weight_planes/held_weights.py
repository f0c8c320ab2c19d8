"""A worker's own weights, seen as chunks that can be copied out and in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from digenrl.strategies.sharding import local_tensor
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.weight_planes.chunks import Chunk, Holding, WeightSyncError, held_chunks
from digenrl.strategies.weight_planes.digests import DIGEST_BYTES


class HeldWeights:
    """The chunks that a worker holds, as bytes of its tensors.

    A chunk is digested right after it was copied, while it lies in the cache. What is digested is always the worker's
    own tensor, so that a copy which went wrong anywhere on the way shows.
    """

    def __init__(self, chunks: Sequence[Chunk], tensors: Callable[[], Mapping[str, Tensor]], holding: Holding) -> None:
        """See `tensors()`, asked anew for every transfer, as the chunks of `holding` that this worker holds."""
        self.chunks = chunks
        self.held = held_chunks(chunks, holding)
        self._holding = holding
        self._tensors = tensors
        self._memory: tuple[int, ...] = ()  # addresses of the tensors that `_parts` are views of
        self._parts: dict[int, list[Tensor]] = {}
        self._views: dict[int, ByteView] = {}  # of the chunks that are one part
        self._strided: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that are not contiguous, and flat copies

    @torch.no_grad()
    def send(self, places: Iterable[tuple[int, ByteView]]) -> bytes:
        """Copy chunks to their places; returns the digests of all chunks that are held.

        Args:
            places: a chunk's index and room for it, one after another: each is filled when the next is asked for.
        """
        self._look()
        for tensor, flat in self._strided.values():
            flat.copy_(tensor)
        digests = {index: self._view(index).copy_to(place) for index, place in places}
        digests |= {index: self._view(index).digest() for index in self.held if index not in digests}
        self._finish()
        return b"".join(digests[index] for index in self.held)

    @torch.no_grad()
    def receive(self, arriving: Iterable[tuple[int, ByteView]]) -> dict[int, bytes]:
        """Take chunks over as they arrive, each with its index; returns the digests of what is then held."""
        self._look()
        digests, late = {}, []
        for index, data in arriving:
            digests[index] = self._take(index, data)
            if self._strided and any(part.tensor in self._strided for part in self.chunks[index].parts):
                late.append(index)
        for tensor, flat in self._strided.values():
            tensor.copy_(flat)
            flat.copy_(tensor)
        digests |= {index: self._view(index).digest() for index in late}
        self._finish()
        return digests

    def check(self, version: int, arrived: Mapping[int, bytes], sent: bytes) -> None:
        """Compare digests of what has arrived with those of all chunks that were sent, one after another.

        Raises:
            WeightSyncError: a chunk that this worker holds is missing, or another one.
        """
        for index in self.held:
            if index not in arrived:
                raise WeightSyncError(f"weights of version {version}: {self._name(index)} did not arrive.")
            expected = sent[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if arrived[index] != expected:
                raise WeightSyncError(
                    f"weights of version {version} arrived as {arrived[index].hex()} in {self._name(index)}, but were "
                    f"sent as {expected.hex()}."
                )

    def find_changed(self, sent: bytes) -> str | None:
        """Name the first tensors that are not what was sent, by the digests of all its chunks; None if all are."""
        digests = self.send(())
        for place, index in enumerate(self.held):
            expected = sent[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] != expected:
                return self._name(index)
        return None

    @property
    def device(self) -> torch.device:
        """Where the tensors are; the CPU if there are none."""
        return next((tensor.device for tensor in self._tensors().values()), torch.device("cpu"))

    def _name(self, index: int) -> str:
        return chunk_name(self.chunks[index], self._holding)

    def _view(self, index: int) -> ByteView:
        """Give the bytes of a chunk, joined if they are several parts."""
        return self._views[index] if index in self._views else ByteView(torch.cat(self._parts[index]))

    def _take(self, index: int, data: ByteView) -> bytes:
        """Take a chunk over; returns its digest."""
        if index in self._views:
            return self._views[index].copy_from(data)
        parts = self._parts[index]
        torch._foreach_copy_(parts, list(data.tensor.split([len(part) for part in parts])), non_blocking=True)
        return self._view(index).digest()

    def _look(self) -> None:
        """Find the tensors' memory, which may have moved since the last time."""
        tensors = [local_tensor(tensor).detach() for tensor in self._tensors().values()]
        memory = tuple(tensor.data_ptr() for tensor in tensors)
        if memory == self._memory and self._parts:
            return
        self._memory, self._strided = memory, {}
        flat = []
        for index, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                self._strided[index] = tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format)
                tensor = self._strided[index][1]
            flat.append(tensor.view(-1).view(torch.uint8))
        self._parts = {
            index: [self._local(flat, part.tensor, part.start, part.stop) for part in self.chunks[index].parts]
            for index in self.held
        }
        self._views = {index: ByteView(parts[0]) for index, parts in self._parts.items() if len(parts) == 1}

    def _local(self, flat: Sequence[Tensor], tensor: int, start: int, stop: int) -> Tensor:
        first = self._holding.rows[tensor][0] * self._holding.tensors[tensor].row_bytes
        return flat[tensor][start - first : stop - first]

    def _finish(self) -> None:
        """Wait until a device has done the copies."""
        if any(parts[0].is_cuda for parts in self._parts.values()):
            torch.cuda.synchronize()


def chunk_name(chunk: Chunk, holding: Holding) -> str:
    """Say in a message which tensors a chunk has a part of."""
    names: Collection[str] = dict.fromkeys(holding.tensors[part.tensor].name for part in chunk.parts)
    first, last = next(iter(names)), list(names)[-1]
    return f"`{first}`" if first == last else f"`{first}` to `{last}`"
