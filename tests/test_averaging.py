"""Decays of weight averages, compared with published ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.averaging import ConstantDecay, DecaySchedule, NoUpdates, RampDecay, WarmupDecay

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ema_decay.json").read_text())

SCHEDULES = [NoUpdates(), ConstantDecay(0.9), WarmupDecay(), RampDecay(), RampDecay(0.0075, 0.999, flat=75)]


def averages(schedule: DecaySchedule, average: float, weights: list[tuple[int, float]]) -> list[float]:
    """Run the recurrence over (number of steps, weight)."""
    result = []
    for num_steps, weight in weights:
        decay = schedule.decay(num_steps)
        if decay is not None:
            average = decay * average + (1 - decay) * weight
        result.append(average)
    return result


def test_the_evaluated_average_equals_flow_grpos() -> None:
    expected = GOLDEN["flowgrpo_ema"]["ema_after_step"]
    weights = [(step, step + 1.0) for step in range(len(expected))]
    assert averages(WarmupDecay(), 0.0, weights) == pytest.approx(expected, rel=1e-6)


def test_the_warmup_reaches_its_cap_and_updates_every_eighth_step_only() -> None:
    decays = [WarmupDecay().decay(step) for step in range(104)]
    assert [step for step, decay in enumerate(decays) if decay is not None] == list(range(7, 104, 8))
    assert decays[7] == 8 / 17
    assert decays[79] == 80 / 89
    assert decays[87] == decays[103] == 0.9


def test_the_reference_average_equals_dgpos() -> None:
    golden = GOLDEN["dgpo_ema_ref"]
    assert [RampDecay().decay(step) for step in golden["steps"]] == pytest.approx(golden["decay"], abs=1e-6)
    expected = golden["seq_global_step_100k"]
    weights = [(100 * number, number + 1.0) for number in range(len(expected))]
    assert averages(RampDecay(), 1e9, weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("key", "schedule"), [("0", ConstantDecay(0.0)), ("1", RampDecay(cap=0.5)), ("2", RampDecay(0.0075, 0.999, 75))]
)
def test_the_old_policys_decay_equals_diffusion_nfts(key: str, schedule: DecaySchedule) -> None:
    decays = [schedule.decay(step) for step in GOLDEN["nft_steps"]]
    assert decays == pytest.approx(GOLDEN["nft_return_decay"][key], abs=1e-6)


def test_a_frozen_reference_is_never_updated() -> None:
    assert {NoUpdates().decay(step) for step in range(50)} == {None}


@given(st.sampled_from(SCHEDULES), st.integers(0, 10_000))
def test_a_decay_is_a_share_and_survives_pickling(schedule: DecaySchedule, num_steps: int) -> None:
    decay = schedule.decay(num_steps)
    assert decay is None or 0 <= decay <= 1
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert again.decay(num_steps) == decay


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantDecay(1.1), "`rate` .* got 1.1"),
        (lambda: ConstantDecay(-0.1), "`rate` .* got -0.1"),
        (lambda: WarmupDecay(cap=float("nan")), "`cap` .* got nan"),
        (lambda: WarmupDecay(interval=0), "`interval` .* got 0"),
        (lambda: RampDecay(rate=-0.1), "`rate` .* got -0.1"),
        (lambda: RampDecay(cap=2.0), "`cap` .* got 2"),
        (lambda: RampDecay(flat=-1), "`flat` .* got -1"),
    ],
)
def test_a_rule_outside_its_range_is_refused_in_one_line(make: Callable[[], DecaySchedule], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
