"""DanceGRPO against one published iteration, and its samples, timesteps and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from digenrl import Condition, DiffusionPolicy, PromptBatch
from digenrl.algorithms import DanceGRPO, FlowGRPO, MixGRPO
from digenrl.diffusion import sampling
from digenrl.module import DiffusionRLModule
from digenrl.rewards import SeveralRewards
from digenrl.types import RowsT, ScoredBatch, TimestepBatch
from tests.functional.golden import assert_gradient, load
from tests.integration.toy_runs import fit
from tests.rewards.test_several import calm
from tests.toy import WORDS, ToyPolicy, level_reward

SEVERAL = SeveralRewards([level_reward, calm], weights=[1.0, 0.5])


def dance(**settings: Any) -> DanceGRPO:
    defaults = {"group_size": 4, "num_steps": 6, "seed": 0, "reward": level_reward}
    module = DanceGRPO(ToyPolicy(), **{**defaults, **settings})
    module.configure_model()
    return module


def scored_rollout(module: DiffusionRLModule, words: Sequence[str] = WORDS) -> ScoredBatch:
    prompts = module.prompt_batch(words)
    trajectory = module.rollout(prompts)
    rewards = module.score(trajectory)
    return ScoredBatch.of_groups(trajectory, rewards, module.advantages(rewards, torch.tensor(prompts.group_ids)))


def in_double(rows: TimestepBatch) -> TimestepBatch:
    """Give all numbers in float64."""

    def cast(value: RowsT) -> dict[str, Tensor]:
        tensors = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return {
            name: tensor.double()
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and tensor.is_floating_point()
        }

    return replace(rows, **cast(rows), condition=replace(rows.condition, **cast(rows.condition)))


# ---- a published iteration -----------------------------------------------------------------------------------


class IterationPolicy(DiffusionPolicy):
    """The toy of the stored iteration."""

    latent_shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.golden = load("dancegrpo_train_flux")

    def build(self) -> None:
        self.weight, self.bias = (nn.Parameter(torch.from_numpy(self.golden[key])) for key in ("W", "b"))

    def encode(self, prompts: Sequence[str]) -> Condition:
        return Condition()

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        time = (1000 * sigma.float()).trunc().to(latents.dtype).view(-1, 1, 1) / 1000
        return torch.tanh(latents @ self.weight + self.bias * time + 0.1 * float(self.golden["enc"].mean()))

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def sigmas(self, num_steps: int) -> Tensor:
        return torch.from_numpy(self.golden["sigmas"])

    def initial_latents(self, seeds: Sequence[int]) -> Tensor:
        assert len(set(seeds)) == 1, "a group has one noise"
        return torch.from_numpy(self.golden["z0"]).expand(len(seeds), -1, -1)


def stored_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.from_numpy(load("dancegrpo_train_flux")["rewards"])


@pytest.fixture
def iteration(monkeypatch: pytest.MonkeyPatch) -> DanceGRPO:
    module = DanceGRPO(IterationPolicy(), stored_reward, group_size=4, num_steps=6, seed=0)
    module.configure_model()
    golden = module.policy.golden
    noise = torch.from_numpy(golden["noise"]).transpose(0, 1)
    monkeypatch.setattr(sampling, "sample_noise", lambda seeds, stream, shape: noise[int(stream.split()[1])])
    permutations = iter(torch.from_numpy(golden["perms"]))
    monkeypatch.setattr("digenrl.diffusion.windows._permutation", lambda seed, num: next(permutations))
    return module


def test_rollout_and_trained_timesteps_equal_the_published_ones(iteration: DanceGRPO) -> None:
    golden = iteration.policy.golden
    trajectory = iteration.rollout(iteration.prompt_batch(["a prompt"]))
    assert trajectory.timestep_indices == (0, 1, 2, 3, 4)
    for actual, expected, bound in (
        (trajectory.latents, golden["all_latents"][:, :6], 2e-5),
        (trajectory.final_latents, golden["decoded_latents"], 2e-5),
        (trajectory.old_log_probs, golden["log_probs"][:, :5], 5e-4),
    ):
        torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=bound, atol=bound)
    assert iteration.select_timesteps(trajectory.prompts).tolist() == golden["perms"][:, :3].tolist()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-6), (torch.float32, 2e-4)], ids=["float64", "float32"])
def test_two_updates_of_two_samples_equal_the_published_ones(
    iteration: DanceGRPO, dtype: torch.dtype, bound: float
) -> None:
    golden, policy = iteration.policy.golden, iteration.policy
    scored = scored_rollout(iteration, ["a prompt"])
    timesteps = iteration.select_timesteps(scored.trajectory.prompts)
    policy.to(dtype)
    optimizer, total = torch.optim.SGD(policy.parameters(), lr=0.3), 0.0
    for update in range(2):
        part = slice(2 * update, 2 * update + 2)
        batch = scored.select(part).timestep_batch(timesteps[part])
        loss = iteration.timestep_loss(in_double(batch) if dtype == torch.float64 else batch).sum() / 6
        loss.backward()
        total += loss.item()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        assert_gradient(policy.weight.grad, golden[f"opt{update}.grad_W"], bound)
        assert_gradient(policy.bias.grad, golden[f"opt{update}.grad_b"], bound)
        optimizer.step()
        optimizer.zero_grad()
    assert total == pytest.approx(golden["total_loss"].item(), abs=bound)
    assert_gradient(policy.weight.detach(), golden["W_final"], bound)
    assert_gradient(policy.bias.detach(), golden["b_final"], bound)


# ---- noise ---------------------------------------------------------------------------------------------------


SHARING: list[tuple[type[DiffusionRLModule], dict[str, Any]]] = [
    (DanceGRPO, {}),
    (MixGRPO, {"sde_window": 2}),
    (FlowGRPO, {"init_same_noise": True}),
]


@pytest.mark.parametrize(("cls", "settings"), SHARING, ids=lambda value: getattr(value, "__name__", ""))
def test_the_samples_of_a_group_start_from_the_same_noise_whatever_slice_they_are_in(
    cls: type[DiffusionRLModule], settings: dict[str, Any]
) -> None:
    module = cls(ToyPolicy(), level_reward, group_size=4, num_steps=6, seed=0, **settings)
    prompts = module.prompt_batch(["low", "low", "high"])
    noise = module.initial_latents(prompts)
    groups = noise.unflatten(0, (3, 4))
    assert torch.equal(groups, groups[:, :1].expand_as(groups))
    assert len({tuple(group[0].flatten().tolist()) for group in groups}) == 3
    for rows in (slice(1, 6), [11, 2, 7], [5]):
        assert torch.equal(module.initial_latents(prompts.select(rows)), noise[rows])


@pytest.mark.parametrize(("cls", "settings"), SHARING, ids=lambda value: getattr(value, "__name__", ""))
def test_the_noise_of_a_group_is_another_in_each_step_and_run(
    cls: type[DiffusionRLModule], settings: dict[str, Any]
) -> None:
    noises = []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        module = cls(ToyPolicy(), level_reward, group_size=4, num_steps=6, seed=seed, **settings)
        module.next_step = step
        noises.append(module.initial_latents(module.prompt_batch(["low"]))[0])
    assert not any(torch.equal(noises[one], noises[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_each_sample_has_noise_of_its_own_if_the_group_shares_none() -> None:
    module = dance(init_same_noise=False)
    prompts = module.prompt_batch(["low"])
    assert torch.equal(module.initial_latents(prompts), module.policy.initial_latents(prompts.seeds))


def test_samples_that_start_alike_come_apart_step_by_step() -> None:
    latents = dance().rollout(dance().prompt_batch(["low"])).latents
    distances = (latents[1:] - latents[:1]).flatten(2).norm(dim=2)
    assert (distances[:, 0] == 0).all()
    assert (distances[:, 1:] > 0.1).all()


# ---- timesteps -----------------------------------------------------------------------------------------------


@given(st.integers(2, 20), st.integers(1, 100))
def test_the_trained_share_is_of_the_steps_before_the_last(num_steps: int, hundredths: int) -> None:
    settings: dict[str, Any] = {"num_steps": num_steps, "timestep_fraction": hundredths / 100}
    wanted = (num_steps - 1) * hundredths // 100
    if wanted < 1:
        with pytest.raises(ValueError, match="`timestep_fraction`"):
            DanceGRPO(ToyPolicy(), level_reward, **settings)
        return
    module = DanceGRPO(ToyPolicy(), level_reward, **settings)
    timesteps = module.select_timesteps(module.prompt_batch(["low", "high"]))
    assert timesteps.shape == (24, wanted)
    assert timesteps.max() <= num_steps - 2
    assert all(len(set(row)) == wanted for row in timesteps.tolist())


def test_timesteps_are_a_samples_own_whatever_slice_it_is_in() -> None:
    module = dance()
    prompts = module.prompt_batch(WORDS)
    timesteps = module.select_timesteps(prompts)
    assert len({tuple(row) for row in timesteps.tolist()}) > 4
    assert torch.equal(module.select_timesteps(prompts.select([9, 2])), timesteps[[9, 2]])


def test_without_random_timesteps_the_noisiest_are_trained_and_recorded() -> None:
    module = dance(random_timesteps=False)
    assert module.select_timesteps(module.prompt_batch(["low"])).tolist() == [[0, 1, 2]] * 4
    assert module.recorded_steps(0) == range(3)
    assert dance().recorded_steps(0) == range(5)


# ---- several rewards -----------------------------------------------------------------------------------------


def test_each_reward_has_advantages_of_its_own() -> None:
    rewards, groups = torch.tensor([[1.0, 40.0], [3.0, 10.0], [5.0, 10.0], [5.0, 10.0]]), torch.tensor([0, 0, 1, 1])
    advantages = dance(group_size=2, reward=SEVERAL).advantages(rewards, groups)
    root = 2**-0.5
    torch.testing.assert_close(advantages, torch.tensor([[-root, root], [root, -root], [0, 0], [0, 0]]))
    clipped = dance(group_size=2, reward=SEVERAL, advantage_clip=0.5).advantages(rewards, groups)
    torch.testing.assert_close(clipped, advantages.clamp(-0.5, 0.5))


def test_the_loss_of_several_rewards_is_the_weighted_sum_of_their_clipped_surrogates() -> None:
    module = dance(reward=SEVERAL, clip_range=0.2)
    scored = scored_rollout(module)
    assert scored.advantages.shape == (16, 2)
    batch = scored.timestep_batch(module.select_timesteps(scored.trajectory.prompts))
    ratio = 1.5
    batch = replace(
        batch,
        old_log_probs=batch.old_log_probs - torch.tensor(ratio).log(),
        advantages=torch.tensor([1.0, -1.0]).expand(len(batch), 2),
    )
    # The first is clipped and the second is not; their sum, 1/3, would be clipped as a whole.
    expected = torch.full((len(batch),), 2 / 3 * -1.2 + 1 / 3 * 1.5)
    torch.testing.assert_close(module.timestep_loss(batch), expected, rtol=1e-5, atol=1e-5)


def test_one_reward_is_the_plain_clipped_surrogate() -> None:
    module = dance(clip_range=0.2)
    scored = scored_rollout(module)
    batch = scored.timestep_batch(module.select_timesteps(scored.trajectory.prompts))
    batch.old_log_probs.sub_(torch.tensor(0.7).log())
    expected = torch.maximum(-batch.advantages * 0.7, -batch.advantages * 0.8)
    torch.testing.assert_close(module.timestep_loss(batch), expected, rtol=1e-5, atol=1e-5)


# ---- best of n -----------------------------------------------------------------------------------------------


def chosen(module: DanceGRPO, rewards: Tensor, group_ids: list[int]) -> list[int] | None:
    groups = torch.tensor(group_ids)
    found = module.select_samples(rewards, module.advantages(rewards, groups), groups)
    return None if found is None else list(found)


def test_the_worst_and_the_best_of_each_group_are_trained() -> None:
    rewards = torch.tensor([3.0, 1.0, 4.0, 1.5, 5.0, 10.0, 90.0, 20.0, 60.0, 50.0])
    groups = [0] * 5 + [1] * 5
    assert chosen(dance(group_size=5, best_of_n=2), rewards, groups) == [1, 4, 5, 6]
    assert chosen(dance(group_size=5, best_of_n=3), rewards, groups) == [1, 2, 4, 5, 6, 8]
    assert chosen(dance(group_size=5, best_of_n=5), rewards, groups) == list(range(10))
    assert chosen(dance(group_size=5), rewards, groups) is None


def test_of_equal_samples_the_first_counts_as_the_worse() -> None:
    rewards = torch.tensor([2.0, 1.0, 1.0, 2.0, 2.0])
    assert chosen(dance(group_size=5, best_of_n=2), rewards, [7] * 5) == [1, 4]
    assert chosen(dance(group_size=5, best_of_n=4), rewards, [7] * 5) == [1, 2, 3, 4]


def test_a_group_without_order_keeps_as_many_samples_with_advantage_0() -> None:
    module = dance(best_of_n=3)
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 3.0, 2.0, 1.0]), [4] * 4 + [2] * 4
    kept = chosen(module, rewards, groups)
    assert kept == [0, 2, 3, 4, 5, 6]
    assert module.advantages(rewards, torch.tensor(groups))[[0, 2, 3]].tolist() == [0, 0, 0]


def test_of_several_rewards_the_weighted_sum_of_advantages_decides() -> None:
    rewards = torch.tensor([[9.0, 1.0], [0.0, 2.0], [5.0, 9.0], [5.0, 0.0]])
    for weights, expected in (([4.0, 1.0], [0, 1]), ([1.0, 4.0], [2, 3])):
        reward = SeveralRewards([level_reward, calm], weights=weights)
        assert chosen(dance(reward=reward, best_of_n=2), rewards, [0] * 4) == expected


@given(st.integers(2, 6), st.data())
def test_exactly_n_samples_of_every_group_are_kept(group_size: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(2, group_size))
    rewards = data.draw(st.lists(st.integers(0, 3), min_size=3 * group_size, max_size=3 * group_size))
    module = DanceGRPO(ToyPolicy(), level_reward, group_size=group_size, best_of_n=n)
    groups = [0, 1, 2] * group_size
    kept = chosen(module, torch.tensor(rewards).float(), groups)
    assert kept == sorted(set(kept))
    assert module.num_trained_samples == n
    assert [sum(groups[row] == group for row in kept) for group in range(3)] == [n] * 3


def test_losses_are_divided_by_the_rows_that_are_trained() -> None:
    module = dance(best_of_n=2)
    assert module.num_rows(module.prompt_batch(WORDS)) == 4 * 2 * 3


def constant_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.ones(len(prompts))


def test_equal_rewards_everywhere_leave_the_weights_alone() -> None:
    before = dance().state_dict()
    _, _, after = fit("auto", module=dance(reward=constant_reward, best_of_n=2, weight_decay=0.0, lr=1e-2))
    assert all(torch.equal(after[name], before[name]) for name in before)


# ---- exactness, settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"best_of_n": 2}, {"reward": SEVERAL}, {"reward": SEVERAL, "best_of_n": 3}])
def test_at_the_published_noise_the_gradient_is_exact_in_any_batching(settings: dict[str, Any]) -> None:
    module = dance(**settings)
    scored = module.trained_samples(scored_rollout(module))
    timesteps = module.select_timesteps(scored.trajectory.prompts)
    module.double()

    def gradient(size: int) -> Tensor:
        module.zero_grad()
        for start in range(0, len(scored.trajectory), size):
            part = slice(start, start + size)
            module.timestep_loss(in_double(scored.select(part).timestep_batch(timesteps[part]))).sum().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])

    whole = gradient(16)
    assert whole.abs().max() > 1e-3
    for size in (1, 3):
        assert (gradient(size) - whole).abs().max() <= 1e-12 * whole.abs().max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 1}, "`num_steps` must be at least 2, got 1: the last step is not trained"),
        ({"timestep_fraction": 0.06}, r"`timestep_fraction` .* \[0.0625, 1\], got 0.06"),
        ({"timestep_fraction": 0.065}, r"`timestep_fraction` .*15 steps before the last .*\[0.0666667, 1\], got 0.065"),
        ({"noise_level": 0.0}, "`noise_level` must be above 0, got 0.0"),
        ({"noise_level": -1.0}, "`noise_level` must be above 0, got -1.0"),
        ({"clip_range": 1.0}, "`clip_range` .* got 1.0"),
        ({"best_of_n": 13}, r"`best_of_n` .* must be in \[2, 12\], the `group_size`, got 13"),
        ({"best_of_n": 1}, "`best_of_n` .* got 1"),
        ({"best_of_n": 0}, "`best_of_n` .* got 0"),
    ],
)
def test_settings_outside_their_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DanceGRPO(ToyPolicy(), level_reward, **settings)
