"""Each place where a worker can die, with each engine and snapshot interval: the weights are the undisturbed run's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from digenrl import DisaggregatedStrategy
from tests.integration.mortal import Death, Mortal, num_deaths
from tests.integration.toy_runs import fit, largest_difference, toy_data
from tests.leftovers import left_in_shared_memory, names_in_shared_memory
from tests.toy import WORDS

Settings = dict[str, Any]


def trainer(method: str, **settings: Any) -> Death:
    return Death(method, **settings)


def other(method: str, **settings: Any) -> Death:
    return Death(method, trains=False, **settings)


PLACES: dict[str, list[Death]] = {
    "generator in the parity check": [other("make_parity_sample")],
    "trainer in the parity check": [trainer("check_parity", rank=1)],
    "generator in a trajectory": [other("velocity", call=8)],
    "generator loading weights": [other("load_weights", call=3)],
    "generator in its own restart": [other("velocity", call=8), other("weights_holding", follows=True)],
    "trainer in an update": [trainer("timestep_loss", call=3, rank=1)],
    "trainer before the optimizer step": [trainer("optimizer_step", call=2, rank=1)],
    "trainer in the optimizer step": [trainer("update_weight_copies", call=2)],
    "trainer after the optimizer step": [trainer("optimizer_step", call=2, after=True)],
    "trainer before it publishes": [trainer("write_weights", call=3)],
    "trainer after it has published": [trainer("write_weights", call=3, after=True, rank=1)],
    "trainer before its snapshot": [trainer("take_snapshot", call=2)],
    "trainer after its snapshot": [trainer("take_snapshot", call=2, after=True, rank=1)],
    "trainer at its first snapshot": [trainer("take_snapshot", call=1)],
    "trainer making its optimizer": [trainer("configure_optimizer", call=1)],
    "trainer handing over its state": [trainer("state_dict", call=1)],
    "trainer restoring": [trainer("timestep_loss", call=5), trainer("restore_snapshot", follows=True)],
    "trainer replaying": [trainer("timestep_loss", call=7, rank=1), trainer("timestep_loss", call=1, follows=True)],
    "a trainer and a generator": [trainer("timestep_loss", call=6), other("velocity", call=9)],
    "both trainers": [trainer("optimizer_step", call=2), trainer("optimizer_step", call=2, rank=1)],
}

ACCUMULATION: Settings = {"data": lambda: toy_data(prompts_per_step=2), "accumulate_grad_batches": 2}
ONE_GROUP: Settings = {"groups_per_micro_batch": 1}
VALIDATION: Settings = {"data": lambda: toy_data(validation_prompts=WORDS), "val_check_interval": 1}
BATCH_STD: Settings = {"advantage_scope": "batch", "advantage_clip": 1.0}
COPIES: Settings = {"updates_per_rollout": 2, "ema_decay": 0.9}

# strategy, module, Trainer, deaths
RUNS: dict[str, tuple[Settings, Settings, Settings, list[Death]]] = {
    "rank of a generator": ({"devices_per_generator": 2}, {}, {}, [other("rollout", call=3, rank=1)]),
    "rank loading": ({"devices_per_generator": 2}, {}, {}, [other("load_weights", call=3, rank=1)]),
    "reward worker": ({"reward_workers": 1}, {}, {}, [other("score", call=3)]),
    "two reward workers": ({"reward_workers": 2, "generators": 1}, {}, {}, [other("score", call=2), other("score")]),
    "generator beside a reward worker": ({"reward_workers": 1}, {}, {}, [other("velocity", call=8)]),
    "in validation": ({}, {}, VALIDATION, [other("validation_step", call=2)]),
    "making for validation": ({"reward_workers": 1}, {}, VALIDATION, [other("validation_samples", call=2)]),
    "scoring for validation": ({"reward_workers": 1}, {}, VALIDATION, [other("score_validation", call=2)]),
    "accumulated batches": (ONE_GROUP, {}, ACCUMULATION, [trainer("timestep_loss", call=7, rank=1)]),
    "twice in a window": (
        ONE_GROUP,
        {},
        ACCUMULATION,
        [trainer("optimizer_step", rank=1), trainer("timestep_loss", call=3, follows=True)],
    ),
    "copies, optimizer": ({}, COPIES, {}, [trainer("optimizer_step", call=3)]),
    "copies, rollout": ({}, COPIES, {}, [trainer("timestep_loss", call=7), other("rollout", call=4)]),
    "std of the step": (
        {},
        BATCH_STD,
        {},
        [trainer("timestep_loss", call=4), trainer("timestep_loss", call=3, rank=1)],
    ),
    "assisting": ({"trainer_assist": "static:1"}, {}, {}, [trainer("rollout", call=2)]),
    "offloading": (
        {"trainer_assist": "static:1", "assist_switch": "offload"},
        {},
        {},
        [trainer("rollout", rank=1, after=True), trainer("optimizer_step", call=2)],
    ),
    "exact staleness": ({"staleness": 0.5, "staleness_mode": "exact"}, {}, {}, [trainer("timestep_loss", call=5)]),
    "shards, update": ({"sharding": "fsdp"}, {}, {}, [trainer("timestep_loss", call=5, rank=1)]),
    "shards, optimizer": ({"sharding": "fsdp"}, {}, {}, [trainer("optimizer_step", call=3, after=True)]),
    "one worker of each": (
        {"generators": 1, "trainers": 1},
        {},
        {},
        [trainer("timestep_loss", call=5), other("velocity", call=9)],
    ),
    "hung trainer": ({"task_timeout_s": 20.0}, {}, {}, [trainer("timestep_loss", call=5, hangs=True)]),
    "hung generator": ({"task_timeout_s": 20.0}, {}, {}, [other("velocity", call=9, hangs=True)]),
}


def run(
    folder: Path, deaths: list[Death], strategy: Settings, module: Settings, settings: Settings
) -> dict[str, Tensor]:
    chosen = {"generators": 2, "trainers": 2, "trainer_assist": "off", "groups_per_micro_batch": 2, **strategy}
    data = settings.get("data", toy_data)()
    options = {"max_steps": 2 if "accumulate_grad_batches" in settings else 4, **settings, "data": data}
    return fit(DisaggregatedStrategy(**chosen), module=Mortal(folder, deaths, **module), **options)[2]


@cache
def undisturbed(engine: str) -> dict[str, Tensor]:
    return run(Path("/nowhere"), [], {"engine": engine}, {}, {})


@pytest.mark.parametrize("snapshot", ["every_step", "every_3"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_death_changes_no_bit(tmp_path: Path, engine: str, place: str, snapshot: str) -> None:
    deaths, before = PLACES[place], names_in_shared_memory()
    weights = run(tmp_path, deaths, {"engine": engine, "max_restarts": 5, "snapshot": snapshot}, {}, {})
    assert largest_difference(weights, undisturbed(engine)) == 0
    assert num_deaths(tmp_path) == len(deaths)
    if engine == "local":
        assert left_in_shared_memory(before) == []


@pytest.mark.parametrize("snapshot", ["every_step", "every_3"])
@pytest.mark.parametrize("name", RUNS)
def test_a_death_in_other_runs(tmp_path: Path, name: str, snapshot: str) -> None:
    strategy, module, settings, deaths = RUNS[name]
    expected = run(Path("/nowhere"), [], strategy, module, settings)
    num_files = psutil.Process().num_fds()
    weights = run(tmp_path, deaths, {**strategy, "max_restarts": 5, "snapshot": snapshot}, module, settings)
    assert num_deaths(tmp_path) == len(deaths)
    assert largest_difference(weights, expected) <= 1e-6
    assert psutil.Process().num_fds() <= num_files
