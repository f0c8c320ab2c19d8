"""Objects in Ray's object store, and how the references to them cross between the driver and workers.

What a worker's task puts is a result of that task beside its reply: the driver owns it, so it survives its maker's
process, is freed when the driver lets go of it, and goes from worker to worker without passing the driver.
"""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np
import ray

from digenrl.engines.engine import ObjectLost, ObjectRef, ObjectStore, WorkerTimeout
from digenrl.engines.shared_memory import dump_parts

_INLINE_BYTES = 100 * 1024  # Ray sends smaller results to the owner, the driver, instead of to the store

Encoded = tuple[bytes, list[Any]]
"""An object's pickle, and the bytes of its tensors, which Ray's store gives without a copy."""


def encode(value: Any) -> tuple[Encoded, int]:
    """Take an object apart, its tensors as views of their own memory; returns the bytes it has, too."""
    header, buffers = dump_parts(value)
    return (header, [np.frombuffer(buffer, np.uint8) for buffer in buffers]), len(header) + sum(
        buffer.nbytes for buffer in buffers
    )


def decode(encoded: Encoded) -> Any:
    """Put an object together again; its tensors are the memory that `encoded` has."""
    header, buffers = encoded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # readers are asked not to write
        return pickle.loads(header, buffers=buffers)


class Kept:
    """The driver's hold on what one task put: Ray keeps it until each object of it was freed, or this is gone."""

    def __init__(self, serial: int, ref: ray.ObjectRef[Any], maker: str, indices: Iterable[int]) -> None:
        self.serial = serial
        self.ref: ray.ObjectRef[Any] | None = ref
        self.maker = maker
        self._live = set(indices)

    def free(self, index: int) -> None:
        """Let go of one of the objects."""
        self._live.discard(index)
        if not self._live:
            self.ref = None


class DriverStore(ObjectStore):
    """The driver's side: it owns all objects and reads the few that are meant for it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._serials = itertools.count()
        self._kept: WeakValueDictionary[int, Kept] = WeakValueDictionary()

    def put(self, value: Any) -> ObjectRef:
        """Copy `value` to the store of this host."""
        encoded, num_bytes = encode(value)
        return ObjectRef("driver", (self.keep(ray.put((encoded,)), "driver", [0]), 0), num_bytes)

    def get(self, ref: ObjectRef) -> Any:
        """Read an object, wherever it is."""
        kept, index = ref.address
        if kept.ref is None:
            raise ObjectLost(ref.worker)
        try:
            return decode(ray.get(kept.ref, timeout=self._timeout_s)[index])
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerTimeout(f"an object of worker {ref.worker} did not arrive in {self._timeout_s:g} s.") from error
        except ray.exceptions.ObjectLostError as error:
            raise ObjectLost(ref.worker) from error

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects, whoever made them."""
        for ref in refs:
            kept, index = ref.address
            kept.free(index)

    def adopt(self, ref: ObjectRef) -> ObjectRef:
        """Hold an object a second time, under the driver's name; it is lost only with the host that keeps it."""
        kept, index = ref.address
        if kept.ref is None:
            raise ObjectLost(ref.worker)
        return ObjectRef("driver", (self.keep(kept.ref, kept.maker, [index]), index), ref.num_bytes)

    def keep(self, ref: ray.ObjectRef[Any], maker: str, indices: Iterable[int]) -> Kept:
        """Hold what a task has put."""
        kept = Kept(next(self._serials), ref, maker, indices)
        self._kept[kept.serial] = kept
        return kept

    def free_by_name(self, names: Sequence[tuple[int, int]]) -> None:
        """Let go of what workers say that they freed, by serial number and index."""
        for serial, index in names:
            if serial in self._kept:
                self._kept[serial].free(index)

    def dump(self, arguments: Any) -> tuple[bytes, dict[int, tuple[str, ray.ObjectRef[Any]]]]:
        """Pickle a task's arguments; returns the makers and Ray references of the objects in them, by serial number."""
        with io.BytesIO() as file:
            pickler = _ArgumentsPickler(file)
            pickler.dump(arguments)
            return file.getvalue(), pickler.sources

    def load(self, reply: bytes, made: Kept | None) -> Any:
        """Unpickle a worker's reply, its references those that the driver holds."""
        return _ReplyUnpickler(io.BytesIO(reply), made, self._kept).load()


class _ArgumentsPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.sources: dict[int, tuple[str, ray.ObjectRef[Any]]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not ObjectRef:
            return None
        kept, index = obj.address
        if kept.ref is not None:
            self.sources[kept.serial] = (kept.maker, kept.ref)
        return kept.serial, index, obj.worker, kept.maker, obj.num_bytes


class _ReplyUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, made: Kept | None, kept: WeakValueDictionary[int, Kept]) -> None:
        super().__init__(file)
        self._made, self._kept = made, kept

    def persistent_load(self, pid: Any) -> ObjectRef:
        serial, index, worker, num_bytes = pid
        kept = self._made if serial is None else self._kept.get(serial)
        if kept is None:
            raise ObjectLost(worker)
        return ObjectRef(worker, (kept, index), num_bytes)


class Arrived:
    """In a worker: where an object that came with a task's arguments is read."""

    def __init__(self, serial: int, index: int, maker: str, source: Any) -> None:
        self.serial, self.index = serial, index
        self._maker = maker
        self._source = source
        """What the maker's task put, or Ray's reference to it, or None if it was freed."""

    def read(self) -> Any:
        """Read the object."""
        if self._source is None:
            raise ObjectLost(self._maker)
        if isinstance(self._source, ray.ObjectRef):
            try:
                self._source = ray.get(self._source)
            except ray.exceptions.ObjectLostError as error:
                raise ObjectLost(self._maker) from error
        return decode(self._source[self.index])


class WorkerStore(ObjectStore):
    """A worker's side: what a task puts is handed to Ray at its end."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._made: list[Encoded | None] = []
        self._num_bytes = 0
        self._freed: list[tuple[int, int]] = []

    def put(self, value: Any) -> ObjectRef:
        """Keep `value`; its tensors are written out when the task ends, and must be left alone until then."""
        encoded, num_bytes = encode(value)
        self._made.append(encoded)
        self._num_bytes += num_bytes
        return ObjectRef(self._worker, len(self._made) - 1, num_bytes)

    def get(self, ref: ObjectRef) -> Any:
        """Read an object: one of the task's arguments, or one that this task has put."""
        if isinstance(ref.address, Arrived):
            return ref.address.read()
        encoded = self._made[ref.address] if ref.address < len(self._made) else None
        if encoded is None:
            raise ObjectLost(ref.worker)
        return decode(encoded)

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects; those that came from the driver are freed there."""
        for ref in refs:
            if isinstance(ref.address, Arrived):
                self._freed.append((ref.address.serial, ref.address.index))
            else:
                self._made[ref.address] = None

    def take(self) -> tuple[tuple[Any, ...], int, tuple[tuple[int, int], ...]]:
        """Hand over what the task has put, how many objects that are, and the names of the objects that it freed.

        Few bytes are padded to as many as Ray sends to its store, and not to the driver.
        """
        made, freed = tuple(self._made), tuple(self._freed)
        padding = (np.zeros(_INLINE_BYTES, np.uint8),) if made and self._num_bytes < _INLINE_BYTES else ()
        self._made, self._num_bytes, self._freed = [], 0, []
        return (*made, *padding), len(made), freed

    def load(self, arguments: bytes, sources: dict[int, Any]) -> Any:
        """Unpickle a task's arguments; `sources` are what their references stand for, by serial number."""
        return _ArgumentsUnpickler(io.BytesIO(arguments), sources).load()

    def dump(self, reply: Any) -> bytes:
        """Pickle a reply; its references travel by name."""
        with io.BytesIO() as file:
            _ReplyPickler(file).dump(reply)
            return file.getvalue()


class _ArgumentsUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, sources: dict[int, Any]) -> None:
        super().__init__(file)
        self._sources = sources

    def persistent_load(self, pid: Any) -> ObjectRef:
        serial, index, worker, maker, num_bytes = pid
        return ObjectRef(worker, Arrived(serial, index, maker, self._sources.get(serial)), num_bytes)


class _ReplyPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not ObjectRef:
            return None
        if isinstance(obj.address, Arrived):
            return obj.address.serial, obj.address.index, obj.worker, obj.num_bytes
        return None, obj.address, obj.worker, obj.num_bytes
