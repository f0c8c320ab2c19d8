"""What algorithms on the forward process share: noise, timesteps, who makes the samples, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms import ForwardProcessModule
from digenrl.averaging import ConstantDecay
from digenrl.types import TimestepBatch
from tests.algorithms.toy_rows import final_latents_of, move, scored_batch, timestep_batch, toy
from tests.toy import ToyPolicy, level_reward

SMALL: dict[str, Any] = {"num_trained_timesteps": 3}


class Matching(ForwardProcessModule):
    """The distance to the target, weighted by advantages."""

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        return batch.advantages * self.distance(self.policy, self.noised(batch), batch)


class Sampled(Matching):
    """The same, with samples of an average."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.add_sampler("average", ConstantDecay(0.5))


def noise_by_row(module: Any, *, step: int = 0) -> dict[tuple[int, int, int], tuple[float, ...]]:
    """The noise of each row, by group, sample and timestep."""
    batch = timestep_batch(module, step=step)
    noise = module.noised(batch).target + batch.final_latents
    keys = zip(batch.prompts.group_ids, batch.prompts.sample_indices, batch.timestep_index.tolist(), strict=True)
    values = (tuple(row.round(decimals=4).tolist()) for row in noise.flatten(1))
    return dict(zip(keys, values, strict=True))


@pytest.mark.parametrize(("noise_of", "num_draws"), [("group", 2 * 3), ("sample", 2 * 4 * 3)])
def test_noise_is_shared_in_a_group_or_not_and_fresh_at_each_timestep(noise_of: Any, num_draws: int) -> None:
    noise = noise_by_row(toy(Matching, noise_of=noise_of, **SMALL))
    assert len(noise) == 24
    assert len(set(noise.values())) == num_draws
    if noise_of == "group":
        assert len({(group, index, value) for (group, _, index), value in noise.items()}) == 6


@pytest.mark.parametrize("noise_of", ["group", "sample"])
def test_noise_is_fresh_in_each_step(noise_of: Any) -> None:
    module = toy(Matching, noise_of=noise_of, num_trained_timesteps=5)
    first, second = noise_by_row(module, step=0), noise_by_row(module, step=1)
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())
    assert noise_by_row(module, step=0) == first


def test_samples_are_noised_on_the_line_to_the_noise() -> None:
    module = toy(Matching, **SMALL)
    batch = timestep_batch(module)
    rows, sigma = module.noised(batch), batch.sigma[:, None, None]
    torch.testing.assert_close(rows.latents, batch.final_latents + sigma * rows.target)
    assert torch.equal(batch.sigma, module.policy.sigmas(5)[batch.timestep_index])


def test_a_velocity_is_never_of_half_precision() -> None:
    module = toy(Matching, **SMALL)
    batch = timestep_batch(module)
    rows = module.noised(batch)
    for given, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        velocity = module.velocity(lambda x, sigma, condition, dtype=given: x.to(dtype), rows, batch)
        assert velocity.dtype == expected


def test_timesteps_of_a_step_are_shared_by_its_samples_and_change_with_the_step() -> None:
    module = toy(Matching, timesteps_of="step", num_steps=20, num_trained_timesteps=5)
    drawn = []
    for step in range(3):
        timesteps = module.select_timesteps(module.prompt_batch(["low", "top"], step=step))
        assert (timesteps == timesteps[0]).all()
        drawn.append(tuple(timesteps[0].tolist()))
    assert len(set(drawn)) == 3
    assert all(len(set(row)) == 5 for row in drawn)


def test_timesteps_of_samples_are_each_samples_own() -> None:
    module = toy(Matching, timesteps_of="sample", num_steps=20, num_trained_timesteps=5)
    prompts = module.prompt_batch(["low", "top"], step=0)
    timesteps = module.select_timesteps(prompts)
    assert len({tuple(row) for row in timesteps.tolist()}) == 8
    assert torch.equal(module.select_timesteps(prompts.select([5, 2])), timesteps[[5, 2]])


@pytest.mark.parametrize("timesteps_of", ["step", "sample"])
def test_timesteps_are_drawn_within_their_bounds(timesteps_of: Any) -> None:
    bounds = {"first_trained_timestep": 2, "last_trained_timestep": 4, "num_trained_timesteps": 2}
    module = toy(Matching, timesteps_of=timesteps_of, num_steps=8, **bounds)
    drawn = torch.cat([module.select_timesteps(module.prompt_batch(["low"], step=step)) for step in range(30)])
    assert drawn.unique().tolist() == [2, 3, 4]


@pytest.mark.parametrize("solver", ["euler", "dpm"])
def test_a_rollout_keeps_final_latents_only(solver: Any) -> None:
    module = toy(Matching, solver=solver, **SMALL)
    trajectory = scored_batch(module).trajectory
    assert (trajectory.latents, trajectory.old_log_probs, trajectory.timestep_indices) == (None, None, ())
    assert torch.equal(trajectory.final_latents, final_latents_of(module, module.policy))


@pytest.mark.parametrize("updates_per_rollout", [1, 2])
def test_a_sampler_takes_the_place_of_the_copy_for_rounds_of_updates(updates_per_rollout: int) -> None:
    module = toy(Sampled, updates_per_rollout=updates_per_rollout, **SMALL)
    assert list(module.weight_copies) == ["average"]
    sent = {name.split(".")[1] for name in module.published_weights() if name.startswith("weight_copies.")}
    assert sent == {"average"}
    for step in range(4):
        before = final_latents_of(module, module.rollout_policy)
        move(module.policy, seed=step)
        module.update_weight_copies()
        is_end_of_round = (step + 1) % updates_per_rollout == 0
        assert torch.equal(final_latents_of(module, module.rollout_policy), before) is not is_end_of_round


@pytest.mark.parametrize(("updates_per_rollout", "copies"), [(1, []), (3, ["rollout"])])
def test_without_a_sampler_the_policy_or_the_rounds_copy_makes_the_samples(
    updates_per_rollout: int, copies: list[str]
) -> None:
    module = toy(Matching, updates_per_rollout=updates_per_rollout, **SMALL)
    assert list(module.weight_copies) == copies
    assert module.rollout_policy is (module.policy_copy("rollout") if copies else module.policy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "heun"}, "`solver` must be euler or dpm, got 'heun'"),
        ({"timesteps_of": "group"}, "`timesteps_of` must be step or sample, got 'group'"),
        ({"noise_of": "step"}, "`noise_of` must be group or sample, got 'step'"),
        ({"last_trained_timestep": 5}, r"`last_trained_timestep` .* in \[0, 4\], got 5"),
        ({"first_trained_timestep": 3, "last_trained_timestep": 2}, r"`first_trained_timestep` .* \[0, 2\], got 3"),
        ({"first_trained_timestep": -1}, r"`first_trained_timestep` .* \[0, 4\], got -1"),
        ({"first_trained_timestep": 3}, r"`num_trained_timesteps` are drawn from steps 3 to 4 .* \[1, 2\], got 4"),
        ({"num_trained_timesteps": 0}, r"`num_trained_timesteps` .* \[1, 5\], got 0"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Matching(ToyPolicy(), level_reward, **{"group_size": 4, "num_steps": 5, **settings})
