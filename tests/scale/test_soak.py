"""A run stays as it began: memory, open files and kept objects of every process, over some dozens of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.soak import Growth, Recorder, growth
from digenrl import DisaggregatedStrategy
from tests.integration.toy_runs import fit

NUM_STEPS = 60
NUM_WARM_UP = 20
MOST_GROWTH = 0.1 * 2**20
"""Bytes per step: a run of 500 steps (`benchmarks/soak.py`) is held to half of it."""


def soak(**settings: Any) -> Sequence[Growth]:
    recorder = Recorder()
    fit(DisaggregatedStrategy(**settings), max_steps=NUM_STEPS, callbacks=[recorder])
    return growth(recorder, NUM_WARM_UP)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"generators": 2, "trainers": 2, "staleness": 0.5, "reward_workers": 1},
        {"trainer_assist": "static:2", "assist_switch": "offload", "generation_batch_size": 1},
    ],
    ids=["pair", "groups", "assistance"],
)
def test_processes_neither_grow_nor_keep_objects(settings: dict[str, Any]) -> None:
    entries = soak(**settings)
    num_workers = settings.get("generators", 1) + settings.get("trainers", 1) + settings.get("reward_workers", 0)
    assert len(entries) >= 1 + num_workers, "the driver and its workers"
    for entry in entries:
        assert entry.bytes_per_step < MOST_GROWTH, entry
        assert entry.open_files[1] <= entry.open_files[0], entry
        assert entry.objects_left == 0, entry
