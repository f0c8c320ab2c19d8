"""Who is served while the driver waits, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from digenrl.engines import Task, WorkerDied, WorkerTimeout
from digenrl.scheduling import Paused, Resumed
from digenrl.strategies.task_loop import TaskLoop, take_nothing


class Workers:
    """Finishes tasks in the order that a test gives, one with each wait."""

    def __init__(self, *order: Any) -> None:
        self.order = list(order)
        self.observed: list[Any] = []
        self.recovered: list[tuple[str, str]] = []
        self.hung: list[str] = []
        engine: Any = SimpleNamespace(wait=self.wait)
        self.loop = TaskLoop(
            engine,
            poll=lambda: None,
            observe=self.observed.append,
            recover=lambda error, worker: self.recovered.append((str(error), worker)),
            end_hung=lambda error: self.hung.append(error.worker),
        )

    def wait(self, tasks: Sequence[Task], timeout_s: float) -> list[Task]:
        step = self.order.pop(0)
        if isinstance(step, WorkerTimeout):
            raise step
        task, error = step if isinstance(step, tuple) else (step, None)
        assert task in tasks
        task.finish(task.name, error=error)
        return [task]


def task(worker: str = "trainer-0") -> Task:
    return Task(worker, f"result of {worker}", timeout_s=60.0)


def test_others_are_served_while_somebody_waits_for_a_task() -> None:
    mine, other = task(), task("generator-0")
    workers = Workers(other, mine)
    workers.loop.add(other, lambda: [Paused(), Resumed()])
    assert workers.loop.gather([mine]) == ["result of trainer-0"]
    assert workers.observed == [Paused(), Resumed()]
    assert workers.loop.is_idle


def test_the_first_failure_ends_the_wait_and_leaves_the_other_task_to_be_forgotten() -> None:
    first, second = task(), task("trainer-1")
    workers = Workers((second, WorkerDied("gone", "trainer-1")))
    with pytest.raises(WorkerDied, match="gone"):
        workers.loop.gather([first, second])
    assert not workers.loop.is_idle
    workers.loop.drop(lambda task: task.worker == "trainer-0")
    assert workers.loop.is_idle


def test_a_failed_task_is_given_to_recovery_with_its_worker() -> None:
    failing = task("generator-0")
    workers = Workers((failing, ValueError("not finite")))
    workers.loop.add(failing, partial(take_nothing, failing))
    workers.loop.run(lambda: workers.loop.is_idle)
    assert workers.recovered == [("not finite", "generator-0")]


def test_an_error_of_the_driver_itself_is_not_recovered_from() -> None:
    fine = task()
    workers = Workers(fine)

    def take() -> list[Any]:
        raise ValueError("a bug")

    workers.loop.add(fine, take)
    with pytest.raises(ValueError, match="a bug"):
        workers.loop.serve()
    assert not workers.recovered


def test_a_hung_worker_is_ended_and_the_wait_goes_on() -> None:
    fine = task()
    workers = Workers(WorkerTimeout("too late", "generator-0"), fine)
    assert workers.loop.gather([fine]) == ["result of trainer-0"]
    assert workers.hung == ["generator-0"]
