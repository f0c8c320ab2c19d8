"""Advantages and losses, compared with published implementations and with numbers worked out by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from digenrl.diffusion import FlowCPS, FlowSDE
from digenrl.functional import (
    append_dims,
    clipped_surrogate,
    group_advantages,
    kl_to_reference,
    mean_square,
    zero_std_groups,
)

GOLDEN = Path(__file__).parent / "golden"
ADVANTAGES = json.loads((GOLDEN / "advantages.json").read_text())

FLOW = {"ddof": 0, "eps": 1e-4}
DANCE = {"ddof": 1, "eps": 1e-8}
VERL = {"ddof": 1, "eps": 1e-4}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def ids_of(prompts):
    return [sorted(set(prompts)).index(prompt) for prompt in prompts]


def test_append_dims_adds_trailing_axes():
    assert append_dims(torch.arange(3), 4).shape == (3, 1, 1, 1)
    assert append_dims(torch.zeros(2, 3), 2).shape == (2, 3)
    with pytest.raises(ValueError, match="`ndim` .* 2 axes .* got 1"):
        append_dims(torch.zeros(2, 3), 1)


def test_mean_square_averages_each_row():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 2.0]]])
    assert mean_square(x).tolist() == [7.5, 1.0]


def test_mean_square_of_half_precision_is_float32():
    x = torch.full((1, 4096), 1.0 + 2**-7, dtype=torch.bfloat16)
    assert mean_square(x).dtype == torch.float32
    assert mean_square(x).item() == pytest.approx((1.0 + 2**-7) ** 2, rel=1e-6)
    assert mean_square(x.double()).dtype == torch.float64


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
    ids = torch.arange(16) // 8
    case = ADVANTAGES["mixgrpo_advantage_aggr"]
    actual = sum(
        weight * group_advantages(torch.tensor(case["inputs"]["rewards"][name]), ids, **DANCE)
        for name, weight in case["inputs"]["weights"].items()
    )
    assert np.abs(actual.numpy() - case["outputs"]["advantages"]).max() <= 2e-5
    case = ADVANTAGES["mixgrpo_reward_aggr"]
    actual = group_advantages(torch.tensor(case["inputs"]["rewards"]), ids, **DANCE)
    assert np.abs(actual.numpy() - case["outputs"]["advantages"]).max() <= 2e-5


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


def test_clipped_surrogate_equals_numbers_worked_out_by_hand():
    log_ratio = torch.tensor([5e-5, 3e-4, -3e-4, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.5, 10.0], dtype=torch.float64)
    old = torch.tensor([-3.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    loss = clipped_surrogate(old + log_ratio, old, advantages, clip_range=1e-4)
    expected = [-math.exp(5e-5), -2 * (1 + 1e-4), 1.5 * (1 - 1e-4), -5.0]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert loss.mean().item() == pytest.approx(-1.6251, abs=2e-6)
    unclamped = clipped_surrogate(old + log_ratio, old, advantages, clip_range=1e-4, advantage_clip=math.inf)
    assert unclamped[3].item() == -10.0


def test_clipping_stops_only_gradients_that_would_move_the_ratio_further_out():
    old = torch.zeros(6, dtype=torch.float64)
    log_probs = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    clipped_surrogate(log_probs, old, advantages, clip_range=0.2).sum().backward()
    expected = [0.0, -2 * math.exp(-0.3), 2 * math.exp(0.3), 0.0, -2.0, 2.0]
    assert log_probs.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_range": 0.0}, "`clip_range` .* got 0.0"),
        ({"clip_range": 1.0}, "`clip_range` .* got 1.0"),
        ({"clip_range": 0.1, "advantage_clip": 0.0}, "`advantage_clip` .* got 0.0"),
    ],
)
def test_surrogate_option_outside_its_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(torch.zeros(1), torch.zeros(1), torch.zeros(1), **options)


def test_kl_equals_numbers_worked_out_by_hand():
    # mean_el(drift^2) is 0.04 in both rows: 0.04 / (2 * 0.5^2) and 0.04 / (2 * 1^2).
    mean = torch.tensor([[0.2, 0.2], [1.2, 1.2]], dtype=torch.float64)
    reference = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    coefficient, dt = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0.25, 0.04]).double()
    std = coefficient * dt.sqrt()
    code = kl_to_reference(mean, reference, std, dt=dt, form="code")
    assert code.tolist() == pytest.approx([0.08, 0.02])
    assert code.mean().item() == pytest.approx(0.05)
    paper = kl_to_reference(mean, reference, std, dt=dt, form="paper")
    assert paper.tolist() == pytest.approx([0.08 / 0.25, 0.02 / 0.04])
    assert torch.equal(kl_to_reference(mean, reference, std, dt=dt), code)
    with pytest.raises(ValueError, match="`form` .* got 'exact'"):
        kl_to_reference(mean, reference, std, dt=dt, form="exact")


def test_paper_kl_is_the_divergence_of_the_two_steps():
    latents, velocity, reference_velocity = torch.randn(3, 2, 5, dtype=torch.float64)
    sigma, next_sigma = torch.tensor([0.8, 0.5]).double(), torch.tensor([0.6, 0.1]).double()
    step, reference = (
        FlowSDE(0.7).step(latents, v, sigma, next_sigma, sigma_max=0.9) for v in (velocity, reference_velocity)
    )
    dt = sigma - next_sigma
    kl = kl_to_reference(step.mean, reference.mean, step.std, dt=dt, form="paper")
    normals = [torch.distributions.Normal(s.mean, append_dims(s.std, 2)) for s in (step, reference)]
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(*normals).mean(dim=1))
    # The closed form in velocities.
    coefficient = step.std / dt.sqrt()
    factor = dt / 2 * (coefficient * (1 - sigma) / (2 * sigma) + 1 / coefficient) ** 2
    torch.testing.assert_close(kl, factor * mean_square(velocity - reference_velocity))


# Of each stored loss: kernel, step, clip range, weight of the KL, shape of a row.
LOSSES = {
    "sd3_step0_kl": (FlowSDE(0.7), 0, 1e-4, 0.04, (3, 4, 4)),
    "sd3_step1_kl": (FlowSDE(0.7), 1, 1e-4, 0.04, (3, 4, 4)),
    "sd3_step5_nokl": (FlowSDE(0.7), 5, 1e-4, 0.0, (3, 4, 4)),
    "sd3_step8_wideclip": (FlowSDE(0.7), 8, 0.2, 0.04, (3, 4, 4)),
    "packed_step3_kl": (FlowSDE(0.9), 3, 1e-3, 0.004, (12, 4)),
    "cps_step2": (FlowCPS(0.8), 2, 1e-5, 0.0, (3, 4, 4)),
}


@pytest.mark.parametrize(
    ("dtype", "ratio_bound", "loss_bound", "kl_bound", "gradient_bound"),
    [(torch.float64, 2e-6, 2e-5, 1e-4, 1e-5), (torch.float32, 2e-5, 1e-4, 1e-3, 1e-4)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_equal_flowgrpos(case, dtype, ratio_bound, loss_bound, kl_bound, gradient_bound):
    golden = np.load(GOLDEN / "flowgrpo_loss.npz")
    kernel, index, clip_range, kl_weight, shape = LOSSES[case]
    sample, v_old, v_ref, v_new, noise = (
        torch.from_numpy(golden[key]).to(dtype).reshape(6, *shape)
        for key in ("sample", "v_old", "v_ref", "v_new", "noise")
    )
    stored = {key: torch.from_numpy(golden[f"{case}.{key}"]).double() for key in ("prev", "old_logp", "ratio")}
    sigmas, advantages = (torch.from_numpy(golden[key]) for key in ("sigmas", "advantages"))
    place = {"sigma": sigmas[index], "next_sigma": sigmas[index + 1], "sigma_max": sigmas[1]}

    old = kernel.step(sample, v_old, **place, noise=noise)
    torch.testing.assert_close(old.next_latents.double(), stored["prev"], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(old.log_prob.double(), stored["old_logp"], atol=5e-4, rtol=5e-4)

    velocity = v_new.clone().requires_grad_()
    given = {"next_latents": stored["prev"].to(dtype)}
    old, step, reference = (kernel.step(sample, v, **place, **given) for v in (v_old, velocity, v_ref))
    ratio = (step.log_prob - old.log_prob).exp()
    torch.testing.assert_close(ratio.double(), stored["ratio"], atol=ratio_bound, rtol=ratio_bound)

    policy = clipped_surrogate(step.log_prob, old.log_prob, advantages.to(dtype), clip_range=clip_range)
    loss = policy.mean()
    assert loss.item() == pytest.approx(golden[f"{case}.policy_loss"].item(), rel=loss_bound, abs=loss_bound)
    if kl_weight:
        dt = place["sigma"] - place["next_sigma"]
        kl = kl_to_reference(step.mean, reference.mean, step.std, dt=dt).mean()
        assert kl.item() == pytest.approx(golden[f"{case}.kl_loss"].item(), rel=kl_bound)
        loss = loss + kl_weight * kl
    assert loss.item() == pytest.approx(golden[f"{case}.loss"].item(), rel=loss_bound, abs=loss_bound)

    loss.backward()
    expected = golden[f"{case}.grad_v"]
    assert np.abs(velocity.grad.numpy() - expected).max() <= gradient_bound * np.abs(expected).max()
