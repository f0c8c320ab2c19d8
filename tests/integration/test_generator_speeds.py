"""A generator that is twice as fast makes twice as many samples, since each takes a slice whenever it is free."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.empty_work import EmptyPolicy, EmptyWork, sample_numbers
from digenrl import DisaggregatedStrategy
from digenrl.scheduling import SchedulingPolicy, cut_step
from digenrl.scheduling.simulate import Cluster, Workload, simulate
from digenrl.strategies.driver import WorkerSpan
from digenrl.types import PromptBatch, Trajectory
from tests.integration.toy_runs import fit, toy_data

SAMPLES = re.compile(r"samples (\d+)-(\d+) of step (\d+)")
FAST_S = 0.04
"""Of a sample, on the fast generator."""


def samples_made(spans: Iterable[Any]) -> Counter[str]:
    """Samples by worker, from the spans of a run or of a simulation."""
    made: Counter[str] = Counter()
    for span in spans:
        if span.task == "generate":
            match = SAMPLES.match(span.detail)
            assert match is not None
            made[span.worker] += int(match[2]) - int(match[1]) + 1
    return made


@given(
    speeds=st.lists(st.floats(0.25, 4.0), min_size=1, max_size=6),
    num_groups=st.integers(1, 24),
    group_size=st.integers(1, 12),
    batch_size=st.none() | st.integers(1, 8),
)
@settings(deadline=None)
def test_samples_are_shared_by_speed_within_a_slice_of_each_generator(
    speeds: Sequence[float], num_groups: int, group_size: int, batch_size: int | None
) -> None:
    # Until the last slice is taken, at T, all are busy: generator i has then begun n_i samples with
    # T s_i <= n_i <= T s_i + m, m the largest slice; the n_i add up to N.
    work = Workload(num_groups, group_size, generate_s=1.0, update_s=1e-6, generation_batch_size=batch_size)
    cluster = Cluster(len(speeds), 1, generator_speeds=tuple(speeds))
    made = samples_made(simulate(cluster, work, SchedulingPolicy(), num_steps=1).spans)
    micro_batches = cut_step(
        0,
        num_groups=num_groups,
        group_size=group_size,
        groups_per_micro_batch=1,
        num_generators=len(speeds),
        generation_batch_size=batch_size,
    )
    largest = max(len(part) for micro_batch in micro_batches for part in micro_batch.slices)
    assert batch_size is None or largest <= batch_size
    num_samples, mean_speed = num_groups * group_size, sum(speeds) / len(speeds)
    assert made.total() == num_samples
    for name, speed in zip(cluster.generator_names, speeds, strict=True):
        fair_share = num_samples / len(speeds) * speed / mean_speed
        assert made[name] <= fair_share + largest + 1e-6
        assert made[name] >= fair_share - largest * speed / mean_speed - 1e-6


@given(num_groups=st.integers(2, 24), group_size=st.integers(2, 12))
@settings(deadline=None)
def test_smaller_slices_bring_the_shares_of_a_mixed_pair_nearer_to_their_speeds(
    num_groups: int, group_size: int
) -> None:
    work = Workload(num_groups, group_size, generate_s=1.0, update_s=1e-6, generation_batch_size=1)
    result = simulate(Cluster(2, 1, generator_speeds=(1.0, 2.0)), work, SchedulingPolicy(), num_steps=1)
    made = samples_made(result.spans)
    assert made["generator-1"] in (
        math.floor(2 / 3 * num_groups * group_size),
        math.ceil(2 / 3 * num_groups * group_size),
    )


class TwoSpeeds(EmptyWork):
    """The generator that is asked first needs twice as long as the other; it sleeps, so that cores do not matter."""

    mark: Path
    sample_s: float | None = None

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        if self.sample_s is None:
            self.sample_s = FAST_S * (2 if self._is_first() else 1)
        time.sleep(self.sample_s * len(prompts))
        return super().rollout(prompts)

    def _is_first(self) -> bool:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Spans(pl.Callback):
    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self.strategy = strategy
        self.made: list[WorkerSpan] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.made += [entry for entry in self.strategy.last_step_spans if entry.task == "generate"]


def test_a_generator_twice_as_fast_makes_twice_the_samples(tmp_path: Path) -> None:
    strategy = DisaggregatedStrategy(2, 1, trainer_assist="off", generation_batch_size=1)
    spans = Spans(strategy)
    module = TwoSpeeds(EmptyPolicy(4), sample_numbers, group_size=6, num_steps=1, seed=0)
    module.mark = tmp_path / "taken"
    fit(strategy, module=module, data=toy_data(), max_steps=2, callbacks=[spans])
    made = samples_made(spans.made)
    fast, slow = sorted(made, key=lambda worker: min(e.span.seconds for e in spans.made if e.worker == worker))
    assert made.total() == 2 * 4 * 6
    assert 28 <= made[fast] <= 34, "two thirds of 48 are 32; what each slice takes beside may shift a few"
    assert made[slow] == 48 - made[fast]
