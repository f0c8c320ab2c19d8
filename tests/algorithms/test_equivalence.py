"""For every algorithm: where and how a step runs may change its time, never its gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from digenrl import DisaggregatedStrategy
from tests.algorithms.cases import CASES, STEP_SIZE, make
from tests.integration.toy_runs import fit, largest_difference, relative_difference

EVERY_CASE = pytest.mark.parametrize("case", CASES)


def gradient(case: str, strategy: Any, **settings: Any) -> dict[str, Tensor]:
    """The gradient of the first step over all trained weights."""
    module = make(case, descends=True, moves_copies=True, **settings)
    _, _, after = fit(strategy, module=module)
    before = initial_weights(case)
    return {name: (before[name] - after[name]) / STEP_SIZE for name in before}


@cache
def initial_weights(case: str) -> dict[str, Tensor]:
    module = make(case, moves_copies=True)
    module.configure_model()
    return {name: value.clone() for name, value in module.named_parameters() if value.requires_grad}


@cache
def colocated_gradient(case: str) -> dict[str, Tensor]:
    found = gradient(case, "auto")
    assert max(value.abs().max().item() for value in found.values()) > 1e-7, "nothing would be compared"
    return found


@EVERY_CASE
@pytest.mark.parametrize(
    ("groups_per_micro_batch", "timestep_batch_size"), [(1, 1), (1, "all"), (2, 3), ("all", 1), ("all", "all")]
)
def test_the_gradient_does_not_depend_on_batching(
    case: str, groups_per_micro_batch: Any, timestep_batch_size: Any
) -> None:
    strategy = DisaggregatedStrategy(
        engine="inline",
        groups_per_micro_batch=groups_per_micro_batch,
        timestep_batch_size=timestep_batch_size,
        trainer_assist="off",
    )
    assert relative_difference(gradient(case, strategy), colocated_gradient(case)) <= 1e-6


@EVERY_CASE
def test_the_gradient_does_not_depend_on_ranks_arrival_and_assistance(case: str) -> None:
    # A group of 4 is split over both ranks, and its slices of 1 sample are made by whichever worker is free.
    strategy = DisaggregatedStrategy(2, 2, generation_batch_size=1, trainer_assist="static:1")
    assert relative_difference(gradient(case, strategy), colocated_gradient(case)) <= 1e-6


@EVERY_CASE
def test_weights_and_copies_after_four_steps_equal_the_colocated_run(case: str) -> None:
    settings: dict[str, Any] = {"max_steps": 4}
    _, _, colocated = fit("auto", module=make(case, lr=1e-3), **settings)
    _, _, disaggregated = fit(DisaggregatedStrategy(2, 2, trainer_assist="off"), module=make(case, lr=1e-3), **settings)
    assert largest_difference(disaggregated, colocated) <= 1e-5
