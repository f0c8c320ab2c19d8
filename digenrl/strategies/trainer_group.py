"""What the trainers do together: each a share of a micro-batch, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from digenrl.engines import Task
from digenrl.scheduling import Assist, MicroBatch, Slice, Update
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.step_book import StepBook


@dataclass
class GroupTask:
    """What the scheduler wants of the trainers; it may have to be submitted more than once."""

    action: Assist | Update
    tasks: dict[str, Task] = field(default_factory=dict)
    """Of each rank, as submitted last."""

    @property
    def is_done(self) -> bool:
        """Whether all ranks have reported."""
        return all(task.is_done for task in self.tasks.values())

    def submit(self, pool: WorkerPool, book: StepBook) -> None:
        """Let all ranks begin."""
        if isinstance(self.action, Assist):
            self.tasks = _submit_assist(pool, self.action.micro_batch, book)
        else:
            call = book.update_call(self.action.micro_batch)
            size = pool.recovery.timestep_batch_size
            self.tasks = {trainer: call.submit(pool.engine, trainer, size) for trainer in pool.trainers}


def shares(micro_batch: MicroBatch, trainers: Sequence[str]) -> dict[str, Sequence[Slice]]:
    """Spread the slices of an assisted micro-batch over the ranks."""
    return {trainer: micro_batch.slices[rank :: len(trainers)] for rank, trainer in enumerate(trainers)}


def _submit_assist(pool: WorkerPool, micro_batch: MicroBatch, book: StepBook) -> dict[str, Task]:
    """Let the ranks share a micro-batch's slices; each is the batch that a generator would have made."""
    tasks = {}
    num_rounds = -(-len(micro_batch.slices) // len(pool.trainers))
    for trainer, parts in shares(micro_batch, pool.trainers).items():
        num_missing = num_rounds - len(parts) if pool.shards_trainers else 0
        tasks[trainer] = pool.engine.submit(
            trainer,
            "assist",
            [book.prompts_of(part) for part in parts],
            scores=not pool.reward_workers,
            follows=[book.prompts_of(micro_batch.slices[0])] * num_missing,
        )
    return tasks
