"""A run that loses workers ends with the weights of one that does not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.engines import InlineEngine, WorkerDied, WorkerStartError
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.workers import WorkerSettings
from tests.integration.mortal import Death, Mortal, num_deaths
from tests.integration.toy_runs import fit, largest_difference
from tests.leftovers import left_in_shared_memory, names_in_shared_memory


def strategy(**settings: Any) -> DisaggregatedStrategy:
    return DisaggregatedStrategy(**{"generators": 2, "trainers": 2, "trainer_assist": "off", **settings})


def run(folder: Path, deaths: list[Death], **settings: Any) -> tuple[dict[str, Tensor], float]:
    """Three steps; the final weights, and how many restarts the run has counted."""
    chosen = strategy(groups_per_micro_batch=2, max_restarts=3, **settings)
    trainer, _, weights = fit(chosen, module=Mortal(folder, deaths), max_steps=3)
    assert num_deaths(folder) == len(deaths), "all who were to die have died"
    return weights, trainer.callback_metrics["restarts"].item()


@cache
def undisturbed() -> dict[str, Tensor]:
    module = Mortal(Path("/nowhere"), [])
    return fit(strategy(groups_per_micro_batch=2), module=module, max_steps=3)[2]


def test_a_generator_that_dies_in_a_trajectory_takes_nothing_with_it(tmp_path: Path) -> None:
    before, workers_before = names_in_shared_memory(), workers()
    weights, num_restarts = run(tmp_path, [Death("velocity", trains=False, call=8)])
    assert largest_difference(weights, undisturbed()) <= 1e-6
    assert num_restarts == 1
    assert left_in_shared_memory(before) == []
    assert workers() - workers_before == set()


def workers() -> set[psutil.Process]:
    """Processes that the fork server of this one has started; those of earlier tests may end at any time."""
    return {worker for server in psutil.Process().children() for worker in server.children()}


@pytest.mark.parametrize(
    ("snapshot", "deaths"),
    [
        ("every_step", [Death("timestep_loss", call=4, rank=1)]),  # the second micro-batch of the second step
        ("every_10", [Death("update_weight_copies", call=2)]),  # one rank has stepped its optimizer, one has not
        ("every_step", [Death("take_snapshot", call=3), Death("write_weights", call=1, rank=1, follows=True)]),
    ],
)
def test_the_trainers_are_rebuilt_bit_by_bit(tmp_path: Path, snapshot: str, deaths: list[Death]) -> None:
    weights, _ = run(tmp_path, deaths, snapshot=snapshot)
    assert largest_difference(weights, undisturbed()) == 0


def test_one_death_more_than_allowed_ends_the_run(tmp_path: Path) -> None:
    deaths = [Death("velocity", trains=False, call=3), Death("velocity", trains=False, call=3, follows=True)]
    chosen = strategy(generators=1, trainers=1, max_restarts=1, parity_check="off")  # whose samples are calls, too
    with pytest.raises(WorkerDied) as caught:
        fit(chosen, module=Mortal(tmp_path, deaths), max_steps=3)
    assert str(caught.value) == (
        "worker generator-0 killed by SIGKILL, task `generate_and_score`. It is not started again: `max_restarts` "
        "allows 1 in a run."
    )


def test_without_snapshots_the_death_of_a_trainer_ends_the_run(tmp_path: Path) -> None:
    chosen = strategy(generators=1, trainers=1, max_restarts=3, snapshot="off")
    with pytest.raises(
        WorkerDied, match="task `update`. The trainers cannot be started again, since `snapshot` is off"
    ):
        fit(chosen, module=Mortal(tmp_path, [Death("timestep_loss", call=2)]), max_steps=3)


@pytest.mark.parametrize("snapshot", ["every_0", "every_n", "often", "every_"])
def test_a_snapshot_of_another_form_is_refused(snapshot: str) -> None:
    with pytest.raises(ValueError, match=f"`snapshot` must be every_step, every_N .* or off, got '{snapshot}'"):
        DisaggregatedStrategy(snapshot=snapshot)


def test_restarts_need_processes() -> None:
    with pytest.raises(ValueError, match="`max_restarts` must be 0 with engine `inline`, got 1"):
        DisaggregatedStrategy(engine="inline", max_restarts=1)


def test_the_error_names_the_rank_that_died_and_not_the_one_whose_exchange_failed(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"^worker trainer-1 killed by SIGKILL, "):
        fit(strategy(generators=1), module=Mortal(tmp_path, [Death("optimizer_step", rank=1)]), max_steps=2)


def test_a_start_that_fails_by_an_error_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail again each time; the error is to be seen, and no restart is spent on it."""
    recovery = WorkerPool(
        InlineEngine(), WorkerSettings(), num_generators=1, num_trainers=2, num_reward_workers=0, max_restarts=3
    ).recovery
    with pytest.raises(WorkerStartError, match="no such module"):
        recovery.lost_unit(WorkerStartError("worker trainer-0 cannot start: ImportError: no such module"))
    assert recovery.num_restarts == 0
