"""How the driver waits for workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from digenrl.engines import Engine, Task, WorkerError, WorkerTimeout
from digenrl.scheduling import Event

_POLL_S = 0.2  # how long a signal may go unnoticed

Take: TypeAlias = Callable[[], list[Event]]
"""Takes the result of a task in and says what has happened."""


class TaskLoop:
    """Waits for tasks under way, has each result taken in as it comes, and passes on what has happened.

    Whoever waits for something of its own, a condition or some tasks, serves all others meanwhile.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        poll: Callable[[], None],
        observe: Callable[[Event], None],
        recover: Callable[[Exception, str], None],
        end_hung: Callable[[WorkerTimeout], None],
    ) -> None:
        """Wait for nothing yet.

        Args:
            engine: of the tasks.
            poll: called at least every 0.2 s during a wait; may raise to end it.
            observe: is told of events, and may add tasks.
            recover: is given the error and the worker of a task that has failed; may raise to end the wait.
            end_hung: is given the error of a worker that has missed its deadline; may raise to end the wait.
        """
        self._engine = engine
        self._poll = poll
        self._observe = observe
        self._recover = recover
        self._end_hung = end_hung
        self._pending: dict[Task, Take | None] = {}  # None where somebody waits for the result

    @property
    def is_idle(self) -> bool:
        """Whether no task is under way."""
        return not self._pending

    def add(self, task: Task, take: Take) -> None:
        """Have a task's result taken in when it is there."""
        self._pending[task] = take

    def drop(self, is_void: Callable[[Task], bool]) -> None:
        """Forget tasks whose results nobody wants any more."""
        self._pending = {task: take for task, take in self._pending.items() if not is_void(task)}

    def run(self, is_over: Callable[[], bool]) -> None:
        """Take in results until a condition holds."""
        while not is_over():
            self._poll()
            self._take_results(_POLL_S)

    def serve(self) -> None:
        """Take in the results that are there, without waiting for any."""
        if self._pending:
            self._take_results(0.0)

    def gather(self, tasks: Sequence[Task]) -> list[Any]:
        """Wait for all of some tasks, or the first failure, and serve the others meanwhile."""
        self._pending |= dict.fromkeys(tasks)
        self.run(lambda: all(task.is_done for task in tasks) or any(task.has_failed for task in tasks))
        for task in tasks:
            if task.has_failed:
                task.result()
        return [task.result() for task in tasks]

    def _take_results(self, timeout_s: float) -> None:
        for task in self._wait(timeout_s):
            take = self._pending.pop(task, None)
            if take is None:  # somebody waits for it, or a restart has made it void meanwhile
                continue
            try:
                events = take()
            except Exception as error:
                if not task.has_failed and not isinstance(error, WorkerError):
                    raise
                self._recover(error, task.worker)
                continue
            for event in events:
                self._observe(event)

    def _wait(self, timeout_s: float) -> list[Task]:
        try:
            return self._engine.wait(list(self._pending), timeout_s)
        except WorkerTimeout as error:
            self._end_hung(error)
            return []


def take_nothing(task: Task) -> list[Event]:
    """Take in a task that has nothing to tell, or raise its error."""
    task.result()
    return []
