"""Each worker sees its own device, and the user's choice of devices is kept."""

from __future__ import annotations

from typing import Any

import pytest

from digenrl import DisaggregatedStrategy
from digenrl.engines import InlineEngine
from digenrl.strategies.devices import visible_devices
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.workers import WorkerSettings
from tests.integration.toy_runs import fit


@pytest.mark.parametrize(
    ("indices", "environment", "expected"),
    [
        ([0, 1, 2], {}, ("0", "1", "2")),
        ([2, 3], {}, ("2", "3")),
        ([0, 1], {"CUDA_VISIBLE_DEVICES": "6,4"}, ("6", "4")),
        ([1], {"CUDA_VISIBLE_DEVICES": " GPU-a , GPU-b "}, ("GPU-b",)),
        ([0], {"CUDA_VISIBLE_DEVICES": ""}, ("0",)),
    ],
)
def test_devices_are_named_as_the_driver_sees_them(
    indices: list[int], environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert visible_devices(indices, environment) == expected


class NotingEngine(InlineEngine):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}

    def start(self, worker: str, factory: Any, *, env: Any = None) -> None:
        self.seen[worker] = env["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("devices", "workers_per_device", "expected"),
    [
        (("4", "5", "6"), 1, {"generator-0": "4", "generator-1": "5", "reward-worker-0": "6"}),
        (("4", "5"), 2, {"generator-0": "4", "generator-1": "4", "reward-worker-0": "5"}),
    ],
)
def test_workers_get_devices_in_turn_and_keep_them(
    devices: tuple[str, ...], workers_per_device: int, expected: dict[str, str]
) -> None:
    engine = NotingEngine()
    pool = WorkerPool(
        engine,
        WorkerSettings(device="cuda"),
        num_generators=2,
        num_trainers=1,
        num_reward_workers=1,
        devices=devices,
        workers_per_device=workers_per_device,
    )
    pool.start_generators()
    assert engine.seen == expected
    pool.launch("generator-1")  # again, after a death
    assert engine.seen == expected


def test_sharing_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match="`trainers` must be 1 with `workers_per_device` 2, got 2"):
        DisaggregatedStrategy(trainers=2, workers_per_device=2)
    with pytest.raises(ValueError, match="`workers_per_device` shares GPUs, but `accelerator` is cpu"):
        fit(DisaggregatedStrategy(workers_per_device=2))
