"""What the comparison of generators and trainers finds, and how it says it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from digenrl.diffusion.kernels import FlowSDE
from digenrl.strategies.parity import (
    GeneratorParity,
    ParityError,
    ParityMeasure,
    ParityReport,
    ParitySample,
    Tolerances,
    find_misfit,
    largest,
    ratio_deviation,
    velocity_deviation,
)
from digenrl.types import Prompt, PromptBatch, Trajectory
from tests.toy import ToyCondition

EXACT = Tolerances.of("cpu", in_half=False)
EXPECTED: dict[str, Any] = {"num_steps": 3, "recorded": range(2), "latent_shape": (2, 4)}


def trajectory(**changes: Any) -> Trajectory:
    return Trajectory(
        **{
            "prompts": PromptBatch.for_step([Prompt("low", 0)], step=0, group_size=2, seed=0),
            "condition": ToyCondition(torch.zeros(2)),
            "latents": torch.zeros(2, 3, 2, 4),
            "final_latents": torch.zeros(2, 2, 4),
            "sigmas": torch.tensor([1.0, 0.6, 0.3, 0.0]),
            "timestep_indices": (0, 1),
            "old_log_probs": torch.zeros(2, 2),
            "kernel": FlowSDE(),
            **changes,
        }
    )


def parity(**measures: float | str | None) -> GeneratorParity:
    return GeneratorParity("generator-0", {}, {"trainer-0": ParityMeasure(EXACT, **measures)})  # type: ignore[arg-type]


def test_a_trajectory_as_documented_fits() -> None:
    assert find_misfit(trajectory(), **EXPECTED) is None
    only_final = trajectory(latents=None, timestep_indices=(), old_log_probs=None)
    assert find_misfit(only_final, **EXPECTED) is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sigmas": torch.tensor([1.0, 0.5, 0.0])}, "`sigmas` of 3 steps must be [4], got [3]"),
        ({"sigmas": torch.tensor([1.0, 0.3, 0.6, 0.0])}, "`sigmas` must fall to 0, got [1.0, 0.3, 0.6, 0.0]"),
        ({"sigmas": torch.tensor([1.0, 0.6, 0.3, 0.1])}, "`sigmas` must fall to 0, got [1.0, 0.6, 0.3, 0.1]"),
        ({"sigmas": torch.full((4,), math.nan)}, "`sigmas` must fall to 0, got [nan, nan, nan, nan]"),
        ({"timestep_indices": (1, 2)}, "`timestep_indices` must be [0, 1], got [1, 2]"),
        (
            {"latents": torch.zeros(2, 3, 8), "final_latents": torch.zeros(2, 8)},
            "`final_latents` must be [2, 2, 4], got [2, 8]",
        ),
        ({"old_log_probs": torch.zeros(2, 2, 1)}, "`old_log_probs` must be [2, 2], got [2, 2, 1]"),
        (
            {"old_log_probs": torch.zeros(2, 2, dtype=torch.bfloat16)},
            "`old_log_probs` must be float32, which rounding would move too far, got torch.bfloat16",
        ),
    ],
)
def test_a_misfit_is_named(changes: dict[str, Any], fault: str) -> None:
    assert find_misfit(trajectory(**changes), **EXPECTED) == fault


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"latents": torch.full((2, 3, 2, 4), math.inf)}, "latents` of its rollout has 48 of 48"),
        ({"old_log_probs": torch.tensor([[0, math.nan], [0, 0]])}, "old_log_probs` of its rollout has 1 of 4"),
        ({"condition": ToyCondition(torch.tensor([0, math.nan]))}, "condition.level` of its rollout has 1 of 2"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(changes: dict[str, Any], name: str) -> None:
    sample = ParitySample(trajectory(**changes), torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))
    assert sample.find_fault(version=0, **EXPECTED) == f"`{name} numbers that are not finite"


def test_a_rollout_of_another_version_is_a_fault() -> None:
    sample = ParitySample(replace(trajectory(), policy_version=3), torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))
    fault = sample.find_fault(version=4, **EXPECTED)
    assert fault == "its rollout is of policy version 3, the trainers are at 4"


def test_deviations_are_those_of_the_definition() -> None:
    assert velocity_deviation(torch.tensor([1.0, -3.9]), torch.tensor([1.0, -4.0])) == pytest.approx(0.025, rel=1e-5)
    assert velocity_deviation(torch.zeros(2), torch.zeros(2)) == 0
    assert velocity_deviation(torch.ones(2), torch.zeros(2)) == math.inf
    assert ratio_deviation(torch.tensor([1.0, 0.8]), torch.ones(2)) == pytest.approx(1 - math.exp(-0.2))
    assert ratio_deviation(torch.tensor([1.1, 1.0]), torch.ones(2)) == pytest.approx(math.exp(0.1) - 1, rel=1e-5)
    assert largest([0.1, None, 0.3]) == 0.3
    assert math.isnan(largest([math.inf, math.nan, 0.3]) or 0)
    assert largest([None]) is None


@pytest.mark.parametrize(("value", "is_fault"), [(0.9e-6, False), (1.1e-6, True), (math.nan, True)])
def test_a_ratio_beyond_its_tolerance_is_a_fault(value: float, is_fault: bool) -> None:
    assert (parity(ratio=value).fault() is not None) == is_fault


def test_settling_raises_the_first_fault_warns_of_each_or_passes(caplog: pytest.LogCaptureFixture) -> None:
    report = ParityReport((parity(ratio=0.0), parity(velocity=0.5), parity(ratio=math.nan)))
    message = (
        "parity check of generator-0: the velocity at its initial noise, recomputed by trainer-0, parts by 0.5, "
        "tolerance 1e-05; let `velocity` depend on its arguments and the trained weights alone, or set `parity_check` "
        "to warn to run anyway."
    )
    with pytest.raises(ParityError) as caught:
        report.settle("raise", 1e-4)
    assert str(caught.value) == message
    with caplog.at_level(logging.WARNING):
        report.settle("warn", 1e-4)
    assert [record.getMessage() for record in caplog.records][0] == message
    assert len(caplog.records) == 2
    assert report.metrics["parity/velocity_max_dev"] == 0.5
    assert math.isnan(report.metrics["parity/ratio_max_abs_dev"])
    assert "parity/ratio_max_abs_dev" not in ParityReport((parity(),)).metrics


def test_rounding_beyond_the_clip_range_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    report = ParityReport((parity(ratio=5e-7),))
    with caplog.at_level(logging.WARNING):
        report.settle("raise", 1e-6)
        report.settle("raise", None)
        assert caplog.records == []
        report.settle("raise", 1e-7)
    assert "leaves 1 by 5e-07 before any update, more than `clip_range` 1e-07" in caplog.text


def test_tolerances_lie_between_rounding_and_the_usual_mistakes() -> None:
    for in_half, rounding in ((False, 2.4e-7), (True, 2.4e-4)):  # measured, as the mistakes below
        assert rounding < Tolerances.of("cpu", in_half=in_half).ratio < 6.7e-4
