"""What the driver has adopted outlives its maker."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from digenrl.engines import LocalEngine, ObjectLost, ObjectRef


class Maker:
    def __init__(self, store: Any) -> None:
        self.store = store

    def make(self, size: int) -> ObjectRef:
        ref: ObjectRef = self.store.put(torch.arange(size))
        return ref

    def total(self, ref: ObjectRef) -> int:
        return int(self.store.get(ref).sum())


def test_an_adopted_object_is_read_by_others_after_its_maker_was_killed() -> None:
    engine = LocalEngine()
    engine.start("maker", Maker)
    engine.start("reader", Maker)
    adopted, lost = engine.adopt(engine.call("maker", "make", 1000)), engine.call("maker", "make", 10)
    engine.kill("maker")
    assert engine.call("reader", "total", adopted) == 999 * 500
    with pytest.raises(ObjectLost):
        engine.adopt(lost)
    engine.shutdown()


def test_the_driver_lets_go_of_what_it_has_adopted() -> None:
    engine = LocalEngine()
    engine.start("maker", Maker)
    num_files = psutil.Process().num_fds()
    for _ in range(3):
        ref = engine.call("maker", "make", 10)
        adopted = engine.adopt(ref)
        assert engine.adopt(adopted) is adopted
        engine.store.free([adopted])
    assert psutil.Process().num_fds() == num_files
    engine.shutdown()
