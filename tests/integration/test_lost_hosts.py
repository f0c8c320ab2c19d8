"""A run that loses a host, with the objects there, ends with the weights of one that does not.

The host is the only one: what is lost is withheld from the workers, as Ray would (tests/scale has real ones).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.engines import LocalEngine, NoRoom, ObjectRef, Task, WorkerError
from digenrl.strategies.driver import StepDriver
from digenrl.strategies.step_book import StepBook
from tests.integration.mortal import Death, Mortal, num_deaths
from tests.integration.toy_runs import fit, largest_difference, relative_difference

NOWHERE = 1 << 20  # no file of a process has this number


class LostHost:
    """Objects that are gone; the driver may hear of it late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refs: list[ObjectRef] = []  # these, and none that are equal: numbers of files are used again
        self.num_missed = 0
        self._is_known = True
        submit = LocalEngine.submit

        def submit_without(engine: LocalEngine, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Task:
            return submit(engine, worker, method, *self._without(args), **kwargs)

        def lost(engine: LocalEngine, refs: Any) -> list[ObjectRef]:
            return [ref for ref in refs if self._has(ref)] if self._is_known else []

        monkeypatch.setattr(LocalEngine, "submit", submit_without)
        monkeypatch.setattr(LocalEngine, "lost", lost)

    def lose(self, refs: Any, *, is_known: bool = True) -> None:
        self.refs += refs
        self._is_known = is_known

    def _has(self, ref: ObjectRef) -> bool:
        return any(ref is lost for lost in self.refs)

    def _without(self, value: Any) -> Any:
        if isinstance(value, ObjectRef) and self._has(value):
            self.num_missed += 1
            self._is_known = True
            pid, _, *where = value.address
            return ObjectRef(value.worker, (pid, NOWHERE, *where), value.num_bytes)
        return type(value)(map(self._without, value)) if type(value) in (list, tuple) else value


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> LostHost:
    undisturbed()
    return LostHost(monkeypatch)


def run(deaths: list[Death] | None = None, folder: Path = Path("/nowhere"), **settings: Any) -> dict[str, Tensor]:
    """Three steps of two micro-batches."""
    shape = {"generators": 2, "trainers": 2, "trainer_assist": "off", "groups_per_micro_batch": 2}
    return fit(DisaggregatedStrategy(**{**shape, **settings}), module=Mortal(folder, deaths or []), max_steps=3)[2]


@cache
def undisturbed() -> dict[str, Tensor]:
    return run()


def when_whole(monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[StepBook, Any], None]) -> None:
    """Do something when the rewards of a micro-batch of a step are known, and it is not trained yet."""
    compare = StepBook.compare

    def compare_and_do(book: StepBook, micro_batch: Any, *args: Any) -> None:
        compare(book, micro_batch, *args)
        if book.plan.prompts.step == step:
            then(book, micro_batch)

    monkeypatch.setattr(StepBook, "compare", compare_and_do)


@pytest.mark.parametrize("is_known", [True, False])
def test_scored_samples_that_are_lost_are_made_again_by_the_trainers(
    host: LostHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    when_whole(monkeypatch, 1, lambda book, part: host.lose(book.trajectories[part.slices[0]], is_known=is_known))
    assert relative_difference(run(max_restarts=1), undisturbed()) <= 1e-6
    assert len(host.refs) == 2
    assert (host.num_missed > 0) is not is_known
    assert caplog.text.count("Samples of 1 slices were lost with their host, and are made again.") == 2


def test_samples_that_are_lost_before_they_are_scored_are_made_again_by_generators(
    host: LostHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_generated = StepDriver._on_generated

    def lose_the_first(driver: StepDriver, part: Any, generator: str, task: Task, book: StepBook) -> Any:
        events = on_generated(driver, part, generator, task, book)
        if not host.refs:
            host.lose(book.trajectories[part], is_known=False)
        return events

    monkeypatch.setattr(StepDriver, "_on_generated", lose_the_first)
    weights = run(max_restarts=1, reward_workers=1)
    assert host.num_missed == 1
    assert relative_difference(weights, undisturbed()) <= 1e-6


def test_what_trainers_repeat_is_made_again_with_the_weights_of_then(
    host: LostHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They die in the third step; the samples of the first are lost, too, and no generator has its weights."""
    seen: list[ObjectRef] = []
    when_whole(monkeypatch, 0, lambda book, part: seen.extend(book.all_trajectories))
    when_whole(monkeypatch, 2, lambda book, part: host.lose(seen))
    weights = run([Death("timestep_loss", call=6, rank=1)], tmp_path, max_restarts=1, snapshot="every_10")
    assert num_deaths(tmp_path) == 1
    assert host.refs
    assert relative_difference(weights, undisturbed()) <= 1e-6


@pytest.mark.parametrize("has_copies", [True, False])
def test_trainers_go_on_from_the_copy_of_a_snapshot_that_is_lost(
    host: LostHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_copies: bool
) -> None:
    copied: list[ObjectRef] = []

    def copy(engine: LocalEngine, ref: ObjectRef) -> Task:
        copied.append(ref)
        task = Task("driver", "copy", 60.0)
        task.finish(engine.store.put(engine.store.get(ref)) if has_copies else None)
        return task

    monkeypatch.setattr(LocalEngine, "copy", copy)
    when_whole(monkeypatch, 2, lambda book, part: host.lose(copied))
    deaths = [Death("timestep_loss", call=6, rank=1)]
    if has_copies:
        assert largest_difference(run(deaths, tmp_path, max_restarts=1), undisturbed()) == 0
    else:
        with pytest.raises(WorkerError, match="the snapshot of trainer-0 is lost with its host, .*; resume the run"):
            run(deaths, tmp_path, max_restarts=1)
    assert num_deaths(tmp_path) == 1


@pytest.mark.parametrize("generators", [2, 1])
def test_a_generator_without_room_is_gone_without_if_there_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, generators: int
) -> None:
    undisturbed()
    start, started = LocalEngine.start, set[str]()

    def start_once(engine: LocalEngine, worker: str, factory: Any, **kwargs: Any) -> None:
        if worker in started:
            raise NoRoom(f"worker {worker} could not be placed.")
        started.add(worker)
        start(engine, worker, factory, **kwargs)

    monkeypatch.setattr(LocalEngine, "start", start_once)
    deaths = [Death("velocity", trains=False, call=8)]
    if generators == 1:
        with pytest.raises(
            WorkerError, match=r"generator-0 could not be placed\. The run cannot go on without it; res"
        ):
            run(deaths, tmp_path, max_restarts=3, generators=1)
        return
    assert relative_difference(run(deaths, tmp_path, max_restarts=3), undisturbed()) <= 1e-6
    assert "could not be placed. The run goes on without generator-" in caplog.text
