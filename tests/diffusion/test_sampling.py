"""Noise that belongs to a sample, and samplers whose log-probs are those that training recomputes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from digenrl import Prompt, PromptBatch, ScoredBatch
from digenrl.diffusion import (
    DanceSDE,
    Euler,
    FlowCPS,
    FlowSDE,
    Kernel,
    WanLinearSDE,
    classifier_free_guidance,
    compress_sigmas,
    dance_sigmas,
    dpm_sigmas,
    flow_match_sigmas,
    sample_dpm_solver,
    sample_noise,
    sample_ode,
    sample_sde,
    sampling,
)
from tests.toy import WORDS, toy_module

GOLDEN = Path(__file__).parents[1] / "golden"
STOCHASTIC = [FlowSDE(0.7), DanceSDE(0.3), WanLinearSDE(), FlowCPS(0.8)]
SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8, unique=True)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def elementwise_velocity(latents: Tensor, sigma: Tensor) -> Tensor:
    """A field whose value in a row depends on that row alone, bit for bit."""
    return latents * sigma.view(-1, *[1] * (latents.dim() - 1)) - 0.5 * latents


def half_velocity(latents: Tensor, sigma: Tensor) -> Tensor:
    return elementwise_velocity(latents, sigma).bfloat16()


# ---- noise ---------------------------------------------------------------------------------------------------


@given(SEEDS, SHAPES, st.randoms(use_true_random=False))
def test_a_samples_noise_is_the_same_in_any_batch_and_order(
    seeds: list[int], shape: list[int], rng: random.Random
) -> None:
    whole = sample_noise(seeds, "initial", shape)
    assert whole.shape == (len(seeds), *shape)
    shuffled = rng.sample(seeds, len(seeds))
    cut = rng.randint(1, len(seeds))
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    again = torch.cat([sample_noise(part, "initial", shape) for part in parts])
    for row, seed in enumerate(seeds):
        assert torch.equal(again[shuffled.index(seed)], whole[row])


def test_streams_and_samples_have_noise_of_their_own() -> None:
    draws = [sample_noise([1, 2], stream, (50,)) for stream in ("initial", "step 0", "step 1")]
    assert len({tuple(row.tolist()) for draw in draws for row in draw}) == 6
    correlations = torch.corrcoef(torch.cat([sample_noise(range(20), s, (4000,)) for s in ("step 0", "step 1")]))
    assert (correlations - torch.eye(40)).abs().max() < 0.08  # five standard deviations of 1 / sqrt(4000)


def test_noise_is_standard_normal_and_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    noise = sample_noise(range(100), "initial", (1000,))
    assert torch.equal(torch.get_rng_state(), before)
    assert noise.dtype == torch.float32
    assert abs(noise.mean().item()) < 0.016  # five standard errors
    assert noise.var().item() == pytest.approx(1, abs=0.023)
    assert noise.pow(4).mean().item() == pytest.approx(3, abs=0.16)


# ---- stochastic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", STOCHASTIC, ids=lambda kernel: type(kernel).__name__)
def test_log_probs_that_are_computed_again_equal_those_of_the_rollout_exactly(kernel: Kernel) -> None:
    sigmas = flow_match_sigmas(6, shift=3.0)
    seeds = [7, 8, 9]
    latents = sample_noise(seeds, "initial", (2, 3))
    path = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=seeds, recorded=range(5))
    assert path.log_probs is not None
    for step in range(5):
        sigma = sigmas[step].expand(3)
        again = kernel.step(
            path.latents[:, step],
            elementwise_velocity(path.latents[:, step], sigma),
            sigma,
            sigmas[step + 1].expand(3),
            sigma_max=sigmas[1].expand(3),
            next_latents=path.latents[:, step + 1],
        )
        assert torch.equal(again.log_prob, path.log_probs[:, step])


def test_a_modules_log_probs_equal_the_recorded_ones_exactly_in_the_batch_of_the_rollout() -> None:
    module = toy_module(group_size=3)
    module.configure_model()
    prompts = PromptBatch.for_step([Prompt(word, uid) for uid, word in enumerate(WORDS)], step=0, group_size=3, seed=0)
    trajectory = module.rollout(prompts)
    scored = ScoredBatch.of_groups(trajectory, torch.zeros(12), torch.zeros(12))
    timesteps = module.select_timesteps(prompts)
    for column in timesteps.split(1, dim=1):
        batch = scored.timestep_batch(column)
        assert torch.equal(module.log_probs(batch).detach(), batch.old_log_probs)
    together = scored.timestep_batch(timesteps)
    assert together.old_log_probs is not None
    assert (module.log_probs(together).exp() / together.old_log_probs.exp() - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("kernel", STOCHASTIC, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("borders", [(0, 4), (0, 1, 4), (0, 1, 2, 3, 4)])
def test_samples_do_not_depend_on_how_they_are_batched(kernel: Kernel, borders: tuple[int, ...]) -> None:
    sigmas, seeds = flow_match_sigmas(5), [3, 1, 4, 15]
    latents = sample_noise(seeds, "initial", (8,))
    whole = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=seeds, recorded=range(3))
    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        part = sample_sde(
            elementwise_velocity, latents[start:stop], sigmas, kernel, seeds=seeds[start:stop], recorded=range(3)
        )
        assert torch.equal(part.final_latents, whole.final_latents[start:stop])
        assert torch.equal(part.latents, whole.latents[start:stop])


@pytest.mark.parametrize("scored_velocity", [None, half_velocity])
def test_each_recorded_step_is_scored_once_and_no_other_is(scored_velocity: Callable[..., Tensor] | None) -> None:
    scored: list[float] = []

    class Counting(DanceSDE):
        def _log_prob(self, residual: Tensor, std: Tensor) -> Tensor:
            scored.append(float(std[0]))
            return super()._log_prob(residual, std)

    sigmas, seeds = flow_match_sigmas(5), [1, 2, 3]
    sample_sde(
        elementwise_velocity,
        sample_noise(seeds, "initial", (5,)),
        sigmas,
        Counting(0.3),
        seeds=seeds,
        recorded=range(1, 3),
        scored_velocity=scored_velocity,
    )
    assert scored == pytest.approx([0.3 * float(sigmas[index] - sigmas[index + 1]) ** 0.5 for index in (1, 2)])


def test_each_step_adds_the_noise_of_its_own_stream() -> None:
    sigmas, seeds, kernel = flow_match_sigmas(4), [1, 2, 3], DanceSDE(0.3)
    start = sample_noise(seeds, "initial", (5,))
    path = sample_sde(elementwise_velocity, start, sigmas, kernel, seeds=seeds, recorded=range(4))
    for index in range(4):
        before, sigma = path.latents[:, index], sigmas[index].expand(3)
        noise = sample_noise(seeds, f"step {index}", (5,))
        step = kernel.step(
            before, elementwise_velocity(before, sigma), sigma, sigmas[index + 1], sigma_max=sigmas[1], noise=noise
        )
        assert torch.equal(path.latents[:, index + 1], step.next_latents)


@pytest.mark.parametrize("num_recorded", [1, 3, 5])
def test_the_first_steps_are_recorded_with_what_comes_before_and_after_them(num_recorded: int) -> None:
    sigmas, latents = flow_match_sigmas(5), sample_noise([1, 2], "initial", (4,))
    kernel = FlowSDE(0.7)
    path = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=[1, 2], recorded=range(num_recorded))
    whole = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=[1, 2], recorded=range(5))
    assert path.latents.shape == (2, num_recorded + 1, 4)
    assert torch.equal(path.latents[:, 0], latents)
    assert torch.equal(path.latents, whole.latents[:, : num_recorded + 1])
    assert torch.equal(whole.latents[:, -1], whole.final_latents)
    assert torch.equal(path.final_latents, whole.final_latents)
    assert path.log_probs is not None
    assert path.log_probs.shape == (2, num_recorded)


def test_a_deterministic_kernel_leaves_no_log_probs_and_the_samples_of_the_ode() -> None:
    sigmas, latents = flow_match_sigmas(5, shift=2.0), sample_noise([1, 2], "initial", (4,))
    path = sample_sde(elementwise_velocity, latents, sigmas, Euler(), seeds=[1, 2], recorded=range(2))
    assert path.log_probs is None
    expected = sample_ode(elementwise_velocity, latents, sigmas)
    torch.testing.assert_close(path.final_latents, expected, rtol=1e-6, atol=1e-6)


def test_the_policy_sees_the_very_sigmas_of_the_schedule_and_float32_latents() -> None:
    sigmas, seen, dtypes = flow_match_sigmas(4, shift=3.0), [], set()
    start = torch.zeros(2, 3, dtype=torch.bfloat16)

    def spy(latents: Tensor, sigma: Tensor) -> Tensor:
        seen.append(sigma)
        dtypes.update([latents.dtype, sigma.dtype])
        return latents.bfloat16()

    sample_sde(spy, start, sigmas, FlowSDE(0.7), seeds=[1, 2], recorded=range(1))
    sample_ode(spy, start, sigmas)
    sample_dpm_solver(spy, start, sigmas)
    assert torch.equal(torch.stack(seen), sigmas[:-1].repeat(3)[:, None].expand(-1, 2))
    assert dtypes == {torch.float32}


def test_latents_stay_in_float32_whatever_the_policy_computes_in() -> None:
    sigmas = flow_match_sigmas(3)
    latents = sample_noise([1], "initial", (4,)).bfloat16()
    path = sample_sde(half_velocity, latents, sigmas, FlowSDE(0.7), seeds=[1], recorded=range(2))
    assert path.log_probs is not None
    tensors = [
        path.latents,
        path.final_latents,
        path.log_probs,
        sample_ode(half_velocity, latents, sigmas),
    ]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


# ---- published rollouts --------------------------------------------------------------------------------------

# Of each stored rollout: kernel, guidance scale and the recorded steps. All other steps are Euler steps.
ROLLOUTS = {
    "full_sde_cfg4.5_N10": (FlowSDE(0.7), 4.5, range(10)),
    "full_sde_nocfg_N10": (FlowSDE(0.7), 1.0, range(10)),
    "eval_ode_N10": (FlowSDE(0.0), 4.5, range(10)),
    "fast_sde_w2": (FlowSDE(0.7), 1.0, range(2, 4)),
    "fast_cps_w3": (FlowCPS(0.8), 1.0, range(1, 4)),
    "fast_cps_w3_b": (FlowCPS(0.8), 4.5, range(2, 5)),
    "fast_nowindow_sde": (FlowSDE(0.7), 1.0, range(9)),
    "fast_nowindow_cps": (FlowCPS(0.8), 1.0, range(5)),
}


def stored_noise(draws: Tensor) -> Callable[..., Tensor]:
    """Give draws [T, B, ...] in place of the samples' own."""
    return lambda seeds, stream, shape: draws[int(stream.removeprefix("step "))]


def assert_close(actual: Tensor | None, expected: np.ndarray, bound: float) -> None:
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=bound, atol=bound)


@pytest.mark.parametrize("case", ROLLOUTS)
def test_a_rollout_equals_flow_grpos(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = np.load(GOLDEN / "flowgrpo_rollout.npz")
    kernel, guidance, window = ROLLOUTS[case]
    start, noise, sigmas = (torch.from_numpy(golden[key]) for key in ("z0", f"{case}.noise", f"{case}.sigmas"))
    embeddings = [
        torch.from_numpy(golden[key]).mean(dim=(1, 2)).view(-1, 1, 1, 1)
        for key in ("prompt_embeds", "negative_prompt_embeds")
    ]

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        branches = (torch.tanh(1.1 * latents + 0.6 * sigma.view(-1, 1, 1, 1) + e) for e in embeddings)
        return classifier_free_guidance(*branches, guidance)

    monkeypatch.setattr(sampling, "sample_noise", stored_noise(noise))
    path = sample_sde(velocity, start, sigmas, kernel, seeds=[0, 1], recorded=window, sde_steps=window, keep_means=True)
    assert_close(path.latents, golden[f"{case}.all_latents"], 2e-5)
    assert_close(path.final_latents, golden[f"{case}.final"], 2e-5)
    if f"{case}.means" in golden:
        assert_close(path.means, golden[f"{case}.means"], 2e-5)
    if kernel.is_deterministic:
        assert path.log_probs is None
    else:
        assert_close(path.log_probs, golden[f"{case}.log_probs"], 5e-4)


def test_a_rollout_with_its_last_prediction_equals_dancegrpos(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = np.load(GOLDEN / "dancegrpo_train_flux.npz")
    weight, bias, noise = (torch.from_numpy(golden[key]) for key in ("W", "b", "noise"))

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        time = ((1000 * sigma).trunc() / 1000).view(-1, 1, 1)
        return torch.tanh(latents @ weight + bias * time + 0.1 * float(golden["enc"].mean()))

    monkeypatch.setattr(sampling, "sample_noise", stored_noise(noise.transpose(0, 1)))
    path = sample_sde(
        velocity,
        torch.from_numpy(golden["z0"]).expand(4, -1, -1),
        torch.from_numpy(golden["sigmas"]),
        DanceSDE(0.3),
        seeds=range(4),
        recorded=range(6),
        final="prediction",
    )
    assert_close(path.latents, golden["all_latents"], 2e-5)
    assert_close(path.log_probs, golden["log_probs"], 5e-4)
    assert_close(path.final_latents, golden["decoded_latents"], 2e-5)


# ---- windows -------------------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 8))
def test_noise_is_added_in_the_window_only(data: st.DataObject, num_steps: int) -> None:
    first, last = sorted(data.draw(st.tuples(st.integers(0, num_steps - 1), st.integers(0, num_steps - 1))))
    window, seeds, sigmas = range(first, last + 1), [1, 2], flow_match_sigmas(num_steps, shift=2.0)
    start = sample_noise(seeds, "initial", (3,))
    path = sample_sde(
        elementwise_velocity, start, sigmas, DanceSDE(0.3), seeds=seeds, recorded=window, sde_steps=window
    )
    before = sample_ode(elementwise_velocity, start, sigmas[: first + 1])
    torch.testing.assert_close(path.latents[:, 0], before, rtol=1e-6, atol=1e-6)
    after = sample_ode(elementwise_velocity, path.latents[:, -1], sigmas[last + 1 :])
    torch.testing.assert_close(path.final_latents, after, rtol=1e-6, atol=1e-6)
    assert ((path.latents[:, 1:] - path.latents[:, :-1]) != 0).all()
    assert path.log_probs is not None
    assert path.log_probs.shape == (2, len(window))


def test_recorded_steps_are_a_stretch_of_the_whole_path() -> None:
    sigmas, start, kernel = flow_match_sigmas(6), sample_noise([1, 2], "initial", (4,)), FlowSDE(0.7)
    whole, part = (
        sample_sde(elementwise_velocity, start, sigmas, kernel, seeds=[1, 2], recorded=steps, keep_means=True)
        for steps in (range(6), range(2, 5))
    )
    assert torch.equal(part.latents, whole.latents[:, 2:6])
    assert torch.equal(part.log_probs, whole.log_probs[:, 2:5])
    assert torch.equal(part.means, whole.means[:, 2:5])
    assert torch.equal(part.final_latents, whole.final_latents)


def test_means_are_what_the_recorded_noise_was_added_to() -> None:
    sigmas, seeds, kernel = flow_match_sigmas(4), [1, 2], DanceSDE(0.3)
    start = sample_noise(seeds, "initial", (5,))
    path = sample_sde(elementwise_velocity, start, sigmas, kernel, seeds=seeds, recorded=range(1, 4), keep_means=True)
    for column, index in enumerate(range(1, 4)):
        noise = sample_noise(seeds, f"step {index}", (5,))
        expected = path.latents[:, column + 1] - 0.3 * (sigmas[index] - sigmas[index + 1]).sqrt() * noise
        torch.testing.assert_close(path.means[:, column], expected)
    assert sample_sde(elementwise_velocity, start, sigmas, kernel, seeds=seeds, recorded=range(1)).means is None


@pytest.mark.parametrize("kernel", [*STOCHASTIC, Euler()], ids=lambda kernel: type(kernel).__name__)
def test_the_prediction_is_the_last_step_without_its_noise(kernel: Kernel) -> None:
    sigmas, seeds = flow_match_sigmas(4, shift=2.0), [1, 2, 3]
    start = sample_noise(seeds, "initial", (5,))
    drawn, predicted = (
        sample_sde(half_velocity, start, sigmas, kernel, seeds=seeds, recorded=range(4), final=final)
        for final in ("latents", "prediction")
    )
    expected = sample_ode(half_velocity, drawn.latents[:, 3], sigmas[3:])
    torch.testing.assert_close(predicted.final_latents, expected)
    assert torch.equal(predicted.latents, drawn.latents)
    assert torch.equal(drawn.final_latents, drawn.latents[:, 4])


@pytest.mark.parametrize("final", ["latents", "prediction"])
def test_what_follows_the_window_is_solved_on_the_tails_schedule(final: str) -> None:
    sigmas, seeds, window = dance_sigmas(12, shift=3.0), [1, 2], range(2, 5)
    start, tail = sample_noise(seeds, "initial", (4,)), compress_sigmas(sigmas, start=5, ratio=0.5, shift=3.0)
    num_calls = []

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        num_calls.append(1)
        return elementwise_velocity(latents, sigma)

    path = sample_sde(
        velocity,
        start,
        sigmas,
        FlowSDE(0.7),
        seeds=seeds,
        recorded=window,
        sde_steps=window,
        tail_sigmas=tail,
        final=final,
    )
    assert len(num_calls) == 5 + 3
    assert torch.equal(path.final_latents, sample_dpm_solver(elementwise_velocity, path.latents[:, -1], tail))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recorded": range(6)}, r"`recorded` .* got range\(0, 6\)"),
        ({"recorded": range(0)}, r"`recorded` .* got range\(0, 0\)"),
        ({"recorded": range(-1, 2)}, r"`recorded` .* got range\(-1, 2\)"),
        ({"recorded": range(0, 4, 2)}, r"`recorded` .* consecutive .* got range\(0, 4, 2\)"),
        ({"recorded": range(1), "sde_steps": range(-1, 2)}, r"`sde_steps` .* got range\(-1, 2\)"),
        ({"recorded": range(1, 3), "sde_steps": range(3, 6)}, r"`sde_steps` .* got range\(3, 6\)"),
        ({"recorded": range(1, 3), "sde_steps": range(3, 3)}, r"`sde_steps` .* got range\(3, 3\)"),
        ({"recorded": range(1, 3), "sde_steps": range(2, 4)}, r"`recorded` .* log-probs .* got range\(1, 3\)"),
        ({"recorded": range(3, 5), "sde_steps": range(2, 4)}, r"`recorded` .* log-probs .* got range\(3, 5\)"),
        ({"recorded": range(1), "final": "x0"}, "`final` .* got 'x0'"),
        ({"tail_sigmas": [0.5, 0.0]}, "`tail_sigmas` .* 0.6, to 0, got"),
        ({"tail_sigmas": [0.6, 0.1]}, "`tail_sigmas` .* 0.6, to 0, got"),
        ({"tail_sigmas": [0.6, 0.6, 0.0]}, "`tail_sigmas` .* fall .* got"),
        ({"tail_sigmas": [0.0], "sde_steps": range(5)}, "`tail_sigmas` .* got"),
    ],
)
def test_steps_that_do_not_fit_the_schedule_are_refused_in_one_line(settings: dict, message: str) -> None:
    if "tail_sigmas" in settings:
        settings = {"recorded": range(1), "sde_steps": range(2), **settings}
        settings["tail_sigmas"] = torch.tensor(settings["tail_sigmas"])
    with pytest.raises(ValueError, match=message) as caught:
        sample_sde(elementwise_velocity, torch.zeros(1, 2), flow_match_sigmas(5), FlowSDE(0.7), seeds=[1], **settings)
    assert "\n" not in str(caught.value)


def test_a_deterministic_kernel_records_any_step_but_those_of_the_tail() -> None:
    sigmas, start = dance_sigmas(5, shift=1.0), sample_noise([1], "initial", (4,))
    tail = compress_sigmas(sigmas, start=2, ratio=1.0, shift=1.0)
    request = {"seeds": [1], "sde_steps": range(1, 2), "tail_sigmas": tail}
    path = sample_sde(elementwise_velocity, start, sigmas, Euler(), recorded=range(2), **request)
    assert path.log_probs is None
    assert path.latents.shape == (1, 3, 4)
    with pytest.raises(ValueError, match=r"`recorded` .* in range\(0, 2\), got range\(0, 3\)"):
        sample_sde(elementwise_velocity, start, sigmas, Euler(), recorded=range(3), **request)


# ---- deterministic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 4, 28])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_ode_sampler_equals_the_loop_over_diffusers_scheduler(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist())
    start = sample_noise([1, 2, 3], "initial", (4, 4))
    latents = start
    for index, timestep in enumerate(scheduler.timesteps):
        sigma = scheduler.sigmas[index].expand(3)
        latents = scheduler.step(elementwise_velocity(latents, sigma), timestep, latents, return_dict=False)[0]
    assert torch.equal(sample_ode(elementwise_velocity, start, scheduler.sigmas), latents)
    torch.testing.assert_close(scheduler.sigmas, flow_match_sigmas(num_steps, shift=shift))


def test_the_ode_sampler_solves_a_linear_field_exactly() -> None:
    """With data at one point the velocity is (latents - data) / sigma, and any number of steps ends at the data."""
    data = torch.tensor([[1.0, -2.0, 0.5]])
    latents = sample_noise([5, 6], "initial", (3,))
    final = sample_ode(lambda x, sigma: (x - data) / sigma[:, None], latents, flow_match_sigmas(7, shift=2.0))
    torch.testing.assert_close(final, data.expand(2, -1), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers")
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 20])
@pytest.mark.parametrize("make", [dance_sigmas, dpm_sigmas, flow_match_sigmas], ids=lambda make: make.__name__)
def test_the_dpm_solver_equals_the_loop_over_diffusers_scheduler(num_steps: int, make: Callable[..., Tensor]) -> None:
    sigmas = make(num_steps, shift=3.0)
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas = sigmas
    start = sample_noise([1, 2, 3], "initial", (4, 4))
    latents = start
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = bent_velocity(latents, sigmas[index].expand(3))
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    torch.testing.assert_close(sample_dpm_solver(bent_velocity, start, sigmas), latents, rtol=1e-5, atol=1e-5)


def bent_velocity(latents: Tensor, sigma: Tensor) -> Tensor:
    """A field along which no step of any solver is exact."""
    return torch.tanh(1.1 * latents + 0.6 * sigma.view(-1, *[1] * (latents.dim() - 1)))


@pytest.mark.parametrize(("sampler", "order"), [(sample_dpm_solver, 2), (sample_ode, 1)])
def test_a_samplers_error_falls_with_its_order(sampler: Callable[..., Tensor], order: int) -> None:
    """Normal data have the velocity below, and every path keeps its distance from the mean in deviations.

    Between sigma 0.9 and 0.1: at 1 and 0, where the log-SNR has poles, the solver takes steps of first order.
    """
    mean, deviation = 0.7, 0.5

    def variance(sigma: Tensor) -> Tensor:
        return (1 - sigma) ** 2 * deviation**2 + sigma**2

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        sigma = sigma[:, None]
        return (sigma - (1 - sigma) * deviation**2) / variance(sigma) * (x - (1 - sigma) * mean) - mean

    def error(num_steps: int) -> Tensor:
        sigmas = torch.linspace(0.9, 0.1, num_steps + 1)
        start, exact = ((1 - s) * mean + variance(s).sqrt() * distance for s in (sigmas[0], sigmas[-1]))
        return (sampler(velocity, start, sigmas) - exact).abs().max()

    distance = torch.linspace(-2, 2, 9)[:, None]
    errors = torch.stack([error(num_steps) for num_steps in (16, 32, 64, 128)])
    torch.testing.assert_close((errors[:-1] / errors[1:]).log2(), torch.full((3,), float(order)), atol=0.2, rtol=0)
