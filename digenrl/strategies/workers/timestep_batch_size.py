"""How many timesteps a trainer takes into one forward and backward: a given number, or what fits into its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from digenrl.engines import WorkerError
from digenrl.metrics import MetricAccumulator
from digenrl.module.rows import OUT_OF_MEMORY, RankOutOfMemory, largest_of_ranks
from digenrl.policies.shards import local_tensor
from digenrl.strategies.workers.base import WorkerBase
from digenrl.strategies.workers.memory import MemoryMeter, free_bytes
from digenrl.strategies.workers.settings import TimestepBatchSize

Forward: TypeAlias = Callable[[int, int], Sequence[Tensor]]
"""Gives the parts of the losses of the timesteps [start, stop), with gradient."""

Backward: TypeAlias = Callable[[Sequence[Tensor]], list[float]]
"""Accumulates the gradient of the losses' parts and gives the sum of each."""

_MARGIN = {"cuda": 0.8, "cpu": 0.5}
"""Largest share of the free memory that is filled by design.

A GPU's rest is for its allocator's fragments. What is measured on a CPU leaves out what an operation needs meanwhile,
and other processes share its memory.
"""

_MOST_TIMESTEPS = 10_000  # more than any schedule has; keeps the number below `OUT_OF_MEMORY`

_ALLOCATOR_MESSAGES = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class TrainerOutOfMemory(WorkerError):
    """A trainer's memory is too small for the timesteps that it was to train at a time."""

    def __init__(self, message: str, num_timesteps: int) -> None:
        super().__init__(message, num_timesteps)
        self.num_timesteps = num_timesteps
        """How many these were."""

    def __str__(self) -> str:
        return str(self.args[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocator had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_MESSAGES)


@dataclass(frozen=True)
class _Failure:
    """A batch of timesteps that was too large."""

    num_timesteps: int
    is_undone: bool
    """Whether the gradient is what it was before the batch."""
    cause: str


class TimestepBatches(WorkerBase):
    """The part of a trainer that cuts a micro-batch's timesteps into batches.

    With `"auto"` the first timestep of the first micro-batch is trained alone and measured; from then on as many at a
    time as fit, on all ranks alike. Where memory runs out nevertheless, the number is halved. A batch that failed in
    its forward has left no gradient, and a rank that computes alone trains it again at once, in halves. Otherwise a
    part of its gradient may be in the sum: the step's gradient has to be discarded, and its updates made again.
    """

    _fitting_timesteps: int | None = None
    """What `"auto"` has found; None before."""

    def limit_timestep_batch(self, size: int) -> None:
        """Let `"auto"` begin with a number, as a worker does that takes the place of one which ran out of memory."""
        self._fitting_timesteps = max(size, 1)

    def _train_timesteps(
        self, num_timesteps: int, size: TimestepBatchSize, forward: Forward, backward: Backward
    ) -> list[float] | None:
        """Train all timesteps of a micro-batch; the sum of each part of the losses, or None if memory ran out.

        Raises:
            TrainerOutOfMemory: a given number is too large, or one timestep is.
        """
        if size != "auto":
            return self._train_given(num_timesteps, size or num_timesteps, forward, backward)
        sums: list[float] = []
        metrics = MetricAccumulator()
        metrics.join(self._module.take_metrics())
        start = 0
        while start < num_timesteps:
            stop = min(start + (self._fitting_timesteps or 1), num_timesteps)
            outcome = self._try(start, stop, forward, backward)
            if isinstance(outcome, _Failure):
                self._module.take_metrics()  # of a part of the batch
                self._halve(outcome)
                if not outcome.is_undone:
                    return None
                continue
            sums, start = _added(sums, outcome), stop
            metrics.join(self._module.take_metrics())
        failure = self._meet(0)
        if failure is not None:
            self._halve(failure)
            return None
        self._module._metrics.join(metrics.take())
        taken = min(self._fitting_timesteps or num_timesteps, num_timesteps)
        self._module.track("timestep_batch_size", torch.tensor([float(taken)]))
        return sums

    def _train_given(self, num_timesteps: int, size: int, forward: Forward, backward: Backward) -> list[float]:
        sums: list[float] = []
        for start in range(0, num_timesteps, size):
            try:
                sums = _added(sums, backward(forward(start, min(start + size, num_timesteps))))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                remedy = "set `timestep_batch_size` to auto or lower, " if min(size, num_timesteps) > 1 else ""
                raise self._too_large(min(size, num_timesteps), remedy) from error
        return sums

    def _try(self, start: int, stop: int, forward: Forward, backward: Backward) -> list[float] | _Failure:
        """Train a batch; the first of all is measured."""
        is_forward_done = False
        has_gradient = any(parameter.grad is not None for parameter in self._gradients.holders)
        meter = MemoryMeter(self._device, self._module.parameters()) if self._fitting_timesteps is None else None
        try:
            with meter.forward() if meter is not None else nullcontext():
                losses = forward(start, stop)
            is_forward_done = True
            sums = backward(losses)
            if meter is not None:
                self._choose(meter.num_bytes)
            return sums
        except RankOutOfMemory as error:
            return _Failure(_num_failed(error), False, "another rank ran out of memory")
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = f"{type(error).__name__}: {error}"  # the error itself holds the batch's activations
        if self._group is not None:
            return self._tell(stop - start, cause)
        if is_forward_done and has_gradient:
            return _Failure(stop - start, False, cause)
        if is_forward_done:
            self._gradients.clear()
        return _Failure(stop - start, True, cause)

    def _tell(self, num_timesteps: int, cause: str) -> _Failure:
        """Tell the other ranks that this one ran out of memory."""
        if self._settings.sharding != "none":
            # They wait for it inside a block, to exchange something else: nothing can be told to them.
            remedy = f"set `timestep_batch_size` to {num_timesteps // 2} or lower, " if num_timesteps > 1 else ""
            raise self._too_large(num_timesteps, remedy) from torch.OutOfMemoryError(cause)
        failure = self._meet(2 * OUT_OF_MEMORY - num_timesteps)
        assert failure is not None, "this rank has said that it failed"
        return replace(failure, cause=cause)

    def _meet(self, value: int) -> _Failure | None:
        """Hear, once all ranks have come as far as they can, whether one ran out of memory."""
        if self._group is None:
            return None
        try:
            largest_of_ranks(value, self._group, self._device)
        except RankOutOfMemory as error:
            return _Failure(_num_failed(error), False, "another rank ran out of memory")
        return None

    def _choose(self, bytes_per_timestep: int) -> None:
        """Choose how many timesteps fit into what is free, on the rank that has the least."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        free = free_bytes(self._device, self._settings.num_workers) - self._bytes_to_come()
        fitting = int(_MARGIN[self._device.type] * free) // max(bytes_per_timestep, 1)
        fitting = min(max(fitting, 1), _MOST_TIMESTEPS)
        if self._group is not None:
            fitting = -largest_of_ranks(-fitting, self._group, self._device)
        self._fitting_timesteps = fitting

    def _bytes_to_come(self) -> int:
        """Bytes of the optimizer's state where its first step is still to make it, as Adam's: two tensors a weight."""
        if self._optimizer.state or self._settings.offloads_optimizer:
            return 0
        return sum(2 * local_tensor(weight).nbytes for weight in self._trained_parameters().values())

    def _halve(self, failure: _Failure) -> None:
        """Take half as many timesteps from now on.

        Raises:
            TrainerOutOfMemory: it was one.
        """
        if failure.num_timesteps == 1:
            raise self._too_large(1) from torch.OutOfMemoryError(failure.cause)
        self._fitting_timesteps = failure.num_timesteps // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _too_large(self, num_timesteps: int, remedy: str = "") -> TrainerOutOfMemory:
        settings = self._settings
        is_on = {
            "gradient_checkpointing": settings.gradient_checkpointing,
            "offload_optimizer": settings.offloads_optimizer,
            "sharding": settings.sharding != "none",
        }
        options = [f"`{name}`" for name, value in is_on.items() if not value]
        timesteps = "one timestep" if num_timesteps == 1 else f"{num_timesteps} timesteps at a time"
        return TrainerOutOfMemory(
            f"trainer-{self._rank} ran out of memory with {timesteps} of its share of a micro-batch: {remedy}"
            f"{'set ' + ' or '.join(options) + ', ' if options else ''}or lower `groups_per_micro_batch`.",
            num_timesteps,
        )


def _num_failed(error: RankOutOfMemory) -> int:
    """Give the timesteps that were too many; of several ranks' numbers, the largest said is the smallest of these."""
    return 2 * OUT_OF_MEMORY - int(error.args[0])


def _added(sums: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more
