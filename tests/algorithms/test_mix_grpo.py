"""MixGRPO: where its window is, what is stochastic, and how Flash ends a rollout."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from digenrl.algorithms import MixGRPO
from digenrl.diffusion import RandomWindow, compress_sigmas, sample_dpm_solver, sample_ode
from digenrl.functional import per_reward_advantages, weighted_sum
from digenrl.rewards import SeveralRewards
from digenrl.types import ScoredBatch
from tests.functional.golden import FOLDER
from tests.rewards.test_several import calm
from tests.toy import WORDS, ToyPolicy, level_reward

STORED_WINDOWS = json.loads((FOLDER / "mixgrpo_window_states.json").read_text())

# `num_steps` is one more than the end of the windows: the last step is never trained.
WINDOWS: dict[str, dict[str, Any]] = {
    "progressive_overlap1": {"num_steps": 25, "steps_per_window": 3},
    "progressive_nooverlap": {"num_steps": 16, "stride": 4, "steps_per_window": 2},
    "progressive_noroll": {"num_steps": 16, "stride": 4, "steps_per_window": 2, "roll_back": False},
    "frozen_overlap0": {"num_steps": 25, "stride": 0, "steps_per_window": 3},
    "decay": {"num_steps": 16, "window_strategy": "decay", "steps_per_window": 10, "min_steps_per_window": 1},
    "exp_decay": {
        "num_steps": 25,
        "window_strategy": "exp_decay",
        "steps_per_window": 5,
        "decay_rate": 0.1,
        "decay_threshold": 13,
    },
}


def mix(**settings: Any) -> MixGRPO:
    defaults = {"reward": level_reward, "group_size": 4, "num_steps": 6, "sde_window": 2, "seed": 0}
    module = MixGRPO(ToyPolicy(), **{**defaults, **settings})
    module.configure_model()
    return module


# ---- windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWS)
def test_the_trained_steps_equal_the_published_ones(name: str) -> None:
    module = mix(sde_window=4, **WINDOWS[name])
    expected = STORED_WINDOWS[name]["seq"]
    assert [list(module.recorded_steps(step)) for step in range(len(expected))] == expected


def test_a_random_window_is_drawn_from_the_seed_and_the_step() -> None:
    module = mix(window_strategy="random", seed=5)
    expected = RandomWindow(size=2, stop=5)
    assert [module.recorded_steps(step) for step in range(20)] == [expected.steps(step, seed=5) for step in range(20)]
    assert [mix(window_strategy="random", seed=6).recorded_steps(step) for step in range(20)] != [
        module.recorded_steps(step) for step in range(20)
    ]


@given(
    st.sampled_from(["progressive", "random", "decay", "exp_decay"]), st.integers(2, 12), st.data(), st.integers(0, 999)
)
def test_a_window_has_its_size_and_leaves_out_the_last_step(
    strategy: str, num_steps: int, data: st.DataObject, step: int
) -> None:
    size = data.draw(st.integers(1, num_steps - 1))
    module = MixGRPO(ToyPolicy(), level_reward, num_steps=num_steps, sde_window=size, window_strategy=strategy)
    window = module.recorded_steps(step)
    assert len(window) == size == module.num_trained_timesteps
    assert window.stop <= num_steps - 1


def test_all_steps_of_the_window_are_trained_and_no_other() -> None:
    module = mix(steps_per_window=1)
    for step in range(5):
        module.next_step = step
        timesteps = module.select_timesteps(module.prompt_batch(["low"]))
        assert timesteps.tolist() == [list(module.recorded_steps(step))] * 4


@pytest.mark.parametrize("step", [0, 1, 3])
def test_steps_outside_of_the_window_are_those_of_the_ode(step: int) -> None:
    module = mix(steps_per_window=1)
    module.next_step = step
    prompts = module.prompt_batch(WORDS)
    trajectory, window = module.rollout(prompts), module.recorded_steps(step)
    assert trajectory.timestep_indices == tuple(window)

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        return module.policy(latents, sigma, trajectory.condition)

    before = sample_ode(velocity, module.initial_latents(prompts), trajectory.sigmas[: window.start + 1])
    torch.testing.assert_close(trajectory.latents[:, 0], before, rtol=1e-6, atol=1e-6)
    after = sample_ode(velocity, trajectory.latents[:, -1], trajectory.sigmas[window.stop :])
    torch.testing.assert_close(trajectory.final_latents, after, rtol=1e-6, atol=1e-6)


def test_the_samples_of_a_group_are_equal_until_the_window_and_differ_from_then_on() -> None:
    module = mix(steps_per_window=1)
    module.next_step = 3
    latents = module.rollout(module.prompt_batch(WORDS)).latents.unflatten(0, (4, 4))
    torch.testing.assert_close(latents[:, 1:, 0], latents[:, :1, 0].expand(-1, 3, -1, -1), rtol=1e-5, atol=1e-6)
    assert ((latents[:, 1:, 1] - latents[:, :1, 1]).abs().flatten(2).max(2).values > 1e-2).all()


# ---- Flash ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2, 3])
@pytest.mark.parametrize("tail_ratio", [None, 0.7, 1.0])
def test_flash_solves_what_follows_the_window_on_fewer_steps_down_to_0(step: int, tail_ratio: float | None) -> None:
    module = mix(steps_per_window=1, flash=True, tail_ratio=tail_ratio, tail_shift=1.0)
    module.next_step = step
    calls = []
    module.policy.register_forward_hook(lambda policy, inputs, output: calls.append(inputs[1][0].item()))
    trajectory = module.rollout(module.prompt_batch(WORDS))
    stop = trajectory.timestep_indices[-1] + 1
    tail = compress_sigmas(trajectory.sigmas, start=stop, ratio=tail_ratio or 0.4, shift=1.0)
    assert tail[-1] == 0
    assert calls == [*trajectory.sigmas[:stop].tolist(), *tail[:-1].tolist()]
    assert len(calls) == stop + max(math.floor((7 - stop) * (tail_ratio or 0.4)), 2) - 1
    expected = sample_dpm_solver(
        lambda x, sigma: module.policy(x, sigma, trajectory.condition), trajectory.latents[:, -1], tail
    )
    torch.testing.assert_close(trajectory.final_latents, expected)


def test_flash_changes_nothing_that_is_trained() -> None:
    plain, flash = mix(steps_per_window=1), mix(steps_per_window=1, flash=True)
    ours, theirs = (module.rollout(module.prompt_batch(WORDS)) for module in (flash, plain))
    assert torch.equal(ours.latents, theirs.latents)
    assert torch.equal(ours.old_log_probs, theirs.old_log_probs)
    assert torch.equal(ours.sigmas, theirs.sigmas)
    assert not torch.equal(ours.final_latents, theirs.final_latents)


def test_a_window_that_ends_the_schedule_has_no_tail() -> None:
    settings: dict[str, Any] = {"sde_window_range": (4, 6), "flash": True}
    module = mix(**settings)
    trajectory = module.rollout(module.prompt_batch(WORDS))
    assert torch.equal(trajectory.final_latents, trajectory.latents[:, -1])


# ---- the loss ------------------------------------------------------------------------------------------------


def test_the_loss_is_the_clipped_surrogate_without_a_kl() -> None:
    module = mix(clip_range=0.2)
    prompts = module.prompt_batch(WORDS)
    advantages = torch.linspace(-2, 2, 16)
    scored = ScoredBatch.of_groups(module.rollout(prompts), torch.zeros(16), advantages)
    batch = scored.timestep_batch(module.select_timesteps(prompts))
    batch.old_log_probs.sub_(math.log(1.5))
    expected = torch.maximum(-batch.advantages * 1.5, -batch.advantages * 1.2)
    torch.testing.assert_close(module.timestep_loss(batch), expected, rtol=1e-5, atol=1e-5)


def test_several_rewards_are_one_weighted_advantage() -> None:
    module = mix(reward=SeveralRewards([level_reward, calm], weights=[3, 1]))
    rewards, groups = torch.rand(8, 2), torch.arange(2).repeat_interleave(4)
    expected = weighted_sum(per_reward_advantages(rewards, groups, ddof=1, eps=1e-8), [0.75, 0.25])
    torch.testing.assert_close(module.advantages(rewards, groups), expected)


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_strategy": "sliding"}, "`window_strategy` must be one of progressive, random, decay, exp_decay, got"),
        ({"window_strategy": "random", "stride": 2}, "`stride` belongs to .*progressive or decay or exp_decay, got 2"),
        ({"window_strategy": "random", "steps_per_window": 5}, "`steps_per_window` belongs to .* with random"),
        ({"window_strategy": "random", "roll_back": False}, "`roll_back` belongs to .* got False with random"),
        ({"min_steps_per_window": 2}, "`min_steps_per_window` belongs to `window_strategy` decay, got 2"),
        ({"decay_rate": 0.2}, "`decay_rate` belongs to `window_strategy` exp_decay, got 0.2 with progressive"),
        ({"window_strategy": "decay", "decay_threshold": 3}, "`decay_threshold` belongs to .* exp_decay, got 3"),
        ({"window_strategy": "exp_decay", "decay_rate": -1.0}, "`decay_rate` .* got -1.0"),
        ({"window_strategy": "decay", "min_steps_per_window": 26}, "`min_steps_per_window` .* got 26"),
        ({"stride": -1}, "`stride` .* got -1"),
        ({"steps_per_window": 0}, "`steps_per_window` .* got 0"),
        ({"sde_window": 0}, r"`sde_window` must be in \[1, 24\],.* which is 0 to 24 by default, got 0"),
        ({"sde_window": 25}, r"`sde_window` must be in \[1, 24\],.* which is 0 to 24 by default, got 25"),
        ({"sde_window_range": (20, 26)}, "`sde_window_range` .*25 steps.* got 20 to 26"),
        ({"kernel": "cps", "sde_window_range": (0, 25)}, "`sde_window_range` must leave out the last of the 25 steps"),
        ({"timestep_fraction": 0.5}, "`timestep_fraction` must be left out with MixGRPO, got 0.5"),
        ({"tail_ratio": 0.5}, "`tail_ratio` belongs to MixGRPO-Flash, got 0.5; set `flash`"),
        ({"tail_shift": 1.0}, "`tail_shift` belongs to MixGRPO-Flash, got 1.0"),
        ({"flash": True, "tail_ratio": 0.0}, "`tail_ratio` .* got 0.0"),
        ({"flash": True, "tail_ratio": 1.1}, "`tail_ratio` .* got 1.1"),
        ({"flash": True, "tail_shift": 0.0}, "`tail_shift` .* got 0.0"),
        ({"noise_level": 0.0}, "`noise_level` must be above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixGRPO(ToyPolicy(), level_reward, **settings)
