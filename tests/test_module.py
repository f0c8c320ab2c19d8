"""The base class of the algorithms, without a trainer."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from digenrl import Prompt, PromptBatch
from digenrl.algorithms import FlowGRPO
from digenrl.module import as_prompts
from tests.toy import WORDS, ToyPolicy, level_reward, toy_module


class NetworkReward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def forward(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        scores: Tensor = self.net(media.flatten(1))[:, 0]
        return scores


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "`group_size` must be at least 2, got 1"),
        ({"group_size": 0}, "`group_size` is a count and must be at least 1, got 0"),
        ({"num_steps": 0}, "`num_steps` is a count and must be at least 1, got 0"),
        ({"validation_steps": 0}, "`validation_steps` is a count and must be at least 1, got 0"),
        ({"validation_steps": -3}, "`validation_steps`.*got -3"),
        ({"timestep_fraction": 0.0}, r"`timestep_fraction`.*5 steps.*\[0\.2, 1\], got 0\.0"),
        ({"timestep_fraction": 0.19}, r"`timestep_fraction`.*got 0\.19"),
        ({"timestep_fraction": 1.01}, r"`timestep_fraction`.*got 1\.01"),
        ({"timestep_fraction": math.nan}, "`timestep_fraction`.*got nan"),
        ({"noise_level": 0.0}, r"`noise_level` must be above 0, got 0\.0"),
        ({"noise_level": math.inf}, "`noise_level`.*got inf"),
        ({"clip_range": 0.0}, r"`clip_range`.*\(0, 1\), got 0\.0"),
        ({"clip_range": 1.0}, r"`clip_range`.*got 1\.0"),
        ({"advantage_clip": 0.0}, r"`advantage_clip` must be above 0, got 0\.0"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_module(**settings)


@pytest.mark.parametrize("reward", [None, "pickscore", 1.0])
def test_a_reward_that_cannot_be_called_is_refused(reward: Any) -> None:
    with pytest.raises(ValueError, match="`reward` must be callable"):
        FlowGRPO(ToyPolicy(), reward)


@pytest.mark.parametrize("num_steps", [1, 3, 7, 10, 29, 100])
def test_the_trained_share_is_that_of_exact_arithmetic(num_steps: int) -> None:
    for hundredths in range(1, 101):
        wanted = math.floor(num_steps * Fraction(hundredths, 100))
        if wanted >= 1:
            module = toy_module(num_steps=num_steps, timestep_fraction=hundredths / 100)
            assert module.num_trained_timesteps == wanted
        else:
            with pytest.raises(ValueError, match="`timestep_fraction`"):
                toy_module(num_steps=num_steps, timestep_fraction=hundredths / 100)


def test_validation_takes_the_steps_of_training_unless_told_otherwise() -> None:
    assert toy_module(num_steps=7).validation_steps == 7
    assert toy_module(num_steps=7, validation_steps=20).validation_steps == 20


def test_the_first_timesteps_of_all_samples_are_trained_by_default() -> None:
    prompts = PromptBatch.for_step([Prompt("low", 0)], step=0, group_size=4, seed=0)
    timesteps = toy_module(num_steps=5, timestep_fraction=0.6).select_timesteps(prompts)
    assert timesteps.tolist() == [[0, 1, 2]] * 4


def test_neither_policy_nor_reward_is_a_hyper_parameter() -> None:
    hyper_parameters = dict(toy_module(lr=0.25).hparams)
    assert hyper_parameters["lr"] == 0.25
    assert not {"policy", "reward"} & set(hyper_parameters)


# ---- weights -------------------------------------------------------------------------------------------------


def test_before_it_is_built_a_module_has_no_weights() -> None:
    module = toy_module()
    assert module.state_dict() == {}
    assert list(module.parameters()) == []
    built = toy_module()
    built.configure_model()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(built.state_dict())


def test_the_same_seed_builds_the_same_weights_whatever_the_global_random_state_is() -> None:
    states = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        module = toy_module(seed=seed)
        module.configure_model()
        assert torch.equal(torch.get_rng_state(), before)
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["policy.input.weight"], states[2]["policy.input.weight"])


def test_a_module_is_built_once() -> None:
    module = toy_module()
    module.configure_model()
    with torch.no_grad():
        module.policy.input.weight.fill_(3.0)
    module.configure_model()
    assert (module.policy.input.weight == 3.0).all()


def test_a_rewards_network_is_no_part_of_the_module() -> None:
    reward = NetworkReward()
    module = FlowGRPO(ToyPolicy(), reward, seed=0)
    module.configure_model()
    assert module.reward is reward
    assert {name.split(".")[0] for name in module.state_dict()} == {"policy"}
    assert not {id(parameter) for parameter in reward.parameters()} & {id(p) for p in module.parameters()}
    trained = [parameter for group in module.configure_optimizers().param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in trained} == {id(p) for p in module.parameters() if p.requires_grad}


def test_the_policy_stays_in_evaluation_mode() -> None:
    module = toy_module()
    module.configure_model()
    module.train()
    assert not any(part.training for part in module.policy.modules())


# ---- seed and step -------------------------------------------------------------------------------------------


def test_the_seed_is_the_given_one_then_the_global_one_then_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert toy_module(seed=None).seed == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert toy_module(seed=None).seed == 5
    assert toy_module(seed=7).seed == 7


def checkpoint_of(module: FlowGRPO) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def test_a_module_without_a_seed_takes_over_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    module = toy_module(seed=None)
    module.on_load_checkpoint(checkpoint_of(toy_module(seed=7)))
    assert module.seed == 7
    assert checkpoint_of(module) == checkpoint_of(toy_module(seed=7))


def test_a_seed_that_contradicts_the_checkpoint_is_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match="`seed` is 3, but the checkpoint was made with 7"):
        toy_module(seed=3).on_load_checkpoint(checkpoint_of(toy_module(seed=7)))
    toy_module(seed=7).on_load_checkpoint(checkpoint_of(toy_module(seed=7)))


def test_a_checkpoint_of_something_else_changes_nothing() -> None:
    module = toy_module(seed=3)
    module.on_load_checkpoint({"state_dict": {}})
    assert (module.seed, module.next_step) == (3, 0)


def test_the_noise_of_a_step_depends_on_its_number_and_on_the_seed() -> None:
    module = toy_module(group_size=2)
    batch = [Prompt("low", 0), Prompt("high", 1)]
    first = module.prompt_batch(batch)
    module.next_step = 1
    second = module.prompt_batch(batch)
    assert (first.step, second.step) == (0, 1)
    assert first == PromptBatch.for_step(batch, step=0, group_size=2, seed=0)
    assert not set(first.seeds) & set(second.seeds)


# ---- batches -------------------------------------------------------------------------------------------------


def test_strings_become_prompts_with_numbers_of_their_own() -> None:
    given = [Prompt("low", 40, metadata={"a": 1}), "low", "high"]
    assert as_prompts(given, first_uid=100) == [given[0], Prompt("low", 101), Prompt("high", 102)]
    assert as_prompts(("low",)) == [Prompt("low", 0)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("a cat", "must be a list of prompts, got str"),
        (b"a cat", "must be a list of prompts, got bytes"),
        ({"prompt": ["a cat"]}, "must be a list of prompts, got dict"),
        (torch.zeros(3), "must be a list of prompts, got Tensor"),
        (None, "must be a list of prompts, got NoneType"),
        (["a cat", 3], "got int in row 1"),
        ([["a cat"]], "got list in row 0"),
        ([], "holds no prompts"),
    ],
)
def test_a_batch_that_is_no_list_of_prompts_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_prompts(batch)


def test_deterministic_samples_are_the_same_every_time_and_in_the_shape_of_media() -> None:
    module = toy_module()
    module.configure_model()
    prompts = PromptBatch.for_validation([Prompt(word, uid) for uid, word in enumerate(WORDS)], seed=0)
    media = module.sample(prompts)
    assert media.shape == (4, 1, 2, 4)
    assert not media.requires_grad
    assert 0 <= media.min() <= media.max() <= 1
    assert torch.equal(module.sample(prompts), media)
    torch.testing.assert_close(module.sample(prompts.select([2])), media[2:3])


def test_rollout_and_score_leave_what_training_needs() -> None:
    module = toy_module(group_size=3, num_steps=5, timestep_fraction=0.6)
    module.configure_model()
    prompts = module.prompt_batch(["low", "top"])
    with torch.no_grad():
        trajectory = module.rollout(prompts)
        rewards = module.score(trajectory)
    assert trajectory.latents.shape == (6, 4, 2, 4)
    assert trajectory.timestep_indices == (0, 1, 2)
    assert torch.equal(trajectory.sigmas, module.policy.sigmas(5))
    assert torch.equal(rewards, level_reward(module.policy.decode(trajectory.final_latents), prompts))
    groups = torch.tensor(prompts.group_ids)
    advantages = module.advantages(rewards, groups)
    for group in (0, 1):
        assert advantages[groups == group].mean().abs() < 1e-5


def test_tracked_metrics_are_handed_over_once() -> None:
    module = toy_module()
    module.track("mine", torch.tensor([1.0, 3.0]))
    module.track("mine", torch.tensor([5.0]))
    assert {name: metric.value for name, metric in module.take_metrics().items()} == {"mine": 3.0}
    assert module.take_metrics() == {}
