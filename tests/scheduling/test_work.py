"""Cutting a step along the generation axis."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.scheduling import MicroBatch, cut_step

ROOT = Path(__file__).parents[2]


@st.composite
def cuts(draw: st.DrawFn) -> dict[str, Any]:
    groups_per_micro_batch = draw(st.integers(1, 5))
    return {
        "num_groups": groups_per_micro_batch * draw(st.integers(1, 6)),
        "group_size": draw(st.integers(1, 17)),
        "groups_per_micro_batch": groups_per_micro_batch,
        "num_generators": draw(st.integers(1, 9)),
        "generation_batch_size": draw(st.none() | st.integers(1, 20)),
    }


@given(cuts(), st.integers(0, 10**6))
def test_slices_partition_the_step_in_order(cut: dict[str, Any], step: int) -> None:
    micro_batches = cut_step(step, **cut)
    samples = [
        sample
        for micro_batch in micro_batches
        for part in micro_batch.slices
        for sample in range(part.start, part.stop)
    ]
    assert samples == list(range(cut["num_groups"] * cut["group_size"]))
    assert {micro_batch.step for micro_batch in micro_batches} == {step}
    assert all(part.step == step for micro_batch in micro_batches for part in micro_batch.slices)


@given(cuts())
def test_a_micro_batch_holds_as_many_whole_groups_as_was_asked_for(cut: dict[str, Any]) -> None:
    size = cut["groups_per_micro_batch"] * cut["group_size"]
    for index, micro_batch in enumerate(cut_step(0, **cut)):
        assert micro_batch.index == index
        assert (micro_batch.start, micro_batch.stop) == (index * size, (index + 1) * size)
        assert (micro_batch.slices[0].start, micro_batch.slices[-1].stop) == (micro_batch.start, micro_batch.stop)
        assert [part.index for part in micro_batch.slices] == list(range(len(micro_batch.slices)))
        assert {part.micro_batch for part in micro_batch.slices} == {index}


@given(cuts())
def test_slices_of_a_micro_batch_differ_by_one_sample_at_most_and_none_is_empty(cut: dict[str, Any]) -> None:
    for micro_batch in cut_step(0, **cut):
        sizes = [part.stop - part.start for part in micro_batch.slices]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@given(cuts())
def test_every_generator_gets_a_slice_and_no_slice_is_larger_than_allowed(cut: dict[str, Any]) -> None:
    size = cut["groups_per_micro_batch"] * cut["group_size"]
    bound = cut["generation_batch_size"] or size
    # Brute force: the fewest equal parts that are enough for the generators and small enough for the bound.
    wanted = next(
        parts
        for parts in range(1, size + 1)
        if parts >= min(cut["num_generators"], size) and all(len(range(i, size, parts)) <= bound for i in range(parts))
    )
    assert {len(micro_batch.slices) for micro_batch in cut_step(0, **cut)} == {wanted}


def test_a_group_is_spread_over_all_generators() -> None:
    first, second = cut_step(3, num_groups=2, group_size=6, groups_per_micro_batch=1, num_generators=4)
    assert [(part.start, part.stop) for part in first.slices] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert [(part.start, part.stop) for part in second.slices] == [(6, 7), (7, 9), (9, 10), (10, 12)]


def test_slices_and_micro_batches_say_which_they_are() -> None:
    micro_batch: MicroBatch = cut_step(2, num_groups=2, group_size=4, groups_per_micro_batch=1, num_generators=2)[1]
    assert str(micro_batch) == "micro-batch 1 of step 2"
    assert str(micro_batch.slices[1]) == "samples 6-7 of step 2"


def test_a_step_that_micro_batches_do_not_divide_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="divide the step"):
        cut_step(0, num_groups=3, group_size=2, groups_per_micro_batch=2, num_generators=1)


def test_scheduling_needs_the_standard_library_only() -> None:
    code = "import sys, digenrl.scheduling; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(loaded.stdout.split()) - {"digenrl", "__main__"}
    idle = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )  # what the environment loads at every start is none of ours
    assert imported - set(idle.stdout.split()) <= set(sys.stdlib_module_names)
    assert not imported & {"torch", "lightning", "numpy"}
