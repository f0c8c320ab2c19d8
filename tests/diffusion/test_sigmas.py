"""Schedules, compared with diffusers, with published runs and with exact arithmetic."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from digenrl.diffusion import (
    compress_sigmas,
    dance_sigmas,
    dpm_sigmas,
    dynamic_shift_sigmas,
    flow_match_sigmas,
    unipc_sigmas,
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "schedules.npz")

QWEN_IMAGE = {"max_shift": 0.9, "max_sequence_length": 8192, "terminal": 0.02}

PUBLISHED = {
    "sd3_N10": lambda: flow_match_sigmas(10, shift=3.0, double_shift=True),
    "sd3_N20": lambda: flow_match_sigmas(20, shift=3.0, double_shift=True),
    "sd3_N28": lambda: flow_match_sigmas(28, shift=3.0, double_shift=True),
    "sd3_N40": lambda: flow_match_sigmas(40, shift=3.0, double_shift=True),
    "flux_512px_N6": lambda: dynamic_shift_sigmas(6, sequence_length=1024),
    "flux_512px_N10": lambda: dynamic_shift_sigmas(10, sequence_length=1024),
    "flux_1024px_N28": lambda: dynamic_shift_sigmas(28, sequence_length=4096),
    "qwenimage_512px_N10": lambda: dynamic_shift_sigmas(10, sequence_length=1024, **QWEN_IMAGE),
    "dance_flux_shift3_N16": lambda: dance_sigmas(16, shift=3.0),
    "dance_flux_lora_shift3_N12": lambda: dance_sigmas(12, shift=3.0),
    "dance_hunyuan_shift5_N16": lambda: dance_sigmas(16, shift=5.0),
    "dance_wan_shift3_N20": lambda: dance_sigmas(20, shift=3.0),
    "dance_skyreels_shift7_N16": lambda: dance_sigmas(16, shift=7.0),
    "dance_mixgrpo_shift3_N25": lambda: dance_sigmas(25, shift=3.0),
    "dance_noshift_shift1_N10": lambda: dance_sigmas(10, shift=1.0),
}


def test_every_stored_schedule_is_compared():
    assert {f"{name}.sigmas" for name in PUBLISHED} == set(GOLDEN.files)


@pytest.mark.parametrize("name", PUBLISHED)
def test_schedule_equals_published_one(name):
    expected = GOLDEN[f"{name}.sigmas"]
    actual = PUBLISHED[name]()
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert np.abs(actual.numpy() - expected).max() <= 1e-6


@pytest.mark.parametrize("name", PUBLISHED)
def test_schedule_falls_from_one_to_zero(name):
    sigmas = PUBLISHED[name]()
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


@pytest.mark.parametrize("num_steps", [1, 2, 7, 33])
def test_double_shift_equals_diffusers_scheduler(num_steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(num_steps)
    torch.testing.assert_close(
        flow_match_sigmas(num_steps, shift=5.0, double_shift=True), scheduler.sigmas, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("num_steps", [2, 7, 33])
def test_dynamic_shift_equals_diffusers_scheduler(num_steps):
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    log_shift = 0.5 + (3600 - 256) * (0.9 - 0.5) / (8192 - 256)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps), mu=log_shift)
    actual = dynamic_shift_sigmas(num_steps, sequence_length=3600, **QWEN_IMAGE)
    torch.testing.assert_close(actual, scheduler.sigmas, atol=1e-6, rtol=0)
    assert actual[-2] == np.float32(0.02)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
@pytest.mark.parametrize("num_steps", [1, 2, 10, 33])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_dpm_sigmas_equal_diffusers_scheduler(num_steps, shift):
    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(num_steps)
    actual = dpm_sigmas(num_steps, shift=shift)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, scheduler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_steps", [1, 2, 20])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_unipc_sigmas_equal_diffusers_scheduler(num_steps, shift):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(num_steps)
    actual = unipc_sigmas(num_steps, shift=shift)
    assert actual[0] == 1
    torch.testing.assert_close(actual, scheduler.sigmas, atol=1.1e-6, rtol=0)  # it begins 1e-6 below 1


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("start", [0, 1, 7, 11])
def test_compressing_to_all_sigmas_changes_nothing(shift, start):
    sigmas = dance_sigmas(12, shift=shift)
    tail = compress_sigmas(sigmas, start=start, ratio=1.0, shift=shift)
    torch.testing.assert_close(tail, sigmas[start:], atol=1e-6, rtol=0)


def test_compressed_sigmas_are_a_bent_line_of_the_given_share():
    """MixGRPO-Flash's rule: of the 20 sigmas from index 6 on it keeps int(0.4 * 20), in even steps before the bend."""
    tail = compress_sigmas(dance_sigmas(25, shift=3.0), start=6, ratio=0.4, shift=3.0)
    line = [Fraction(19, 25) * Fraction(7 - i, 7) for i in range(8)]
    expected = torch.tensor([float(3 * u / (1 + 2 * u)) for u in line])
    torch.testing.assert_close(tail, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("make", [dance_sigmas, dpm_sigmas, flow_match_sigmas])
@pytest.mark.parametrize("shift", [0.3, 3.0, 7.3])
def test_compressed_sigmas_fall_from_where_they_start_to_zero(make, ratio, shift):
    sigmas = make(9, shift=shift)
    for start in range(9):
        tail = compress_sigmas(sigmas, start=start, ratio=ratio, shift=shift)
        assert tail[0] == sigmas[start]
        assert tail[-1] == 0
        assert (tail.diff() < 0).all()
        assert 2 <= len(tail) <= len(sigmas) - start
        assert tail.dtype == torch.float32


@pytest.mark.parametrize("num_steps", [1, 3, 10, 50])
@pytest.mark.parametrize("shift", [1, 3, 12])
def test_static_shift_is_the_nearest_float_to_the_exact_value(num_steps, shift):
    def shifted(u):
        return float(shift * u / (1 + (shift - 1) * u))

    line = [1 - Fraction(i, num_steps) for i in range(num_steps + 1)]
    expected = torch.tensor([shifted(u) for u in line], dtype=torch.float64).float()
    assert torch.equal(flow_match_sigmas(num_steps, shift=shift), expected)
    assert torch.equal(dance_sigmas(num_steps, shift=shift), expected)


def test_the_two_shift_3_tables_differ_most_at_the_end():
    assert flow_match_sigmas(10, shift=3.0)[-2] == 0.25
    assert flow_match_sigmas(10, shift=3.0, double_shift=True)[-2] == pytest.approx(0.00892857, abs=1e-7)


def test_schedule_does_not_depend_on_torchs_default_type():
    expected = dynamic_shift_sigmas(9, sequence_length=1000, terminal=0.1)
    torch.set_default_dtype(torch.float64)
    try:
        actual = dynamic_shift_sigmas(9, sequence_length=1000, terminal=0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flow_match_sigmas(0), "`num_steps` .* got 0"),
        (lambda: flow_match_sigmas(4, shift=0.0), "`shift` .* got 0"),
        (lambda: flow_match_sigmas(4, shift=math.nan), "`shift` .* got nan"),
        (lambda: dance_sigmas(-1, shift=3.0), "`num_steps` .* got -1"),
        (lambda: dance_sigmas(4, shift=math.inf), "`shift` .* got inf"),
        (lambda: dpm_sigmas(0, shift=3.0), "`num_steps` .* got 0"),
        (lambda: dpm_sigmas(4, shift=-1.0), "`shift` .* got -1"),
        (lambda: compress_sigmas(dance_sigmas(4, shift=1.0), start=4, ratio=0.5, shift=1.0), "`start` .* got 4"),
        (lambda: compress_sigmas(dance_sigmas(4, shift=1.0), start=-1, ratio=0.5, shift=1.0), "`start` .* got -1"),
        (lambda: compress_sigmas(dance_sigmas(4, shift=1.0), start=1, ratio=0.0, shift=1.0), "`ratio` .* got 0"),
        (lambda: compress_sigmas(dance_sigmas(4, shift=1.0), start=1, ratio=1.1, shift=1.0), "`ratio` .* got 1.1"),
        (lambda: compress_sigmas(dance_sigmas(4, shift=1.0), start=1, ratio=0.5, shift=0.0), "`shift` .* got 0"),
        (lambda: dynamic_shift_sigmas(0, sequence_length=9), "`num_steps` .* got 0"),
        (lambda: dynamic_shift_sigmas(4, sequence_length=0), "`sequence_length` .* got 0"),
        (
            lambda: dynamic_shift_sigmas(4, sequence_length=9, max_sequence_length=256),
            "`base_sequence_length` .* got 256 and 256",
        ),
        (lambda: dynamic_shift_sigmas(4, sequence_length=9, terminal=1.0), "`terminal` .* got 1"),
        (lambda: dynamic_shift_sigmas(1, sequence_length=9, terminal=0.02), "`terminal` needs .* got 1"),
    ],
)
def test_argument_outside_its_range_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
