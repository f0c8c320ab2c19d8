"""What there is to do in a step: micro-batches of whole prompt groups, cut into slices that generators make."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Slice:
    """Samples [start, stop) of a step, made by one generator as one batch."""

    step: int
    micro_batch: int
    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"samples {self.start}-{self.stop - 1} of step {self.step}"


@dataclass(frozen=True, order=True)
class MicroBatch:
    """Samples [start, stop) of a step, whole groups, trained as soon as all its slices are scored."""

    step: int
    index: int
    start: int
    stop: int
    slices: tuple[Slice, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"micro-batch {self.index} of step {self.step}"


def cut_step(
    step: int,
    *,
    num_groups: int,
    group_size: int,
    groups_per_micro_batch: int,
    num_generators: int,
    generation_batch_size: int | None = None,
    keeps_groups_whole: bool = False,
) -> tuple[MicroBatch, ...]:
    """Cut a step along the generation axis.

    A micro-batch holds `groups_per_micro_batch` whole groups, and its samples are spread over all generators, so
    that advantages of the first group are known while the others are still being made. Slices of a micro-batch
    differ by one sample at most, or by one group.

    Args:
        step: index of the step.
        num_groups: prompts of the step.
        group_size: samples per prompt.
        groups_per_micro_batch: must divide `num_groups`.
        num_generators: how many slices a micro-batch needs to keep all generators busy.
        generation_batch_size: most samples in a slice; None sets no bound.
        keeps_groups_whole: cut between groups only, for rewards that compare the samples of a group.
    """
    assert num_groups % groups_per_micro_batch == 0, "the strategy checks that micro-batches divide the step"
    size = groups_per_micro_batch * group_size
    unit = group_size if keeps_groups_whole else 1
    num_slices = min(num_generators, size // unit)
    if generation_batch_size is not None:
        assert generation_batch_size >= unit, "the strategy checks that a group fits"
        num_slices = max(num_slices, -(-(size // unit) // (generation_batch_size // unit)))
    micro_batches = []
    for index in range(num_groups // groups_per_micro_batch):
        start = index * size
        borders = [start + size // unit * cut // num_slices * unit for cut in range(num_slices + 1)]
        slices = tuple(Slice(step, index, cut, borders[cut], borders[cut + 1]) for cut in range(num_slices))
        micro_batches.append(MicroBatch(step, index, start, start + size, slices))
    return tuple(micro_batches)
