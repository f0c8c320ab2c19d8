"""The driver's side of the comparison of generators and trainers at the start of a fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from digenrl.engines import Task
from digenrl.strategies.parity import GeneratorParity, ParityReport
from digenrl.strategies.workers.joining import even_shares
from digenrl.types import PromptBatch

if TYPE_CHECKING:
    from digenrl.strategies.pool import WorkerPool


def measure_parity(
    pool: WorkerPool, prompts: PromptBatch, gather: Callable[[Sequence[Task]], list[Any]]
) -> ParityReport:
    """Have each generator make some samples, and the trainers recompute them; workers are left as they were.

    May be repeated from its begin: a worker lets go of what it has made for an attempt before.

    Args:
        pool: of workers that have nothing to do; generators hold the weights that were published last.
        prompts: a few samples, which are neither scored nor trained.
        gather: waits for tasks and gives their results in order.
    """
    making = {generator: _make_samples(pool, generator, prompts) for generator in pool.generators}
    looking = {generator: pool.compare_weights(generator) for generator in pool.generators}
    found = []
    for generator in pool.generators:
        samples = [ref for ref in gather(making[generator]) if ref is not None]
        changed = dict(zip(pool.ranks_of(generator), gather(looking[generator]), strict=True))
        # All trainers together, each all samples: those that share the policy's blocks need one another.
        measures = gather([pool.engine.submit(trainer, "check_parity", samples) for trainer in pool.trainers])
        found.append(
            GeneratorParity(
                generator,
                {rank: tensor for rank, tensor in changed.items() if tensor is not None},
                dict(zip(pool.trainers, measures, strict=True)),
            )
        )
    gather([pool.engine.submit(rank, "drop_parity_sample") for rank in pool.generator_ranks])
    return ParityReport(tuple(found))


def _make_samples(pool: WorkerPool, generator: str, prompts: PromptBatch) -> list[Task]:
    """Share the samples among a generator's devices; those that get none go along, as in `WorkerPool.generate`."""
    ranks = pool.ranks_of(generator)
    tasks: list[Task] = []
    for rank, (start, stop) in zip(ranks, even_shares(len(prompts), len(ranks)), strict=True):
        share = prompts.select(slice(start, stop) if stop > start else slice(1))
        tasks.append(pool.engine.submit(rank, "make_parity_sample", share, follows=stop == start))
    return tasks
