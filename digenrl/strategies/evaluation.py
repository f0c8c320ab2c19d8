"""Samples outside of training, made by all generators together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from digenrl.engines import JoinedTask, ObjectRef, Task, WorkerDied
from digenrl.module import VALIDATION_MEAN, DiffusionRLModule, as_prompts
from digenrl.rewards import RewardTraits
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.workers import LogCall, even_shares
from digenrl.types import PromptBatch

_Logged: TypeAlias = list[list[tuple[int, LogCall]]]
"""What a hook logged for each generator's share of a batch, each with the number of samples it speaks for."""


def evaluate(pool: WorkerPool, module: DiffusionRLModule, hook: str, batch: Any, *args: Any) -> None:
    """Run an evaluation hook with its batch spread over the generators, and log what it logs.

    Args:
        pool: of workers; generators have nothing else to do.
        module: that logs.
        hook: name of the module's method.
        batch: prompts, or strings.
        *args: what the hook takes beside it.
    """
    units = None
    if RewardTraits.of(module.reward).groupwise:
        uids = [prompt.uid for prompt in as_prompts(batch)]
        units = [row for row in range(len(uids) + 1) if row in (0, len(uids)) or uids[row] != uids[row - 1]]
    # Scoring is the reward workers', unless the user's own hook mixes it with the rest.
    is_ours = type(module).validation_step is DiffusionRLModule.validation_step
    if hook == "validation_step" and is_ours and pool.reward_workers:
        shares = _validate(pool, batch, *args, units=units)
    else:
        shares = _run_hook(pool, hook, batch, *args, units=units)
    for calls in shares:
        for num_samples, call in calls:
            module.log(call.name, call.value, **{"batch_size": num_samples, **call.kwargs})
        if hook == "validation_step" and is_ours:
            module.note_validation(scored=any(call.name == VALIDATION_MEAN for _, call in calls))


def make_samples(pool: WorkerPool, prompts: PromptBatch) -> Tensor:
    """Make deterministic samples on the generators: media [B, (F), C, H, W] in [0, 1]."""

    def make() -> list[Tensor]:
        shares = even_shares(len(prompts), len(pool.generators))
        return pool.engine.gather(
            [
                _on_ranks(pool, generator, "sample", prompts.select(slice(start, stop)))
                for generator, (start, stop) in zip(pool.generators, shares, strict=True)
                if stop > start
            ]
        )

    return torch.cat(pool.recovery.run(make))


def _run_hook(pool: WorkerPool, hook: str, batch: Sequence[Any], *args: Any, units: Sequence[int] | None) -> _Logged:
    """Run a hook on the generators; `units` are rows at which the batch may be cut, with 0 and its length, or any."""

    def run() -> _Logged:
        shares = _shares(pool, batch, units)
        logged = pool.engine.gather(
            [_on_ranks(pool, maker, "evaluation_step", hook, share, *args) for maker, share in shares.items()]
        )
        return _with_sizes(shares, logged)

    return pool.recovery.run(run)


def _validate(pool: WorkerPool, batch: Sequence[Any], batch_idx: int, *, units: Sequence[int] | None) -> _Logged:
    """Make a validation batch on the generators and score it on the reward workers; `units` as in `_run_hook`."""

    def validate() -> _Logged:
        shares = _shares(pool, batch, units)
        return _with_sizes(shares, _make_and_score(pool, shares, batch_idx))

    return pool.recovery.run(validate)


def _make_and_score(pool: WorkerPool, shares: Mapping[str, Sequence[Any]], batch_idx: int) -> list[list[LogCall]]:
    making = [_on_ranks(pool, generator, "validation_samples", share, batch_idx) for generator, share in shares.items()]
    scorers = itertools.cycle(pool.reward_workers)
    try:
        scoring = []
        for task in making:  # each is scored while the next are made
            scoring.append(pool.engine.submit(next(scorers), "score_validation", pool.engine.gather([task])[0]))
        return pool.engine.gather(scoring)
    finally:
        _free_results(pool, making)


def _free_results(pool: WorkerPool, tasks: Sequence[Task]) -> None:
    """Have those that live let go of the objects that tasks have given, or will give."""
    frees: list[Task] = []
    for task in tasks:
        try:
            samples: ObjectRef = pool.engine.gather([task])[0]
        except Exception:  # of a worker that has died, or of what the caller knows already
            continue
        frees += pool.engine.free([samples])
    for task in frees:
        with suppress(WorkerDied):
            pool.engine.gather([task])


def _on_ranks(pool: WorkerPool, generator: str, method: str, *args: Any) -> Task:
    """Have all devices of a generator do the same together; the first one's result counts."""
    tasks = [pool.engine.submit(rank, method, *args) for rank in pool.ranks_of(generator)]
    return tasks[0] if len(tasks) == 1 else JoinedTask(generator, tasks, itemgetter(0))


def _shares(pool: WorkerPool, batch: Sequence[Any], units: Sequence[int] | None) -> dict[str, Sequence[Any]]:
    borders = range(len(batch) + 1) if units is None else units
    return {
        generator: batch[borders[start] : borders[stop]]
        for generator, (start, stop) in zip(
            pool.generators, even_shares(len(borders) - 1, len(pool.generators)), strict=True
        )
        if stop > start
    }


def _with_sizes(shares: Mapping[str, Sequence[Any]], logged: Sequence[Sequence[LogCall]]) -> _Logged:
    """Put beside each call for how many samples it speaks."""
    return [[(len(share), call) for call in calls] for share, calls in zip(shares.values(), logged, strict=True)]
