"""Noise that belongs to a sample, and samplers whose log-probs are those that training recomputes."""

from __future__ import annotations

import random

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from digenrl import Prompt, PromptBatch, ScoredBatch
from digenrl.diffusion import DanceSDE, Euler, FlowCPS, FlowSDE, Kernel, WanLinearSDE, flow_match_sigmas
from digenrl.diffusion.noise import sample_noise
from digenrl.diffusion.sampling import sample_ode, sample_sde
from tests.toy import WORDS, toy_module

STOCHASTIC = [FlowSDE(0.7), DanceSDE(0.3), WanLinearSDE(), FlowCPS(0.8)]
SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8, unique=True)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def elementwise_velocity(latents: Tensor, sigma: Tensor) -> Tensor:
    """A field whose value in a row depends on that row alone, bit for bit."""
    return latents * sigma.view(-1, *[1] * (latents.dim() - 1)) - 0.5 * latents


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
    path = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=seeds, num_recorded=5)
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
    scored = ScoredBatch(trajectory, torch.zeros(12), torch.zeros(12))
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
    whole = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=seeds, num_recorded=3)
    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        part = sample_sde(
            elementwise_velocity, latents[start:stop], sigmas, kernel, seeds=seeds[start:stop], num_recorded=3
        )
        assert torch.equal(part.final_latents, whole.final_latents[start:stop])
        assert torch.equal(part.latents, whole.latents[start:stop])


def test_each_step_adds_the_noise_of_its_own_stream() -> None:
    sigmas, seeds, kernel = flow_match_sigmas(4), [1, 2, 3], DanceSDE(0.3)
    start = sample_noise(seeds, "initial", (5,))
    path = sample_sde(elementwise_velocity, start, sigmas, kernel, seeds=seeds, num_recorded=4)
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
    path = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=[1, 2], num_recorded=num_recorded)
    whole = sample_sde(elementwise_velocity, latents, sigmas, kernel, seeds=[1, 2], num_recorded=5)
    assert path.latents.shape == (2, num_recorded + 1, 4)
    assert torch.equal(path.latents[:, 0], latents)
    assert torch.equal(path.latents, whole.latents[:, : num_recorded + 1])
    assert torch.equal(whole.latents[:, -1], whole.final_latents)
    assert torch.equal(path.final_latents, whole.final_latents)
    assert path.log_probs is not None
    assert path.log_probs.shape == (2, num_recorded)


def test_a_deterministic_kernel_leaves_no_log_probs_and_the_samples_of_the_ode() -> None:
    sigmas, latents = flow_match_sigmas(5, shift=2.0), sample_noise([1, 2], "initial", (4,))
    path = sample_sde(elementwise_velocity, latents, sigmas, Euler(), seeds=[1, 2], num_recorded=2)
    assert path.log_probs is None
    expected = sample_ode(elementwise_velocity, latents, sigmas)
    torch.testing.assert_close(path.final_latents, expected, rtol=1e-6, atol=1e-6)


def test_the_policy_sees_the_very_sigmas_of_the_schedule() -> None:
    sigmas, seen = flow_match_sigmas(4, shift=3.0), []

    def spy(latents: Tensor, sigma: Tensor) -> Tensor:
        seen.append(sigma)
        return latents.bfloat16()

    sample_sde(spy, torch.zeros(2, 3), sigmas, FlowSDE(0.7), seeds=[1, 2], num_recorded=1)
    sample_ode(spy, torch.zeros(2, 3), sigmas)
    assert torch.equal(torch.stack(seen), torch.cat([sigmas[:-1], sigmas[:-1]])[:, None].expand(-1, 2))
    assert {sigma.dtype for sigma in seen} == {torch.float32}


def test_latents_stay_in_float32_whatever_the_policy_computes_in() -> None:
    def half(latents: Tensor, sigma: Tensor) -> Tensor:
        return elementwise_velocity(latents, sigma).bfloat16()

    latents = sample_noise([1], "initial", (4,)).bfloat16()
    path = sample_sde(half, latents, flow_match_sigmas(3), FlowSDE(0.7), seeds=[1], num_recorded=2)
    assert path.log_probs is not None
    tensors = [path.latents, path.final_latents, path.log_probs, sample_ode(half, latents, flow_match_sigmas(3))]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


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
