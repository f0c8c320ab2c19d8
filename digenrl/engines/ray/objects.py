"""Objects in Ray's object store, and how the references to them cross between the driver and workers.

What a worker's task puts is a result of that task beside its reply: the driver owns it, so it survives its maker's
process, is freed when the driver lets go of it, and goes from worker to worker without passing the driver.
"""

from __future__ import annotations

import io
import itertools
import pickle
import uuid
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np
import ray

from digenrl.engines.engine import ObjectLost, ObjectRef, ObjectStore, WorkerTimeout
from digenrl.engines.shared_memory import dump_parts

_MOST_INLINE_BYTES = 1000  # of what a task puts, to travel with its reply and with the tasks that read it
_STORED_BYTES = 100 * 1024  # Ray sends smaller results to their owner, the driver, instead of to the store
_PADDING = np.zeros(_STORED_BYTES, np.uint8)

Serial = tuple[str, int]
"""Names what one task has put: who names it, and a number."""

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

    def __init__(
        self, serial: Serial, ref: ray.ObjectRef[Any], maker: str, indices: Iterable[int], *, is_inline: bool
    ) -> None:
        self.serial = serial
        self.ref: ray.ObjectRef[Any] | None = ref
        self.maker = maker
        self.is_inline = is_inline
        """Whether it is in this process, and so is never lost."""
        self._live = set(indices)

    def free(self, index: int) -> None:
        """Let go of one of the objects."""
        self._live.discard(index)
        if not self._live:
            self.ref = None


class Source(NamedTuple):
    """Where an object that a task may read comes from."""

    maker: str
    keeper: str
    """The maker, or the driver where it has adopted the object."""
    ref: ray.ObjectRef[Any]


class DriverStore(ObjectStore):
    """The driver's side: it owns all objects and reads the few that are meant for it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._missed: set[ray.ObjectRef[Any]] = set()
        self._kept: WeakValueDictionary[Serial, Kept] = WeakValueDictionary()

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
        again = self.keep(kept.ref, kept.maker, [index], is_inline=kept.is_inline)
        return ObjectRef("driver", (again, index), ref.num_bytes)

    def lost(self, refs: Sequence[ObjectRef]) -> list[ObjectRef]:
        """Name those of some objects that no host has any more, or that were freed."""
        inline = {ref for ref in refs if ref.address[0].ref is not None and ref.address[0].is_inline}
        live = [
            ref
            for ref in refs
            if ref not in inline and ref.address[0].ref is not None and ref.address[0].ref not in self._missed
        ]
        places = ray.experimental.get_object_locations([ref.address[0].ref for ref in live]) if live else {}
        hosts = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # Ray may name those that are gone, too
        here = {
            ref
            for ref in live
            if not hosts.isdisjoint((place := places[ref.address[0].ref])["node_ids"]) or place["did_spill"]
        }
        return [ref for ref in refs if ref not in here and ref not in inline]

    def note_missed(self, ref: ray.ObjectRef[Any]) -> None:
        """Note that Ray could not find an object, whatever it says of it."""
        self._missed.add(ref)

    def another_node(self, ref: ObjectRef) -> str | None:
        """Name the node with the most room for objects among those that do not have this one; None if it needs none."""
        if ref.address[0].is_inline:
            return None
        has_it = ray.experimental.get_object_locations([ref.address[0].ref])[ref.address[0].ref]["node_ids"]
        rooms = {
            node["NodeID"]: node["Resources"].get("object_store_memory", 0.0)
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in has_it
        }
        return max(rooms, key=lambda node: rooms[node], default=None)

    def keep(
        self,
        ref: ray.ObjectRef[Any],
        maker: str,
        indices: Iterable[int],
        serial: Serial | None = None,
        *,
        is_inline: bool = False,
    ) -> Kept:
        """Hold what a task has put, under the name that its maker has given it, or one of the driver's."""
        kept = Kept(serial or ("driver", next(self._numbers)), ref, maker, indices, is_inline=is_inline)
        self._kept[kept.serial] = kept
        return kept

    def free_by_name(self, names: Sequence[tuple[Serial, int]]) -> None:
        """Let go of what workers say that they freed, by serial and index."""
        for serial, index in names:
            if serial in self._kept:
                self._kept[serial].free(index)

    def dump(self, arguments: Any) -> tuple[bytes, dict[Serial, Source]]:
        """Pickle a task's arguments; returns where the objects in them come from, by serial."""
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
        self.sources: dict[Serial, Source] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not ObjectRef:
            return None
        kept, index = obj.address
        if kept.ref is not None:
            self.sources[kept.serial] = Source(kept.maker, obj.worker, kept.ref)
        return kept.serial, index, obj.worker, obj.num_bytes


class _ReplyUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, made: Kept | None, kept: WeakValueDictionary[Serial, Kept]) -> None:
        super().__init__(file)
        self._made, self._kept = made, kept

    def persistent_load(self, pid: Any) -> ObjectRef:
        serial, index, worker, num_bytes = pid
        kept = self._made if serial is None else self._kept.get(serial)
        if kept is None:
            raise ObjectLost(worker)
        return ObjectRef(worker, (kept, index), num_bytes)


@dataclass(frozen=True)
class Put:
    """In a worker: the place of an object that it has put itself."""

    serial: Serial
    index: int


class Arrived:
    """In a worker: where an object that came with a task's arguments is read."""

    def __init__(self, serial: Serial, index: int, keeper: str, source: Any) -> None:
        self.serial, self.index = serial, index
        self._keeper = keeper
        self._source = source
        """What the maker's task put, or Ray's reference to it, or None if it was freed."""

    def read(self) -> Any:
        """Read the object."""
        if self._source is None:
            raise ObjectLost(self._keeper)
        if isinstance(self._source, ray.ObjectRef):
            try:
                self._source = ray.get(self._source)
            except ray.exceptions.ObjectLostError as error:
                raise ObjectLost(self._keeper) from error
        return decode(self._source[self.index])


class Made(NamedTuple):
    """What a task leaves behind."""

    values: tuple[Any, ...]
    num_objects: int
    num_inline_bytes: int
    """Of the objects, if they travel with the reply."""
    serial: Serial
    """Of the objects."""
    freed: tuple[tuple[Serial, int], ...]
    """Objects of other tasks, by serial and index."""


class WorkerStore(ObjectStore):
    """A worker's side: what a task puts is handed to Ray at its end."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._name = uuid.uuid4().hex  # another process may have had this worker's
        self._num_tasks = 0
        self._made: list[Encoded | None] = []
        self._num_bytes = 0
        self._freed: list[tuple[Serial, int]] = []

    def put(self, value: Any) -> ObjectRef:
        """Keep `value`; its tensors are written out when the task ends, and must be left alone until then."""
        encoded, num_bytes = encode(value)
        self._made.append(encoded)
        self._num_bytes += num_bytes
        return ObjectRef(self._worker, Put(self._serial, len(self._made) - 1), num_bytes)

    @property
    def _serial(self) -> Serial:
        """Of the task that is running."""
        return self._name, self._num_tasks

    def get(self, ref: ObjectRef) -> Any:
        """Read an object: one of the task's arguments, or one that this task has put."""
        if isinstance(ref.address, Arrived):
            return ref.address.read()
        encoded = self._made[ref.address.index] if ref.address.serial == self._serial else None
        if encoded is None:
            raise ObjectLost(ref.worker)
        return decode(encoded)

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects; those of other tasks are freed by the driver, which owns them."""
        for ref in refs:
            if ref.address.serial == self._serial:
                self._made[ref.address.index] = None
            else:
                self._freed.append((ref.address.serial, ref.address.index))

    def take(self) -> Made:
        """Hand over what the task has put, and what of other tasks' it has freed.

        What Ray would send to the driver is padded to as many bytes as it sends to its store, unless it is tiny: the
        store costs a task two milliseconds.
        """
        is_inline = 0 < self._num_bytes <= _MOST_INLINE_BYTES
        is_padded = _MOST_INLINE_BYTES < self._num_bytes < _STORED_BYTES
        made = Made(
            (*self._made, _PADDING) if is_padded else tuple(self._made),
            len(self._made),
            self._num_bytes if is_inline else 0,
            self._serial,
            tuple(self._freed),
        )
        self._made, self._num_bytes, self._freed, self._num_tasks = [], 0, [], self._num_tasks + 1
        return made

    def load(self, arguments: bytes, sources: dict[Serial, Any]) -> Any:
        """Unpickle a task's arguments; `sources` are what their references stand for, by serial."""
        return _ArgumentsUnpickler(io.BytesIO(arguments), sources).load()

    def dump(self, reply: Any) -> bytes:
        """Pickle a reply; its references travel by name."""
        with io.BytesIO() as file:
            _ReplyPickler(file, self._serial).dump(reply)
            return file.getvalue()


class _ArgumentsUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, sources: dict[Serial, Any]) -> None:
        super().__init__(file)
        self._sources = sources

    def persistent_load(self, pid: Any) -> ObjectRef:
        serial, index, worker, num_bytes = pid
        return ObjectRef(worker, Arrived(serial, index, worker, self._sources.get(serial)), num_bytes)


class _ReplyPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, own: Serial) -> None:
        super().__init__(file)
        self._own = own

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not ObjectRef:
            return None
        serial = None if obj.address.serial == self._own else obj.address.serial
        return serial, obj.address.index, obj.worker, obj.num_bytes
