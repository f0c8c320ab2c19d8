"""Denoising steps, compared with published implementations and checked for what the mathematics promises."""

import dataclasses
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from digenrl.diffusion import (
    DanceSDE,
    Euler,
    FlowCPS,
    FlowSDE,
    WanLinearSDE,
    dance_sigmas,
    flow_match_sigmas,
)

GOLDEN = Path(__file__).parents[1] / "golden"

SDE_KERNELS = [FlowSDE(), FlowSDE(1.2), DanceSDE(), DanceSDE(0.9), WanLinearSDE()]
STOCHASTIC_KERNELS = [*SDE_KERNELS, FlowCPS(), FlowCPS(1.0)]
DETERMINISTIC_KERNELS = [Euler(), FlowSDE(0.0), DanceSDE(0.0), FlowCPS(0.0)]
KERNELS = STOCHASTIC_KERNELS + DETERMINISTIC_KERNELS

# Our arithmetic, the stored keys to compare with, and the tolerances of values and of log-probs.
PRECISIONS = [
    pytest.param(torch.float64, "_f64", 1e-9, 5e-8, id="float64"),
    pytest.param(torch.float64, "", 2e-6, 1e-5, id="float64-against-float32"),
    pytest.param(torch.float32, "", 2e-5, 5e-4, id="float32"),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def deviation(actual, expected):
    """Largest |a - b| / (1 + |b|)."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape
    return float(((actual.double() - expected).abs() / (1 + expected.abs())).max())


def golden_steps(name, kernel_class, levels_key, dtype):
    """Yield (place, kernel, step with the stored noise, function that scores under the other velocity)."""
    golden = np.load(GOLDEN / f"{name}.npz")
    sample, velocity, new_velocity, noise = (
        torch.from_numpy(golden[key]).to(dtype) for key in ("sample", "model_output", "model_output_new", "noise")
    )
    sigmas = torch.from_numpy(golden["sigmas"])
    for i, index in enumerate(golden["steps"]):
        for j, level in enumerate(golden[levels_key]):
            kernel = kernel_class(float(level))
            arguments = {
                "sigma": sigmas[index],
                "next_sigma": sigmas[index + 1],
                "sigma_max": sigmas[1],
            }

            def score(prev, kernel=kernel, arguments=arguments):
                return kernel.step(sample, new_velocity, **arguments, next_latents=torch.from_numpy(prev).to(dtype))

            yield golden, (i, j), kernel, kernel.step(sample, velocity, **arguments, noise=noise), score


@pytest.mark.parametrize(("dtype", "suffix", "value_bound", "log_prob_bound"), PRECISIONS)
@pytest.mark.parametrize(
    ("name", "prefix", "kernel_class", "levels_key"),
    [
        ("flowgrpo_sde_sd3", "sde", FlowSDE, "noise_levels"),
        ("flowcps_sd3", "cps", FlowCPS, "noise_levels"),
        ("dancegrpo_step_flux", "sde", DanceSDE, "etas"),
        ("mixgrpo_steps", "sde.flow", FlowSDE, "etas"),
    ],
)
def test_kernel_equals_published_step(
    name, prefix, kernel_class, levels_key, dtype, suffix, value_bound, log_prob_bound
):
    for golden, place, kernel, step, score in golden_steps(name, kernel_class, levels_key, dtype):

        def stored(key, golden=golden, place=place):
            return golden[f"{prefix}.{key}{suffix}"][place]

        rescored = score(stored("prev"))
        assert step.next_latents.dtype == dtype
        assert deviation(step.next_latents, stored("prev")) <= value_bound
        assert deviation(step.mean, stored("mean")) <= value_bound
        if name.startswith("flow"):
            assert deviation(rescored.mean, stored("mean_new")) <= value_bound
        if kernel.is_deterministic:
            assert step.log_prob is None
            assert rescored.log_prob is None
        else:
            assert deviation(step.log_prob, stored("logp")) <= log_prob_bound
            assert deviation(rescored.log_prob, stored("logp_new")) <= log_prob_bound


@pytest.mark.parametrize(("dtype", "suffix", "value_bound", "log_prob_bound"), PRECISIONS)
def test_std_is_the_conditional_one(dtype, suffix, value_bound, log_prob_bound):
    for golden, place, _, step, _ in golden_steps("flowgrpo_sde_sd3", FlowSDE, "noise_levels", dtype):
        expected = golden[f"sde.std{suffix}"][place] * golden[f"sde.sqrt_dt{suffix}"][place]
        assert deviation(step.std, expected) <= value_bound
    for golden, place, _, step, _ in golden_steps("mixgrpo_steps", FlowSDE, "etas", dtype):
        assert deviation(step.std, golden[f"sde.flow.std_sqrt_dt{suffix}"][place].repeat(2)) <= value_bound
    for golden, place, _, step, _ in golden_steps("flowcps_sd3", FlowCPS, "noise_levels", dtype):
        assert deviation(step.std, golden[f"cps.std{suffix}"][place]) <= value_bound


@pytest.mark.parametrize(("dtype", "suffix", "value_bound", "log_prob_bound"), PRECISIONS)
def test_dance_kernel_equals_mixgrpos_step_up_to_its_missing_constants(dtype, suffix, value_bound, log_prob_bound):
    for golden, place, _, step, score in golden_steps("mixgrpo_steps", DanceSDE, "etas", dtype):
        prev = golden[f"sde.dance.prev{suffix}"][place]
        logp, logp_new = (golden[f"sde.dance.{key}{suffix}"][place] for key in ("logp", "logp_new"))
        assert deviation(step.next_latents, prev) <= value_bound
        # These log-probs are float32 numbers under every key.
        bound = max(log_prob_bound, 1e-5)
        assert deviation(score(prev).log_prob - step.log_prob, logp_new.astype(np.float64) - logp) <= bound


@pytest.mark.parametrize("kernel", DETERMINISTIC_KERNELS, ids=repr)
@pytest.mark.parametrize(("dtype", "suffix", "value_bound", "log_prob_bound"), PRECISIONS)
def test_noiseless_kernel_equals_mixgrpos_ode_step(kernel, dtype, suffix, value_bound, log_prob_bound):
    golden = np.load(GOLDEN / "mixgrpo_steps.npz")
    sample, velocity = (torch.from_numpy(golden[key]).to(dtype) for key in ("sample", "model_output"))
    sigmas = torch.from_numpy(golden["sigmas"])
    for i, index in enumerate(golden["steps"]):
        step = kernel.step(sample, velocity, sigmas[index], sigmas[index + 1], sigma_max=sigmas[1])
        assert deviation(step.next_latents, golden[f"ode.flow.prev{suffix}"][i, 0]) <= value_bound


SD3_SIGMAS = [
    1.0, 0.96012932, 0.91334897, 0.8576923, 0.79036826, 0.70727849,
    0.60215056, 0.46487603, 0.27804878, 0.00892857, 0.0,
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "index", "mean", "std", "log_prob"),
    [
        (FlowSDE(0.7), 0, [0.33762931, -0.77493534, 0.20868534, 1.50003233], 0.7, -0.67569033),
        (FlowSDE(0.7), 1, [0.29802894, -0.74166176, 0.20725602, 1.41052158], 0.74296410, -0.75433617),
        (FlowSDE(0.7), 4, [0.34799902, -0.95461501, 0.27744630, 1.77992153], 0.39179430, -0.08884369),
        (FlowSDE(0.7), 9, [0.48778032, -1.00335083, 0.25500623, 1.99280657], 0.00627809, -127.00704),
        (FlowCPS(0.8), 0, [0.12841279, -0.35650231, 0.10407709, 0.66316625], 0.91313724, -0.65261584),
        (FlowCPS(0.8), 4, [0.07010083, -0.60405282, 0.22059088, 0.97618006], 0.67266181, -0.38986964),
        (FlowCPS(0.8), 9, [0.49107143, -1.00446429, 0.25446429, 1.99776786], 0.0, -0.01),
        (DanceSDE(0.3), 0, [0.45923222, -1.01814116, 0.26948680, 1.98644397], 0.05990294, 0.48022706),
        (DanceSDE(0.3), 4, [0.41355311, -1.03731000, 0.29085806, 1.96951811], 0.08647590, 0.82643716),
        (DanceSDE(0.3), 9, [0.42397321, -0.98176339, 0.26551339, 1.89661830], 0.02834734, -10.15332931),
    ],
)
def test_kernel_equals_numbers_worked_out_by_hand(kernel, index, mean, std, log_prob):
    latents = torch.tensor([[0.5, -1.0, 0.25, 2.0]], dtype=torch.float64)
    velocity = torch.tensor([[1.0, 0.5, -0.5, 0.25]], dtype=torch.float64)
    sigma, next_sigma = SD3_SIGMAS[index : index + 2]
    step = kernel.step(
        latents,
        velocity,
        sigma,
        next_sigma,
        sigma_max=SD3_SIGMAS[1],
        next_latents=latents + velocity * (next_sigma - sigma) + 0.1,
    )
    torch.testing.assert_close(step.mean, torch.tensor([mean]).double(), atol=2e-6, rtol=0)
    assert step.std.item() == pytest.approx(std, abs=2e-6)
    # The last Flow-SDE step is so peaked that the eight digits of the sigmas show.
    assert step.log_prob.item() == pytest.approx(log_prob, abs=1e-3 if log_prob < -100 else 2e-6)


@pytest.mark.parametrize("kernel", DETERMINISTIC_KERNELS, ids=repr)
def test_noiseless_kernel_equals_diffusers_euler_scheduler(kernel):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    rng = torch.Generator().manual_seed(0)
    expected = latents = torch.randn(2, 4, 8, 8, generator=rng)
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(2, 4, 8, 8, generator=rng)
        expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]
        sigma, next_sigma = scheduler.sigmas[index : index + 2]
        step = kernel.step(latents, velocity, sigma, next_sigma, sigma_max=scheduler.sigmas[1])
        latents = step.next_latents
        assert step.log_prob is None
        assert torch.equal(step.std, torch.zeros(2))
    torch.testing.assert_close(latents, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kernel", SDE_KERNELS, ids=repr)
def test_sde_kernel_moves_along_the_score_with_normal_noise(kernel):
    latents, velocity, noise = torch.randn(3, 2, 5, dtype=torch.float64)
    sigma, next_sigma, sigma_max = 0.8, 0.65, 0.95
    coefficient = {
        FlowSDE: lambda: kernel.noise_level * math.sqrt(0.8 / 0.2),
        DanceSDE: lambda: kernel.eta,
        WanLinearSDE: lambda: 0.95 * 0.8,
    }[type(kernel)]()
    score = -(latents + (1 - sigma) * velocity) / sigma
    mean = latents + (velocity - coefficient**2 / 2 * score) * (next_sigma - sigma)
    std = coefficient * math.sqrt(sigma - next_sigma)
    step = kernel.step(latents, velocity, sigma, next_sigma, sigma_max=sigma_max, noise=noise)
    torch.testing.assert_close(step.mean, mean)
    torch.testing.assert_close(step.std, torch.full((2,), std, dtype=torch.float64))
    torch.testing.assert_close(step.next_latents, mean + std * noise)
    density = torch.distributions.Normal(mean, std).log_prob(mean + std * noise)
    torch.testing.assert_close(step.log_prob, density.mean(dim=1))


def test_cps_kernel_keeps_the_coefficients_of_the_schedule():
    data, noise, fresh = torch.randn(3, 2, 5, dtype=torch.float64)
    latents = 0.2 * data + 0.8 * noise
    step = FlowCPS(0.8).step(latents, noise - data, 0.8, 0.65, sigma_max=0.95, noise=fresh)
    std = 0.65 * math.sin(0.4 * math.pi)
    expected = 0.35 * data + math.sqrt(0.65**2 - std**2) * noise + std * fresh
    torch.testing.assert_close(step.next_latents, expected)
    torch.testing.assert_close(step.log_prob, -(std**2) * fresh.square().mean(dim=1))


def final_std(kernel, num_steps, target_std=0.5):
    """Denoise data ~ normal(0, target_std) under its exact velocity and return the std at sigma 0, exactly.

    The velocity is linear in the latents, so every step is affine and two evaluations give its gain.
    """
    sigmas = dance_sigmas(num_steps, shift=1.0).double()
    variance = 1.0
    for sigma, next_sigma in zip(sigmas[:-1], sigmas[1:], strict=True):
        slope = (sigma - (1 - sigma) * target_std**2) / (sigma**2 + (1 - sigma) ** 2 * target_std**2)
        latents = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        step = kernel.step(
            latents, slope * latents, sigma, next_sigma, sigma_max=sigmas[1], noise=torch.zeros_like(latents)
        )
        variance = float((step.mean[1] - step.mean[0]) ** 2 * variance + step.std[0] ** 2)
    return math.sqrt(variance)


@pytest.mark.parametrize("kernel", [*SDE_KERNELS, Euler()], ids=repr)
def test_kernel_reaches_the_data_distribution_as_steps_grow(kernel):
    coarse, fine = (abs(final_std(kernel, num_steps) - 0.5) for num_steps in (800, 1600))
    assert fine < 1e-3
    # Twice the steps halve the error, except for Flow-SDE, which has a pole at sigma 1.
    assert fine < coarse * (0.9 if isinstance(kernel, FlowSDE) else 0.51)


def test_cps_kernel_keeps_its_published_bias():
    assert final_std(FlowCPS(0.8), 1000) == pytest.approx(0.40, abs=5e-3)
    assert final_std(FlowCPS(1.0), 1000) == pytest.approx(0.35, abs=5e-3)


@pytest.mark.parametrize("sigma_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_rows_at_different_timesteps_equal_their_scalar_calls(kernel, sigma_dtype):
    # As many elements as rows: values spread along a wrong axis would fit without an error.
    latents, velocity, noise = torch.randn(3, 3, 3, 3, dtype=torch.float64)
    sigma, next_sigma, sigma_max = (
        torch.tensor(values, dtype=sigma_dtype) for values in ([1.0, 0.6, 0.1], [0.9, 0.2, 0.0], [0.9, 0.95, 0.97])
    )
    together = kernel.step(latents, velocity, sigma, next_sigma, sigma_max=sigma_max, noise=noise)
    for row in range(3):
        rows = slice(row, row + 1)
        alone = kernel.step(
            latents[rows],
            velocity[rows],
            sigma[row].item(),
            next_sigma[row],
            sigma_max=sigma_max[row].item(),
            noise=noise[rows],
        )
        for field in dataclasses.fields(alone):
            one, many = getattr(alone, field.name), getattr(together, field.name)
            assert (one is None) == (many is None)
            if one is not None:
                torch.testing.assert_close(many[rows], one, rtol=1e-12, atol=1e-14)


# sigma, next_sigma and sigma_max.
EDGES = {
    "sigma 1": (1.0, 0.96, 0.96),
    "just below 1": (1 - 6e-8, 0.96, 0.96),
    "0.999999": (0.999999, 0.96, 0.96),
    "last step": (0.00892857, 0.0, 0.96),
    "only step": (1.0, 0.0, 0.0),
}


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        pytest.param(kernel, place, id=f"{kernel}-{name}")
        for kernel in KERNELS
        for name, place in EDGES.items()
        # On a schedule of one step this kernel has no noise, so no density either.
        if (kernel, name) != (WanLinearSDE(), "only step")
    ],
)
def test_values_and_gradients_are_finite_at_the_ends_of_the_schedule(kernel, place):
    latents, velocity, noise = torch.randn(3, 2, 4, 4)
    velocity.requires_grad_()
    sigma, next_sigma, sigma_max = place
    step = kernel.step(latents, velocity, sigma, next_sigma, sigma_max=sigma_max, noise=noise)
    values = [step.next_latents, step.mean, step.std, *([] if step.log_prob is None else [step.log_prob])]
    for value in values:
        assert value.isfinite().all()
    assert step.std.max() < 2
    sum(value.sum() for value in values if value.requires_grad).backward()
    assert velocity.grad.isfinite().all()


def test_first_step_hardly_depends_on_how_close_to_one_the_schedule_starts():
    latents, velocity, noise = torch.randn(3, 2, 4, dtype=torch.float64)
    at_one, below = (
        FlowSDE().step(latents, velocity, sigma, 0.96, sigma_max=0.96, noise=noise) for sigma in (1.0, 0.999999)
    )
    torch.testing.assert_close(below.next_latents, at_one.next_latents, atol=1e-4, rtol=0)
    torch.testing.assert_close(below.log_prob, at_one.log_prob, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernel", STOCHASTIC_KERNELS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scoring_the_sampled_latents_gives_the_sampled_log_prob_exactly(kernel, dtype):
    latents, velocity = torch.randn(2, 3, 7, dtype=dtype)
    place = {"sigma": torch.tensor([1.0, 0.7, 0.3]), "next_sigma": torch.tensor([0.9, 0.4, 0.0])}
    sampled = kernel.step(latents, velocity, **place, sigma_max=0.9)
    scored = kernel.step(latents, velocity, **place, sigma_max=0.9, next_latents=sampled.next_latents)
    assert scored.next_latents is sampled.next_latents
    assert torch.equal(scored.log_prob, sampled.log_prob)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_half_precision_inputs_are_computed_in_float32(kernel, dtype):
    latents, velocity, noise = torch.randn(3, 2, 4, 4, dtype=dtype)
    half = kernel.step(latents, velocity, 0.8, 0.6, sigma_max=0.9, noise=noise)
    full = kernel.step(latents.float(), velocity.float(), 0.8, 0.6, sigma_max=0.9, noise=noise.float())
    for field in dataclasses.fields(full):
        expected = getattr(full, field.name)
        if expected is not None:
            assert expected.dtype == torch.float32
            assert torch.equal(getattr(half, field.name), expected)


@pytest.mark.parametrize("kernel", STOCHASTIC_KERNELS, ids=repr)
def test_log_prob_takes_its_own_sample_as_constant(kernel):
    latents, velocity, noise = torch.randn(3, 2, 4, dtype=torch.float64)
    velocity.requires_grad_()
    arguments = {"sigma": 0.8, "next_sigma": 0.6, "sigma_max": 0.9}
    sampled = kernel.step(latents, velocity, **arguments, noise=noise)
    scored = kernel.step(latents, velocity, **arguments, next_latents=sampled.next_latents.detach())
    (own_gradient,) = torch.autograd.grad(sampled.log_prob.sum(), velocity)
    (expected,) = torch.autograd.grad(scored.log_prob.sum(), velocity)
    torch.testing.assert_close(own_gradient, expected)
    assert own_gradient.abs().min() > 1e-6


def test_rng_fixes_the_draw_and_torchs_global_source_is_the_default():
    latents, velocity = torch.randn(2, 2, 4)
    arguments = {"sigma": 0.8, "next_sigma": 0.6, "sigma_max": 0.9}
    first, again, other = (
        FlowSDE().step(latents, velocity, **arguments, rng=torch.Generator().manual_seed(seed)).next_latents
        for seed in (7, 7, 8)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(7)
    assert torch.equal(first, FlowSDE().step(latents, velocity, **arguments).next_latents)


def test_noiseless_kernel_leaves_the_random_source_alone():
    rng = torch.Generator().manual_seed(0)
    state = rng.get_state()
    FlowSDE(0.0).step(torch.ones(1, 2), torch.ones(1, 2), 0.8, 0.6, sigma_max=0.9, rng=rng)
    assert torch.equal(rng.get_state(), state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise": torch.zeros(2, 4), "next_latents": torch.zeros(2, 4)}, "`noise` .* `next_latents`"),
        ({"velocity": torch.zeros(1, 4)}, r"`velocity` .* \(2, 4\), got \(1, 4\)"),
        ({"noise": torch.zeros(4)}, r"`noise` .* \(2, 4\), got \(4,\)"),
        ({"next_latents": torch.zeros(2, 1)}, r"`next_latents` .* \(2, 4\), got \(2, 1\)"),
    ],
)
def test_step_refuses_tensors_that_do_not_fit(given, message):
    arguments = {"latents": torch.zeros(2, 4), "velocity": torch.zeros(2, 4), "sigma": 0.8, "next_sigma": 0.6}
    with pytest.raises(ValueError, match=message):
        FlowSDE().step(**(arguments | given), sigma_max=0.9)


@pytest.mark.parametrize(
    ("kernel_class", "level", "message"),
    [
        (FlowSDE, -0.1, r"`noise_level` .* \[0, inf\), got -0.1"),
        (FlowSDE, math.nan, "`noise_level` .* got nan"),
        (DanceSDE, math.inf, r"`eta` .* \[0, inf\), got inf"),
        (FlowCPS, 1.01, r"`noise_level` .* \[0, 1\], got 1.01"),
    ],
)
def test_kernel_refuses_a_noise_level_outside_its_range_in_one_line(kernel_class, level, message):
    with pytest.raises(ValueError, match=message) as caught:
        kernel_class(level)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_kernel_is_a_value_that_can_be_compared_hashed_and_sent(kernel):
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy == kernel
    assert hash(copy) == hash(kernel)
    assert [other for other in KERNELS if other == kernel] == [kernel]
    for field in dataclasses.fields(kernel):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kernel, field.name, 0.5)


def test_defaults_are_the_published_settings():
    assert (FlowSDE(), DanceSDE(), FlowCPS()) == (FlowSDE(0.7), DanceSDE(0.3), FlowCPS(0.8))


def test_the_hand_worked_table_is_the_sd3_schedule():
    torch.testing.assert_close(
        flow_match_sigmas(10, shift=3.0, double_shift=True), torch.tensor(SD3_SIGMAS), atol=1e-7, rtol=0
    )
