"""What the trainers do together: each a share of a micro-batch, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from digenrl.engines import ObjectLost, ObjectRef, Task
from digenrl.scheduling import Assist, Slice, Update
from digenrl.strategies.workers import AssistReport
from digenrl.types import PromptBatch

if TYPE_CHECKING:
    from digenrl.strategies.pool import WorkerPool
    from digenrl.strategies.step_book import StepBook

T = TypeVar("T")


@dataclass
class GroupTask:
    """What the scheduler wants of the trainers; it may have to be submitted more than once."""

    action: Assist | Update
    tasks: dict[str, Task] = field(default_factory=dict)
    """Of each rank, as submitted last."""
    made_again: tuple[Slice, ...] = ()
    """What they make first, for an update: samples that are gone with the host that kept them."""

    @property
    def is_done(self) -> bool:
        """Whether all ranks have reported."""
        return all(task.is_done for task in self.tasks.values())

    @property
    def misses_samples(self) -> bool:
        """Whether a rank could not read what it was to train on."""
        return any(_misses_an_object(task) for task in self.tasks.values())

    def submit(self, pool: WorkerPool, book: StepBook) -> None:
        """Let all ranks begin."""
        slices = self.action.micro_batch.slices
        if isinstance(self.action, Assist):
            batches = [book.prompts_of(part) for part in slices]
            self.tasks = submit_assist(pool, batches, scores=not pool.reward_workers)
            return
        self.made_again = tuple(part for part in slices if pool.engine.lost(book.trajectories[part]))
        if self.made_again:
            self.tasks = submit_assist(pool, [book.prompts_of(part) for part in self.made_again], scores=False)
            return
        call = book.update_call(self.action.micro_batch)
        size = pool.recovery.timestep_batch_size
        self.tasks = {trainer: call.submit(pool.engine, trainer, size) for trainer in pool.trainers}


def shares(entries: Sequence[T], trainers: Sequence[str]) -> dict[str, Sequence[T]]:
    """Spread what is to be made over the ranks."""
    return {trainer: entries[rank :: len(trainers)] for rank, trainer in enumerate(trainers)}


def submit_assist(pool: WorkerPool, batches: Sequence[PromptBatch], *, scores: bool) -> dict[str, Task]:
    """Let the ranks share some slices; each is the batch that a generator would have made."""
    tasks = {}
    num_rounds = -(-len(batches) // len(pool.trainers))
    for trainer, share in shares(batches, pool.trainers).items():
        num_missing = num_rounds - len(share) if pool.shards_trainers else 0
        tasks[trainer] = pool.engine.submit(trainer, "assist", share, scores=scores, follows=[batches[0]] * num_missing)
    return tasks


def trajectories_made(reports: Sequence[AssistReport], num_slices: int) -> list[ObjectRef]:
    """Give what the ranks have made in the order in which it was asked for."""
    return [reports[index % len(reports)].trajectories[index // len(reports)] for index in range(num_slices)]


def _misses_an_object(task: Task) -> bool:
    try:
        task.result()
    except ObjectLost:
        return True
    except Exception:
        return False
    return False
