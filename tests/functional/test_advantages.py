"""Advantages, compared with published implementations and with numbers worked out by hand."""

import json
import math

import numpy as np
import pytest
import torch

from digenrl.functional import (
    batch_std,
    clipped_surrogate,
    exceeds_advantage_clip,
    group_advantages,
    per_reward_advantages,
    weighted_sum,
    zero_std_groups,
)
from tests.functional.golden import FOLDER

ADVANTAGES = json.loads((FOLDER / "advantages.json").read_text())

FLOW = {"ddof": 0, "eps": 1e-4}
DANCE = {"ddof": 1, "eps": 1e-8}
VERL = {"ddof": 1, "eps": 1e-4}


def ids_of(prompts):
    return [sorted(set(prompts)).index(prompt) for prompt in prompts]


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_advantages_equal_flowgrpos(scope):
    name = {"group": "groupstd", "batch": "globalstd"}[scope]
    one, columns = ADVANTAGES[f"flowgrpo_grpo_{name}_1d"], ADVANTAGES[f"flowgrpo_grpo_{name}_2d"]
    ids = ids_of(one["inputs"]["prompts"])
    rewards = torch.tensor(one["inputs"]["rewards"], dtype=torch.float64)
    actual = group_advantages(rewards, ids, scope=scope, **FLOW)
    assert np.abs(actual.numpy() - one["outputs"]["advantages"]).max() <= 1e-12
    rewards = torch.tensor(columns["inputs"]["rewards"], dtype=torch.float64)
    for column, expected in zip(rewards.T, np.array(columns["outputs"]["advantages"]).T, strict=True):
        actual = group_advantages(column, ids, scope=scope, **FLOW)
        assert np.abs(actual.numpy() - expected).max() <= 1e-12


def test_advantages_of_two_steps_do_not_mix():
    case = ADVANTAGES["flowgrpo_clear_between_epochs"]
    for step in "12":
        rewards = torch.tensor(case["inputs"][f"rewards{step}"], dtype=torch.float64)
        actual = group_advantages(rewards, ids_of(case["inputs"][f"prompts{step}"]), **FLOW)
        assert np.abs(actual.numpy() - case["outputs"][f"adv{step}"]).max() <= 1e-12


def test_advantages_equal_dancegrpos():
    case = ADVANTAGES["dancegrpo_group4"]
    actual = group_advantages(torch.tensor(case["inputs"]["rewards"]), np.arange(12) // 4, **DANCE)
    assert np.abs(actual.numpy() - case["outputs"]["advantages"]).max() <= 2e-5
    case = ADVANTAGES["dancegrpo_global"]
    actual = group_advantages(torch.tensor(case["inputs"]["gathered"]), [0] * 12, **DANCE)[:4]
    assert np.abs(actual.numpy() - case["outputs"]["advantages"]).max() <= 2e-5


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scope", ["group", "batch"])
def test_advantages_equal_verl_omnis(scope, normalize):
    case = ADVANTAGES[f"verl_omni_adv_T1_global{scope == 'batch'}_norm{normalize}"]
    actual = group_advantages(
        torch.tensor(case["inputs"]["rewards"]),
        ids_of(case["inputs"]["prompts"]),
        scope=scope,
        normalize_by_std=normalize,
        **VERL,
    )
    assert np.abs(actual.numpy() - np.ravel(case["outputs"]["advantages"])).max() <= 2e-5


def test_weighted_advantages_equal_mixgrpos():
    case = ADVANTAGES["mixgrpo_advantage_aggr"]
    weights = case["inputs"]["weights"]
    rewards = torch.tensor([case["inputs"]["rewards"][name] for name in weights]).T
    advantages = per_reward_advantages(rewards, torch.arange(16) // 8, **DANCE)
    for scale in (1.0, 7.0):
        actual = weighted_sum(advantages, [scale * weight for weight in weights.values()])
        assert np.abs(actual.numpy() - case["outputs"]["advantages"]).max() <= 2e-5


def test_advantages_of_a_weighted_reward_equal_mixgrpos():
    case = ADVANTAGES["mixgrpo_reward_aggr"]
    rewards = torch.tensor(case["inputs"]["rewards"])
    summed = weighted_sum(torch.stack([rewards - 1.0, rewards + 3.0], dim=1), [3.0, 1.0])
    torch.testing.assert_close(summed, rewards)
    actual = group_advantages(summed, torch.arange(16) // 8, **DANCE)
    assert np.abs(actual.numpy() - case["outputs"]["advantages"]).max() <= 2e-5


def test_scale_of_a_reward_does_not_count_in_per_reward_advantages():
    rewards, ids = torch.randn(12, 2, dtype=torch.float64), torch.arange(12) // 4
    options = {"scope": "batch", "ddof": 1, "eps": 0.0}
    actual = per_reward_advantages(rewards * torch.tensor([1.0, 1000.0]), ids, **options)
    torch.testing.assert_close(actual, per_reward_advantages(rewards, ids, **options))
    columns = [group_advantages(column, ids, **options) for column in rewards.T]
    torch.testing.assert_close(actual, torch.stack(columns, dim=1))


def test_constant_reward_has_no_per_reward_advantage():
    rewards = torch.tensor([[0.7, 1.0], [0.7, 2.0]])
    assert per_reward_advantages(rewards, [0, 0], eps=0.0).tolist() == [[0.0, -1.0], [0.0, 1.0]]
    centered = per_reward_advantages(rewards, [0, 0], normalize_by_std=False)
    assert centered.tolist() == [[0.0, -0.5], [0.0, 0.5]]


def test_weighted_sum_keeps_the_type_of_its_values():
    for given, returned in ((torch.float32,) * 2, (torch.float64,) * 2, (torch.int64, torch.float32)):
        assert weighted_sum(torch.ones(2, 3, dtype=given), [1, 2, 3]).dtype == returned


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"`weights` must have one entry per column .* got shape \(1,\) for values of shape \(4, 2\)"),
        ([2.0, -1.0], r"`weights` must be finite, not negative and not all 0, got \[2.0, -1.0\]"),
        ([0.0, 0.0], "`weights` .* not all 0"),
        ([1.0, math.inf], "`weights` must be finite"),
        ([1.0, math.nan], "`weights` must be finite"),
    ],
)
def test_weights_that_cannot_be_scaled_to_one_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(torch.zeros(4, 2), weights)


def test_one_column_is_asked_for_each_reward():
    with pytest.raises(ValueError, match=r"`rewards` must be \[B, R\].* got shape \(4,\)"):
        per_reward_advantages(torch.zeros(4), [0, 0, 1, 1])
    with pytest.raises(ValueError, match="`weights` must have one entry per column"):
        weighted_sum(torch.zeros(4), [1.0])


@pytest.mark.parametrize(
    ("options", "magnitude"),
    [
        (VERL | {"scope": "group"}, 0.70705678),
        (VERL | {"scope": "batch"}, 0.77453667),
        (FLOW | {"scope": "group"}, 0.99990001),
        (FLOW | {"scope": "batch"}, 0.89434720),
        (DANCE | {"scope": "group"}, 0.70710678),
        (VERL | {"normalize_by_std": False}, 1.0),
    ],
)
def test_advantages_equal_numbers_worked_out_by_hand(options, magnitude):
    actual = group_advantages(torch.tensor([1.0, 3.0, 0.0, 2.0]), [0, 0, 1, 1], **options)
    assert actual.tolist() == pytest.approx([-magnitude, magnitude, -magnitude, magnitude], abs=2e-6)


def test_default_options_are_flowgrpos_with_the_std_of_the_group():
    rewards, ids = torch.randn(12), torch.arange(12) // 4
    assert torch.equal(group_advantages(rewards, ids), group_advantages(rewards, ids, scope="group", **FLOW))


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_advantages_do_not_depend_on_the_order_or_the_values_of_the_ids(scope):
    rewards, ids = torch.randn(24, dtype=torch.float64), torch.arange(24) // 6
    expected = group_advantages(rewards, ids, scope=scope)
    order = torch.randperm(24)
    names = torch.tensor([10**12, -5, 0, 7])
    actual = group_advantages(rewards[order], names[ids][order], scope=scope)
    torch.testing.assert_close(actual, expected[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("options", [FLOW, DANCE, {"ddof": 0, "eps": 0.0}, {"ddof": 1, "eps": 0.0}])
@pytest.mark.parametrize("reward", [0.7, 0.1, 1e30, -3.0])
def test_group_of_equal_rewards_gets_exactly_zero(reward, options, scope):
    rewards = torch.tensor([reward] * 12 + [0.25, 0.5] + [9.0])
    ids = [0] * 12 + [1, 1] + [2]
    actual = group_advantages(rewards, ids, scope=scope, **options)
    assert actual[:12].tolist() == [0.0] * 12
    assert actual[14] == 0.0
    assert actual[12] < 0 < actual[13]


def test_batch_of_one_sample_gets_zero():
    assert group_advantages(torch.tensor([2.0]), [3], scope="batch", ddof=1, eps=0.0).tolist() == [0.0]


def test_large_common_offset_does_not_cost_precision():
    rewards = torch.tensor([4096.0, 4096.5, 4097.0, 4098.5])
    torch.testing.assert_close(
        group_advantages(rewards, [0] * 4), group_advantages(rewards - 4096.0, [0] * 4), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_advantages_of_float32_rewards_are_computed_in_float64(scope):
    rewards, ids = 100 + torch.randn(64), torch.arange(64) // 8
    expected = group_advantages(rewards.double(), ids, scope=scope).float()
    assert torch.equal(group_advantages(rewards, ids, scope=scope), expected)
    assert batch_std(rewards) == batch_std(rewards.double())


@pytest.mark.parametrize("group_size", [2, 8, 24])
def test_group_advantage_is_bounded_by_the_group_size(group_size):
    rewards = torch.zeros(group_size, dtype=torch.float64)
    rewards[0] = 1e6
    ids = [0] * group_size
    population, sample = (group_advantages(rewards, ids, ddof=ddof, eps=0.0)[0].item() for ddof in (0, 1))
    assert population == pytest.approx(math.sqrt(group_size - 1))
    assert sample == pytest.approx((group_size - 1) / math.sqrt(group_size))


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
    ids=str,
)
def test_advantages_have_the_type_of_the_rewards(given, returned):
    assert group_advantages(torch.tensor([1, 2, 3], dtype=given), [0, 0, 0]).dtype == returned


@pytest.mark.parametrize("function", [group_advantages, zero_std_groups])
def test_reward_that_is_not_finite_is_refused_by_its_index(function):
    rewards = torch.tensor([1.0, math.nan, 2.0, math.inf])
    with pytest.raises(ValueError, match=r"`rewards` must be finite, got \[nan, inf\] at indices \[1, 3\]"):
        function(rewards, [0, 0, 1, 1])


@pytest.mark.parametrize("function", [group_advantages, zero_std_groups])
def test_lengths_that_differ_are_refused(function):
    with pytest.raises(ValueError, match=r"`group_ids` .* got shape \(3,\) for 4 rewards"):
        function(torch.zeros(4), [0, 0, 1])
    with pytest.raises(ValueError, match=r"`rewards` .* got shape \(4, 1\)"):
        function(torch.zeros(4, 1), [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"scope": "prompt"}, "`scope` .* got 'prompt'"),
        ({"ddof": 2}, "`ddof` .* got 2"),
        ({"eps": -1e-4}, "`eps` .* got -0.0001"),
        ({"eps": math.nan}, "`eps` .* got nan"),
    ],
)
def test_advantage_option_outside_its_range_is_refused(option, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.zeros(2), [0, 0], **option)


def test_zero_std_groups_counts_groups_of_equal_rewards():
    rewards = torch.tensor([0.7, 1.0, 0.7, 2.0, 5.0, 0.7, 3.0, 3.0])
    assert zero_std_groups(rewards, [4, 1, 4, 1, 9, 4, 2, 2]) == 3
    assert zero_std_groups(rewards, [0] * 8) == 0


def streamed_and_whole_gradients(rewards, ids, *, ddof, eps):
    """Gradients by log-probs: accumulated group by group and scaled at the end, and of the batch at once."""
    log_ratio = 0.3 * torch.randn(len(rewards), dtype=torch.float64)
    whole, streamed = log_ratio.clone().requires_grad_(), log_ratio.clone().requires_grad_()
    old, options = torch.zeros_like(log_ratio), {"clip_range": 0.2}
    advantages = group_advantages(rewards, ids, scope="batch", ddof=ddof, eps=eps)
    clipped_surrogate(whole, old, advantages, **options).sum().backward()
    for group in ids.unique():
        centered = group_advantages(rewards[ids == group], [0] * int((ids == group).sum()), normalize_by_std=False)
        rows = streamed[ids == group]
        clipped_surrogate(rows, old[ids == group], centered, advantage_clip=math.inf, **options).sum().backward()
    return streamed.grad / (batch_std(rewards, ddof=ddof) + eps), whole.grad


@pytest.mark.parametrize("ddof", [0, 1])
def test_gradient_streamed_without_the_batch_std_equals_that_of_the_batch(ddof):
    rewards, ids = torch.randn(24, dtype=torch.float64), torch.arange(24) // 6
    rewards[:6] = 0.7  # equal rewards count in the std
    streamed, whole = streamed_and_whole_gradients(rewards, ids, ddof=ddof, eps=1e-4)
    torch.testing.assert_close(streamed, whole)
    assert whole.abs().max() > 0.1


def test_streamed_gradient_differs_where_an_advantage_exceeds_the_clip():
    rewards, ids = torch.zeros(64, dtype=torch.float64), torch.arange(64) // 32
    rewards[0] = 1.0
    centered = group_advantages(rewards, ids, normalize_by_std=False)
    assert exceeds_advantage_clip(centered, batch_std(rewards))
    streamed, whole = streamed_and_whole_gradients(rewards, ids, ddof=0, eps=1e-4)
    assert (streamed - whole)[0].abs() > 0.1 * whole[0].abs()


def test_batch_std_is_that_of_all_rewards():
    rewards = torch.tensor([1.0, 3.0, 0.0, 2.0])
    assert batch_std(rewards) == pytest.approx(math.sqrt(5 / 4))
    assert batch_std(rewards, ddof=1) == pytest.approx(math.sqrt(5 / 3))
    assert batch_std(torch.tensor([2.0]), ddof=1) == 0.0
    assert batch_std(rewards + 4096) == batch_std(rewards)
    with pytest.raises(ValueError, match="`ddof` .* got 2"):
        batch_std(rewards, ddof=2)


def test_advantage_exceeds_the_clip_beyond_its_multiple_of_the_std():
    centered = torch.tensor([0.0, -2.5, 1.0], dtype=torch.float64)
    assert not exceeds_advantage_clip(centered, 0.5, eps=0.0)
    assert exceeds_advantage_clip(centered, 0.499, eps=0.0)
    assert not exceeds_advantage_clip(centered, 0.499, eps=0.001)
    assert exceeds_advantage_clip(centered, 0.5, eps=0.0, advantage_clip=4.9)
    with pytest.raises(ValueError, match="`eps` .* got -1"):
        exceeds_advantage_clip(centered, 0.5, eps=-1)
    with pytest.raises(ValueError, match="`advantage_clip` .* got 0"):
        exceeds_advantage_clip(centered, 0.5, advantage_clip=0)
