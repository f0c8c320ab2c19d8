"""New weights arrive bit by bit, or an error says that they did not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import cloudpickle
import pytest
import torch
from torch import Tensor

from digenrl.algorithms import FlowGRPO
from digenrl.engines import Engine, InlineEngine, LocalEngine, Task
from digenrl.strategies.weight_planes import (
    ArenaLayout,
    SharedMemoryPlane,
    WeightArena,
    WeightSyncError,
    weights_digest,
)
from digenrl.strategies.workers import Span, Worker, WorkerSettings
from tests.toy import ToyPolicy, toy_module


def tensors() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    half = torch.randn(5, 3, generator=rng).bfloat16()
    half[0, 0] = float("nan")
    return {
        "float32": torch.randn(7, 2, generator=rng),
        "bfloat16": half,
        "scalar": torch.randn((), generator=rng),
        "float16": torch.randn(3, generator=rng).half(),
        "empty": torch.empty(0, 4),
        "float64": torch.randn(2, 2, dtype=torch.float64, generator=rng),
        "int64": torch.tensor([-1, 2**40]),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.randn(9, generator=rng).to(torch.float8_e4m3fn),
    }


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


# ---- digests -------------------------------------------------------------------------------------------------


def test_equal_weights_have_equal_digests_however_they_lie_in_memory() -> None:
    strided = {name: torch.stack([value, value], -1)[..., 0] for name, value in tensors().items()}
    assert not strided["float32"].is_contiguous()
    assert weights_digest(strided.items()) == weights_digest(tensors().items())


@pytest.mark.parametrize("name", [name for name, value in tensors().items() if value.numel()])
def test_any_changed_bit_changes_the_digest(name: str) -> None:
    digest = weights_digest(tensors().items())
    num_bytes = len(bits(tensors()[name]))
    for byte in range(num_bytes):
        for bit in (0, 7):
            changed = tensors()
            raw = changed[name].reshape(-1).view(torch.uint8)
            raw[byte] ^= 1 << bit
            assert weights_digest(changed.items()) != digest, (byte, bit)


def test_two_tensors_that_were_exchanged_change_the_digest() -> None:
    left, right = torch.randn(4, 4), torch.randn(4, 4)
    assert weights_digest([("a", left), ("b", right)]) != weights_digest([("a", right), ("b", left)])


@pytest.mark.parametrize(("left", "right"), [(0, 1), (0, 2), (1, 3)])
def test_two_rows_that_were_exchanged_change_the_digest(left: int, right: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    exchanged = weight.clone()
    exchanged[[left, right]] = weight[[right, left]]
    assert weights_digest([("a", weight)]) != weights_digest([("a", exchanged)])


def test_names_shapes_and_types_are_part_of_the_digest() -> None:
    value = torch.zeros(2, 3)
    variants = [[("a", value)], [("b", value)], [("a", value.t())], [("a", value.int())], [("a", value), ("b", value)]]
    assert len({weights_digest(variant) for variant in variants}) == len(variants)
    assert weights_digest([]) != weights_digest([("a", torch.empty(0))])


# ---- the slots -----------------------------------------------------------------------------------------------


@pytest.fixture
def paths() -> Iterator[list[str]]:
    layout = ArenaLayout.of(tensors())
    fds = [os.memfd_create("test") for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, layout.num_bytes)
    yield [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]
    for fd in fds:
        os.close(fd)


def test_a_layout_keeps_tensors_apart_and_aligned() -> None:
    layout = ArenaLayout.of(tensors())
    ends = [0]
    for extent, (name, tensor) in zip(layout.extents, tensors().items(), strict=True):
        assert (extent.name, extent.shape, extent.dtype) == (name, tuple(tensor.shape), tensor.dtype)
        assert extent.num_bytes == len(bits(tensor))
        assert extent.start % 64 == 0
        assert extent.start >= ends[-1]
        ends.append(extent.start + extent.num_bytes)
    assert layout.num_bytes >= ends[-1]
    assert layout == ArenaLayout.of(tensors())


def test_what_one_worker_writes_another_reads_bit_by_bit(paths: list[str]) -> None:
    layout, sent = ArenaLayout.of(tensors()), tensors()
    WeightArena(paths, layout).write(1, sent)
    got = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    WeightArena(paths, layout).read(1, got)
    assert {name: bits(tensor) for name, tensor in got.items()} == {name: bits(t) for name, t in sent.items()}
    assert weights_digest(got.items()) == weights_digest(sent.items())


def test_slots_do_not_touch_each_other(paths: list[str]) -> None:
    layout, sent = ArenaLayout.of(tensors()), tensors()
    arena = WeightArena(paths, layout)
    arena.write(0, sent)
    arena.write(1, {name: torch.ones_like(tensor) for name, tensor in sent.items()})
    got = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    arena.read(0, got)
    assert {name: bits(tensor) for name, tensor in got.items()} == {name: bits(t) for name, t in sent.items()}


# ---- the plane -----------------------------------------------------------------------------------------------


class PlaneWorker(Worker):
    """A worker whose weights a test may look at and change."""

    def weights(self) -> dict[str, list[int]]:
        return {name: bits(tensor) for name, tensor in self._trained_parameters().items()}

    def nudge(self, amount: float) -> None:
        with torch.no_grad():
            for tensor in self._trained_parameters().values():
                tensor.add_(amount)


class GarblingWorker(PlaneWorker):
    """Flips one bit of a slot after it was written."""

    def write_weights(self, slot: int) -> str:
        digest = super().write_weights(slot)
        self._arena._slots[slot][100] ^= 1
        return digest


class ForgetfulWorker(PlaneWorker):
    """Does not copy what it was told to load."""

    def load_weights(self, slot: int, version: int, digest: str) -> Span:
        self._arena.read = lambda slot, tensors: None  # type: ignore[method-assign]
        return super().load_weights(slot, version, digest)


class SlowReader(PlaneWorker):
    """Takes its time before it loads version 0."""

    def load_weights(self, slot: int, version: int, digest: str) -> Span:
        if version == 0:
            time.sleep(0.5)
        return super().load_weights(slot, version, digest)


def build(engine: Engine, name: str, factory: type[PlaneWorker], module: FlowGRPO | None = None) -> None:
    engine.start(name, factory)
    engine.call(name, "build", cloudpickle.dumps(module or toy_module()), WorkerSettings())


def plane_of(engine: Engine, workers: dict[str, type[PlaneWorker]]) -> SharedMemoryPlane:
    """Start workers with different weights, and connect the first with the others."""
    for amount, (name, factory) in enumerate(workers.items()):
        build(engine, name, factory)
        engine.call(name, "nudge", float(amount))
    trainer, *generators = workers
    plane = SharedMemoryPlane(engine)
    plane.setup([trainer], generators)
    return plane


def publish(plane: SharedMemoryPlane, version: int, *, must_change: bool = False) -> dict[str, Task]:
    """Publish a version and queue its load on all generators that there are."""
    plane.publish(version, must_change=must_change)
    return {generator: plane.load(generator, version) for generator in plane._generators}


@pytest.fixture(params=[InlineEngine, LocalEngine])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine: Engine = request.param(60.0)
    yield engine
    engine.shutdown()


def test_a_published_version_is_held_by_all_generators_bit_by_bit(engine: Engine) -> None:
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker, "two": PlaneWorker})
    assert engine.call("one", "weights") != engine.call("trainer", "weights")
    for version in range(4):
        engine.call("trainer", "nudge", 0.1)
        loads = publish(plane, version, must_change=version > 0)
        assert list(loads) == ["one", "two"]
        engine.gather(list(loads.values()))
        expected = engine.call("trainer", "weights")
        assert engine.call("one", "weights") == expected
        assert engine.call("two", "weights") == expected
    plane.close()


def test_a_slot_that_was_damaged_is_an_error(engine: Engine) -> None:
    plane = plane_of(engine, {"trainer": GarblingWorker, "one": PlaneWorker})
    with pytest.raises(WeightSyncError, match="version 0 arrived as"):
        engine.gather(list(publish(plane, 0).values()))
    plane.close()


def test_a_load_that_moves_nothing_is_an_error() -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": ForgetfulWorker})
    with pytest.raises(WeightSyncError, match="version 0 arrived as"):
        engine.gather(list(publish(plane, 0).values()))
    plane.close()


def test_weights_that_did_not_change_are_an_error_only_where_they_must() -> None:
    engine = InlineEngine()
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker})
    plane.publish(0, must_change=False)
    plane.publish(1, must_change=False)
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
    plane.setup(["first", "second"], ["one"])
    plane.publish(0, must_change=False)
    engine.call("second", "nudge", 1.0)
    with pytest.raises(WeightSyncError, match="the trainers' weights differ at version 1"):
        plane.publish(1, must_change=False)
    plane.close()


def test_workers_that_built_different_models_are_an_error_that_names_them() -> None:
    engine = InlineEngine()
    other = toy_module()
    other.policy = ToyPolicy(hidden=16)
    build(engine, "trainer", PlaneWorker)
    build(engine, "one", PlaneWorker, other)
    with pytest.raises(WeightSyncError, match="worker one built other trained parameters than trainer"):
        SharedMemoryPlane(engine).setup(["trainer"], ["one"])


def test_a_slot_is_not_written_again_before_all_have_read_it() -> None:
    engine = LocalEngine(60.0)
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": SlowReader, "two": PlaneWorker})
    loads = []
    for version in range(3):  # version 2 takes the slot of version 0, which `one` has not read yet
        engine.call("trainer", "nudge", 0.1)
        loads += publish(plane, version).values()
    engine.gather(loads)  # each load compares digests
    assert engine.call("one", "weights") == engine.call("trainer", "weights")
    engine.shutdown()
    plane.close()


def test_closing_gives_the_memory_back_and_may_be_done_twice() -> None:
    engine = InlineEngine()
    before = len(os.listdir("/proc/self/fd"))
    plane = plane_of(engine, {"trainer": PlaneWorker, "one": PlaneWorker})
    assert len(os.listdir("/proc/self/fd")) > before
    plane.close()
    plane.close()
    assert len(os.listdir("/proc/self/fd")) == before
