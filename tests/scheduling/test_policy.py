"""What a user may ask of the scheduler, and how a slip is explained."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from digenrl.scheduling import SchedulingPolicy


def refusal(**options: Any) -> str:
    with pytest.raises(ValueError, match="must be|takes") as caught:
        SchedulingPolicy(**options)
    return str(caught.value)


def test_the_default_is_strictly_on_policy_without_assistance() -> None:
    assert SchedulingPolicy() == SchedulingPolicy("off", 0.0, "cap")


@pytest.mark.parametrize("method", ["off", "static:0", "static:12", "search", "optimal"])
def test_every_method_of_assistance_is_accepted(method: str) -> None:
    assert SchedulingPolicy(trainer_assist=method).trainer_assist == method


@pytest.mark.parametrize("staleness", [0, 0.0, 0.25, 0.999])
def test_staleness_may_be_any_fraction_below_one(staleness: float) -> None:
    assert SchedulingPolicy(staleness=staleness).staleness == staleness


@pytest.mark.parametrize("staleness", [1, 1.5, -0.1, float("nan"), float("inf"), "0.25", None, True])
def test_a_staleness_out_of_bounds_is_refused_with_its_value(staleness: Any) -> None:
    message = refusal(staleness=staleness)
    assert message.startswith("`staleness` is the largest stale fraction of a step and must be in [0, 1), got ")
    assert str(staleness) in message


@pytest.mark.parametrize("mode", ["Cap", "", None, "strict"])
def test_an_unknown_staleness_mode_is_refused_with_those_there_are(mode: Any) -> None:
    assert refusal(staleness_mode=mode) == f"`staleness_mode` must be cap or exact, got {mode!r}."


@pytest.mark.parametrize("method", ["on", "", "static", "static:", "static:-1", "static:2.5", "optimum", None, 2, True])
def test_an_unknown_method_is_refused_by_the_options_name(method: Any) -> None:
    message = refusal(trainer_assist=method)
    assert message.startswith("`trainer_assist` ")
    assert repr(method) in message


def test_a_misspelt_method_gets_a_suggestion() -> None:
    assert "did you mean `optimal`?" in refusal(trainer_assist="Optimal")


def test_a_bare_off_in_yaml_is_explained() -> None:
    """YAML reads it as false."""
    message = refusal(trainer_assist=False)
    assert message == (
        "`trainer_assist` must be one of off, static:K, search, optimal, got False; write `off` in quotes."
    )


@pytest.mark.parametrize("options", [{"staleness": 2}, {"staleness_mode": "x"}, {"trainer_assist": "x"}])
def test_errors_take_one_line(options: dict[str, Any]) -> None:
    assert "\n" not in refusal(**options)


def test_a_policy_does_not_change_under_a_run() -> None:
    policy = SchedulingPolicy()
    with pytest.raises(FrozenInstanceError):
        policy.staleness = 0.5  # type: ignore[misc]
