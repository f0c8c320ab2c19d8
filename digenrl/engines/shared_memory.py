"""Objects in anonymous shared memory, readable by every process of the same user on one host.

An object lives in a memfd of its maker and is opened through `/proc/<pid>/fd/<n>`. Nothing has a name in
/dev/shm, so nothing is left behind even if every process is killed; and unlike `multiprocessing.shared_memory`
no resource tracker unlinks the memory when a reader dies.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import resource
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from digenrl.engines.engine import ObjectLost, ObjectRef, ObjectStore

_ALIGNMENT = 64  # bytes; a cache line, and enough for any dtype


class SharedMemoryStore(ObjectStore):
    """Keeps each object in a memfd: one copy in, none out."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def put(self, value: Any) -> ObjectRef:
        """Write `value` to shared memory, its tensors as raw bytes."""
        header, buffers = dump_parts(value)
        borders = [_round_up(len(header))]
        for buffer in buffers:
            borders.append(borders[-1] + _round_up(buffer.nbytes))
        fd = os.memfd_create("digenrl-object", os.MFD_CLOEXEC)
        size = max(borders[-1], 1)
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            memory[: len(header)] = header
            for start, buffer in zip(borders, buffers, strict=False):
                memory[start : start + buffer.nbytes] = buffer
        extents = tuple((start, buffer.nbytes) for start, buffer in zip(borders, buffers, strict=False))
        return ObjectRef(self._worker, (os.getpid(), fd, len(header), extents), num_bytes=size)

    def get(self, ref: ObjectRef) -> Any:
        """Map the object; pages are copied only if somebody writes to them, and then privately."""
        pid, fd, header_size, extents = ref.address
        try:
            file = open(f"/proc/{pid}/fd/{fd}", "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError as error:
            raise ObjectLost(ref.worker) from error
        with file:
            memory = memoryview(mmap.mmap(file.fileno(), ref.num_bytes, access=mmap.ACCESS_COPY))
        return pickle.loads(memory[:header_size], buffers=[memory[start : start + size] for start, size in extents])

    def adopt(self, ref: ObjectRef) -> ObjectRef:
        """Open another worker's memfd, so that its memory outlives that worker."""
        pid, fd, header_size, extents = ref.address
        if pid == os.getpid():
            return ref
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ObjectLost(ref.worker) from error
        return ObjectRef(self._worker, (os.getpid(), own, header_size, extents), ref.num_bytes)

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Close the memfds; the memory goes when the last reader has dropped its tensors."""
        for ref in refs:
            pid, fd, *_ = ref.address
            assert pid == os.getpid(), "an object is freed by its maker"
            os.close(fd)


@cache
def allow_open_files() -> None:
    """Let this process open as many files as the system allows it: each object that it keeps is one."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Takes the bytes of tensors out of band; plain pickle would copy them through a byte string."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor:
            data = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy()
            return _load_tensor, (pickle.PickleBuffer(raw.data), data.dtype, tuple(data.shape))
        return super().reducer_override(obj)


def _load_tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def dump_parts(value: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle a value, the bytes of its tensors apart and as views of their own memory."""
    buffers: list[pickle.PickleBuffer] = []
    header = io.BytesIO()
    keep: Callable[[pickle.PickleBuffer], None] = buffers.append
    _Pickler(header, protocol=5, buffer_callback=keep).dump(value)
    return header.getvalue(), [buffer.raw() for buffer in buffers]


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
