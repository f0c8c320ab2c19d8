"""What the soak benchmark counts is what there is."""

from __future__ import annotations

import psutil
import pytest
import torch

from benchmarks.soak import Growth, Look, Recorder, growth, look_at, slope, table_of
from digenrl.engines.shared_memory import SharedMemoryStore


def test_slope_is_that_of_a_line() -> None:
    assert slope([3.0, 5.0, 7.0, 9.0]) == pytest.approx(2.0)


def test_kept_objects_and_open_files_are_counted_apart() -> None:
    before = look_at(psutil.Process())
    store = SharedMemoryStore("driver")
    ref = store.put(torch.zeros(4))
    kept = look_at(psutil.Process())
    assert (len(kept.objects), kept.open_files) == (len(before.objects) + 1, before.open_files)
    store.free([ref])
    assert look_at(psutil.Process()).objects == before.objects


def test_growth_is_that_of_processes_that_were_there_all_the_time() -> None:
    recorder = Recorder()
    recorder.names = {1: "driver", 2: "worker 2"}
    kept = [{4}, {5, 6}, {6, 7}]
    recorder.looks = [{1: Look(rss, 8, frozenset(objects))} for rss, objects in zip((900, 500, 510), kept, strict=True)]
    recorder.looks[-1][2] = Look(77, 3, frozenset({9}))
    (entry,) = growth(recorder, num_warm_up=1)
    assert entry == Growth("driver", 510, pytest.approx(10.0), (8, 8), 1)
    assert table_of([entry], "a title").row_count == 1
