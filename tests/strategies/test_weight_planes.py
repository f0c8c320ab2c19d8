"""New weights arrive bit by bit, or an error says that they did not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from digenrl.algorithms import FlowGRPO
from digenrl.engines import Engine, InlineEngine, LocalEngine, Task, WorkerDied
from digenrl.strategies.span import Span
from digenrl.strategies.weight_planes import (
    PLANES,
    ObjectStorePlane,
    SharedMemoryPlane,
    WeightPlane,
    WeightSyncError,
    WriteReport,
    WrittenWeights,
    choose_plane,
)
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.workers import Worker, WorkerSettings
from tests.toy import ToyPolicy, toy_module


class PlaneWorker(Worker):
    """A worker whose weights a test may look at and change."""

    def weights(self) -> dict[str, list[int]]:
        return {
            name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
            for name, tensor in self._module.published_weights().items()
        }

    def nudge(self, amount: float) -> None:
        with torch.no_grad():
            for tensor in self._trained_parameters().values():
                tensor.add_(amount)

    def update_copies(self) -> None:
        self._module.update_weight_copies()

    def wait_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.005)

    def num_open(self) -> tuple[int, int]:
        """Count this process's memfds, and its threads that send weights."""
        targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]
        return sum("memfd:digenrl-object" in target for target in targets), len(threads)


class GarblingWorker(PlaneWorker):
    """Flips one bit of what it has handed over."""

    def write_weights(self, version: int) -> WriteReport:
        report = super().write_weights(version)
        self._end._slots[version % 2][100] ^= 1  # type: ignore[union-attr]
        return report


class SilentWorker(PlaneWorker):
    """Hands over nothing of version 1."""

    def write_weights(self, version: int) -> WriteReport:
        assert self._end is not None
        if version != 1:
            return super().write_weights(version)
        return WriteReport(WrittenWeights(self._end.weights.send([])), Span(0.0, 0.0))


class ForgetfulWorker(PlaneWorker):
    """Says that it has loaded, and has not."""

    def load_weights(self, version: int, source: object, digests: bytes) -> object:
        assert self._end is not None
        weights, before = self._end.weights, self.weights()
        receive = weights.receive

        def forget(arriving: Iterable[tuple[int, ByteView]]) -> dict[int, bytes]:
            return receive((index, ByteView(weights._view(index).tensor.clone())) for index, _ in arriving)

        weights.receive = forget  # type: ignore[method-assign]
        try:
            return super().load_weights(version, source, digests)
        finally:
            assert self.weights() == before


def build(engine: Engine, name: str, factory: type[PlaneWorker], module: FlowGRPO | None = None) -> None:
    engine.start(name, factory)
    engine.call(name, "build", cloudpickle.dumps(module or toy_module()), WorkerSettings())


def plane_of(
    engine: Engine,
    workers: Mapping[str, type[PlaneWorker]],
    kind: str = "shared_memory",
    module: FlowGRPO | None = None,
) -> WeightPlane:
    """Start workers with different weights, and connect the first with the others."""
    for amount, (name, factory) in enumerate(workers.items()):
        build(engine, name, factory, module)
        engine.call(name, "nudge", float(amount))
    trainer, *generators = workers
    plane = PLANES[kind](engine)
    plane.setup([trainer], {generator: (generator,) for generator in generators})
    return plane


def publish(plane: WeightPlane, version: int, *, must_change: bool = False) -> list[Task]:
    """Publish a version and queue its load on all generators that there are."""
    plane.publish(version, must_change=must_change)
    return [task for generator in plane._generators for task in plane.load(generator, version)]


CASES = [
    (InlineEngine, "shared_memory"),
    (InlineEngine, "object_store"),
    *((LocalEngine, kind) for kind in PLANES),
]


@pytest.fixture
def local() -> Iterator[Engine]:
    engine = LocalEngine(60.0)
    yield engine
    engine.shutdown()


# ---- what arrives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make_engine", "kind"), CASES)
def test_a_published_version_is_held_by_all_generators_bit_by_bit(make_engine: type[Engine], kind: str) -> None:
    engine = make_engine(60.0)
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker}, kind)
    assert engine.call("one", "weights") != engine.call("trainer", "weights")
    for version in range(4):
        engine.call("trainer", "nudge", 0.1)
        engine.gather(publish(plane, version, must_change=version > 0))
        expected = engine.call("trainer", "weights")
        assert engine.call("one", "weights") == expected
        assert engine.call("two", "weights") == expected
    engine.shutdown()
    plane.close()


def test_trainers_that_hold_the_same_each_send_a_part(local: Engine) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker})
    build(local, "second", PlaneWorker)
    for kind in PLANES:
        plane = PLANES[kind](local)
        plane.chunk_bytes = 1000  # type: ignore[misc]
        plane.setup(["trainer", "second"], {"one": ("one",)})
        for trainer in ("trainer", "second"):
            local.call(trainer, "nudge", 0.5)
        local.gather(publish(plane, 1))
        assert {chunk.sender for chunk in plane._chunks} == {0, 1}
        assert local.call("one", "weights") == local.call("second", "weights")
        plane.close()


def test_only_what_is_trained_or_published_travels() -> None:
    """A stand-in for LoRA: of the policy's weights only a small part is trained."""
    engine = InlineEngine()
    module = toy_module()

    class Adapted(ToyPolicy):
        def build(self) -> None:
            super().build()
            self.requires_grad_(False)
            self.adapter = nn.Linear(4, 2, bias=False)

    module.policy = Adapted()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker}, module=module)
    assert sum(chunk.num_bytes for chunk in plane._chunks) == 4 * 2 * 4
    assert os.fstat(plane._fds[0]).st_size == 32  # type: ignore[attr-defined]
    engine.gather(publish(plane, 0))
    assert engine.call("one", "weights") == engine.call("trainer", "weights")
    plane.close()


def test_tensors_that_are_not_contiguous_arrive_too() -> None:
    engine = InlineEngine()

    class Strided(ToyPolicy):
        def build(self) -> None:
            super().build()
            self.extra = nn.Parameter(torch.arange(12.0).view(3, 4).t())

    module = toy_module()
    module.policy = Strided()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker}, module=module)
    engine.gather(publish(plane, 0))
    assert engine.call("one", "weights") == engine.call("trainer", "weights")
    plane.close()


# ---- what does not -------------------------------------------------------------------------------------------


def test_a_slot_that_was_damaged_is_an_error_that_names_the_tensors(local: Engine) -> None:
    plane = plane_of(local, {"trainer": GarblingWorker, "one": PlaneWorker})
    with pytest.raises(
        WeightSyncError, match="version 0 arrived as .* in `policy.input.weight` to `policy.output.bias`"
    ):
        local.gather(publish(plane, 0))
    plane.close()


@pytest.mark.parametrize("kind", ["shared_memory", "object_store"])
def test_a_share_that_was_not_handed_over_is_an_error(kind: str) -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": SilentWorker, "one": PlaneWorker}, kind)
    engine.gather(publish(plane, 0))
    if kind == "object_store":
        plane._keep = lambda version, sources: ObjectStorePlane._keep(plane, version, [()])  # type: ignore
    engine.call("trainer", "nudge", 0.1)
    with pytest.raises(WeightSyncError, match="version 1"):
        engine.gather(publish(plane, 1))
    plane.close()


def test_a_load_from_a_stale_slot_is_an_error() -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": SilentWorker, "one": PlaneWorker})
    for version in (-1, 0):  # both slots are full; version 1 is then digested, but never written
        engine.gather(publish(plane, version))
        engine.call("trainer", "nudge", 0.1)
    with pytest.raises(WeightSyncError, match="version 1 arrived as"):
        engine.gather(publish(plane, 1))
    plane.close()


def test_a_load_that_moves_nothing_is_an_error() -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": ForgetfulWorker})
    with pytest.raises(WeightSyncError, match="version 0 arrived as"):
        engine.gather(publish(plane, 0))
    plane.close()


def test_weights_that_did_not_change_are_an_error_only_where_they_must() -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker}, module=toy_module(ema_decay=0.9))
    plane.publish(0, must_change=False)
    plane.publish(1, must_change=False)
    engine.call("trainer", "update_copies")  # counts a step, which is published, too
    with pytest.raises(WeightSyncError, match="version 2 has the very weights of version 1"):
        plane.publish(2, must_change=True)
    engine.call("trainer", "nudge", 1e-3)
    plane.publish(3, must_change=True)
    plane.close()


def test_trainers_that_differ_are_an_error() -> None:
    engine = InlineEngine()
    plane_of(engine, {"first": PlaneWorker, "one": PlaneWorker}).close()
    build(engine, "second", PlaneWorker)
    plane = SharedMemoryPlane(engine)
    plane.setup(["first", "second"], {"one": ("one",)})
    plane.publish(0, must_change=False)
    engine.call("second", "nudge", 1.0)
    with pytest.raises(
        WeightSyncError, match="the trainers' weights differ at version 1: .* on first, but .* on second"
    ):
        plane.publish(1, must_change=False)
    plane.close()


def test_workers_that_built_different_models_are_an_error_that_names_them() -> None:
    engine = InlineEngine()
    other = toy_module()
    other.policy = ToyPolicy(hidden=16)
    build(engine, "trainer", PlaneWorker)
    build(engine, "one", PlaneWorker, other)
    with pytest.raises(WeightSyncError, match="worker one built other trained parameters than trainer"):
        SharedMemoryPlane(engine).setup(["trainer"], {"one": ("one",)})


# ---- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANES)
def test_a_busy_generator_holds_up_nobody_and_finds_its_version_later(local: Engine, kind: str, tmp_path: Path) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker}, kind)
    done = tmp_path / "done"
    local.submit("one", "wait_for", str(done))
    late = publish(plane, 0)
    local.gather(late[1:])
    local.call("trainer", "nudge", 0.1)
    plane.publish(1, must_change=True)  # returns while `one` has not even begun with version 0
    assert not late[0].is_done
    done.touch()
    local.gather([late[0], *plane.load("one", 1)])
    assert local.call("one", "weights") == local.call("trainer", "weights")
    plane.close()


@pytest.mark.parametrize("kind", PLANES)
def test_what_a_version_was_sent_in_is_not_used_again_before_all_have_it(
    local: Engine, kind: str, tmp_path: Path
) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker}, kind)
    done = tmp_path / "done"
    local.submit("one", "wait_for", str(done))
    loads = []
    for version in range(2):
        local.call("trainer", "nudge", 0.1)
        loads += publish(plane, version)
    writes = []
    submit = local.submit

    def watch(worker: str, method: str, /, *args: object, **kwargs: object) -> Task:
        if method == "write_weights":
            writes.append([load.is_done for load in loads])
        return submit(worker, method, *args, **kwargs)

    local.submit = watch  # type: ignore[method-assign]
    threading.Timer(0.2, done.touch).start()
    publish(plane, 2)
    assert writes[0][0], "version 0 was loaded by `one` before version 2 was written"
    local.gather(loads)
    plane.close()


@pytest.mark.parametrize("kind", PLANES)
def test_what_was_written_ahead_is_published_and_only_where_its_slot_is_free(local: Engine, kind: str) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker}, kind)
    writes = []
    submit = local.submit

    def watch(worker: str, method: str, /, *args: object, **kwargs: object) -> Task:
        if method == "write_weights":
            writes.append(args[0])
        return submit(worker, method, *args, **kwargs)

    local.submit = watch  # type: ignore[method-assign]
    plane.publish(0, must_change=False)
    local.call("trainer", "nudge", 0.1)
    plane.write_ahead(1)
    assert writes == [0, 1]
    local.gather(publish(plane, 1, must_change=True))
    assert writes == [0, 1]
    assert local.call("one", "weights") == local.call("trainer", "weights")
    plane.publish(1, must_change=True)  # repeated, as after a death
    plane.write_ahead(3)  # where version 1 lies, whose load is not noted yet
    assert writes == [0, 1, 1]
    local.call("trainer", "nudge", 0.1)
    plane.write_ahead(2)
    local.kill("trainer")
    build(local, "trainer", PlaneWorker)
    local.call("trainer", "nudge", 0.7)
    plane.rejoin("trainer")
    local.gather(publish(plane, 2, must_change=True))  # what the one that died has written is forgotten
    assert local.call("one", "weights") == local.call("trainer", "weights")
    plane.close()


def test_objects_are_freed_but_for_the_last_versions(local: Engine) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker}, "object_store")
    counts = []
    for version in range(6):
        local.gather(publish(plane, version))
        counts.append(local.call("trainer", "num_open")[0])
    num_buckets = len(plane._published[5][0])  # type: ignore[attr-defined]
    assert counts[1:] == [num_buckets] * 5
    plane.close()


def test_closing_gives_the_memory_back_and_may_be_done_twice() -> None:
    engine = InlineEngine()
    before = len(os.listdir("/proc/self/fd"))
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker})
    assert len(os.listdir("/proc/self/fd")) > before
    plane.close()
    plane.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_that_is_opened_anew_leaves_no_thread_behind(local: Engine) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker}, "collective")
    local.gather(publish(plane, 0))
    assert local.call("trainer", "num_open")[1] == 2
    plane.setup(["trainer"], {"one": ("one",)})
    local.gather(publish(plane, 1))
    assert local.call("trainer", "num_open")[1] == 1
    plane.close()


# ---- restarts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANES)
def test_a_generator_that_was_started_again_loads_what_was_published(local: Engine, kind: str) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker}, kind)
    local.gather(publish(plane, 0))
    local.call("trainer", "nudge", 0.1)
    plane.publish(1, must_change=True)
    local.kill("one")
    assert plane.load("one", 1)[0].has_failed
    build(local, "one", PlaneWorker)
    plane.rejoin("one")
    local.gather(plane.load("one", 1))
    assert local.call("one", "weights") == local.call("trainer", "weights")
    for version in (2, 3, 4):  # the load that failed is not waited for
        local.call("trainer", "nudge", 0.1)
        local.gather(publish(plane, version))
    assert local.call("one", "weights") == local.call("trainer", "weights")
    plane.close()


@pytest.mark.parametrize("kind", PLANES)
def test_trainers_that_were_started_again_give_what_they_had_published(local: Engine, kind: str) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker}, kind)
    local.gather(publish(plane, 0))
    local.call("trainer", "nudge", 0.25)
    plane.publish(1, must_change=True)
    local.gather(plane.load("one", 1))
    local.kill("trainer")
    build(local, "trainer", PlaneWorker)
    local.call("trainer", "nudge", 0.25)
    plane.rejoin("trainer")
    local.gather(plane.load("two", 1))
    assert local.call("two", "weights") == local.call("trainer", "weights") == local.call("one", "weights")
    local.call("trainer", "nudge", 0.1)
    local.gather(publish(plane, 2, must_change=True))
    assert local.call("one", "weights") == local.call("trainer", "weights")
    plane.close()


@pytest.mark.parametrize("kind", ["object_store", "collective"])
def test_a_trainer_that_has_died_is_named_by_who_waits_for_it(local: Engine, kind: str) -> None:
    plane = plane_of(local, {"trainer": PlaneWorker, "one": PlaneWorker}, kind)
    local.gather(publish(plane, 0))
    plane.publish(1, must_change=False)
    local.kill("trainer")
    with pytest.raises(WorkerDied, match="worker trainer killed by SIGKILL.*on worker one") as death:
        local.gather(plane.load("one", 1))
    assert death.value.worker == "trainer"
    plane.close()


def test_a_worker_that_comes_back_with_another_model_is_an_error() -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker})
    engine.kill("one")
    other = toy_module()
    other.policy = ToyPolicy(hidden=16)
    build(engine, "one", PlaneWorker, other)
    with pytest.raises(WeightSyncError, match="worker one built other trained parameters than before"):
        plane.rejoin("one")
    plane.close()


# ---- the choice ----------------------------------------------------------------------------------------------


class FarWorker(PlaneWorker):
    """Cannot see the driver's memory."""

    def reads_token(self, path: str, token: bytes) -> bool:
        return super().reads_token(path + "0", token)


def test_workers_that_share_no_memory_with_the_driver_use_the_object_store() -> None:
    engine = InlineEngine()
    engine.start("near", PlaneWorker)
    engine.start("far", FarWorker)
    assert isinstance(choose_plane("auto", engine, ["near"]), SharedMemoryPlane)
    assert isinstance(choose_plane("auto", engine, ["near", "far"]), ObjectStorePlane)
    with pytest.raises(ValueError, match="`weight_plane` shared_memory needs all workers .* but far is on localhost"):
        choose_plane("shared_memory", engine, ["near", "far"])
