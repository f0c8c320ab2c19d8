"""Losses on the forward process, compared with published implementations and with closed forms."""

import math

import numpy as np
import pytest
import torch

from digenrl.functional import (
    adaptive_mean_square,
    append_dims,
    clipped_surrogate,
    crd_kl_weight,
    crd_loss,
    matching_log_prob,
    mean_per_group,
    mean_square,
    nft_loss,
    noised_latents,
    reward_probability,
)
from tests.functional.golden import DTYPES, LinearToy, assert_gradient, assert_value, load, tensors
from tests.functional.ranks import on_two_ranks

# What the stored losses do to advantages before the reward probability, by the end of their names.
ADVANTAGE_MODES = {
    "all": lambda a: a,
    "pos": lambda a: a.clamp(min=0),
    "neg": lambda a: a.clamp(max=0),
    "one": lambda a: (a > 0).to(a.dtype),
    "binary": torch.sign,
}
NFT_CASES = pytest.mark.parametrize("case", ["b1.0_all", "b0.1_all", "b1.0_pos", "b1.0_neg", "b1.0_one", "b0.5_binary"])


def stored_probability(golden, case, dtype):
    (advantages,) = tensors(golden, "advantages", dtype=dtype)
    return reward_probability(ADVANTAGE_MODES[case.split("_")[1]](advantages))


@DTYPES
@NFT_CASES
def test_reward_probability_equals_diffusion_nfts(case, dtype):
    golden = load("diffusion_nft_loss")
    probability = stored_probability(golden, case, dtype)
    assert probability.dtype == dtype
    assert_value(probability, golden[f"{case}.r"], 1e-6)


@DTYPES
@NFT_CASES
def test_loss_and_gradient_equal_diffusion_nfts(case, dtype):
    golden = load("diffusion_nft_loss")
    v_old, v_new, v_ref, xt, t, x0 = tensors(golden, "v_old", "v_new", "v_ref", "xt", "t", "x0", dtype=dtype)
    v_new.requires_grad_()
    beta, kl_weight = float(case[1:4]), 0.0 if case == "b1.0_one" else 1e-4
    rows = nft_loss(v_new, v_old, xt, t, x0, stored_probability(golden, case, dtype), beta=beta)
    assert rows.dtype == torch.float64
    r, positive, negative = (golden[f"{case}.{key}"] for key in ("r", "positive_loss", "negative_loss"))
    assert_value(rows, 5 * (r * positive + (1 - r) * negative) / beta, 1e-5)
    kl = mean_square(v_new - v_ref).mean()
    assert kl.item() == pytest.approx(golden[f"{case}.kl"].item(), rel=1e-4)
    loss = rows.mean() + kl_weight * kl
    assert_value(loss, golden[f"{case}.loss"], 1e-5)
    loss.backward()
    # The last sample's residual is rounding only.
    assert_gradient(v_new.grad[:5], golden[f"{case}.grad_v"][:5], 1e-4)


@NFT_CASES
def test_adaptive_mean_squares_equal_diffusion_nfts(case):
    golden = load("diffusion_nft_loss")
    v_old, v_new, xt, t, x0 = tensors(golden, "v_old", "v_new", "xt", "t", "x0", dtype=torch.float32)
    beta = float(case[1:4])
    for key, weight, direction in (("positive_loss", "weight_pos", beta), ("negative_loss", "weight_neg", -beta)):
        residual = xt - append_dims(t, 4) * (v_old + direction * (v_new - v_old)) - x0
        actual = adaptive_mean_square(residual)
        assert_value(actual, golden[f"{case}.{key}"], 1e-5)
        mean_abs = mean_square(residual.double()) / actual
        assert mean_abs.numpy() == pytest.approx(golden[f"{case}.{weight}"], rel=1e-4)


def test_adaptive_mean_square_has_the_gradient_of_a_constant_weight():
    x = torch.tensor([[3.0, -1.0], [1e-7, 0.0]], requires_grad=True)
    rows = adaptive_mean_square(x)
    assert rows.dtype == torch.float64
    assert rows.tolist() == pytest.approx([5.0 / 2.0, 5e-15 / 1e-5])
    rows.sum().backward()
    expected = [3.0 / 2.0, -1.0 / 2.0, 1e-7 / 1e-5, 0.0]
    assert x.grad.flatten().tolist() == pytest.approx(expected)


def test_nft_loss_equals_numbers_worked_out_by_hand():
    x0, xt, v, v_old, v_ref = (torch.full((2, 1), value, dtype=torch.float64) for value in (0.0, 0.5, 0.8, 1.2, 1.0))
    t, probability = torch.full((2,), 0.5).double(), torch.tensor([0.75, 0.25]).double()
    # v+ = 1 meets the target: L(v+) = 0. v- = 1.4 misses it by 0.2: L(v-) = 0.2^2 / 0.2.
    rows = nft_loss(v, v_old, xt, t, x0, probability, beta=0.5)
    assert rows.tolist() == pytest.approx([5 * 0.25 * 0.2 / 0.5, 5 * 0.75 * 0.2 / 0.5])
    loss = rows + 1e-4 * mean_square(v - v_ref)
    assert loss.mean().item() == pytest.approx(1.000004, abs=1e-9)


def test_nft_loss_at_the_old_policy_pulls_to_good_and_pushes_from_bad_samples():
    noise, x0 = torch.randn(2, 2, 6, dtype=torch.float64)
    sigma, old_velocity = torch.tensor([0.3, 0.3]).double(), (noise - x0 + 0.1).detach()
    velocity = old_velocity.clone().requires_grad_()
    latents = noised_latents(x0, noise, sigma)
    nft_loss(velocity, old_velocity, latents, sigma, x0, torch.tensor([1.0, 0.0]), beta=0.1).sum().backward()
    # The old velocity is above its target: a good sample lowers it, a bad one raises it, equally.
    assert (velocity.grad[0] > 0).all()
    torch.testing.assert_close(velocity.grad[1], -velocity.grad[0])


def test_slope_of_nft_loss_in_the_advantage_does_not_depend_on_the_clip():
    velocity, old_velocity, latents, x0 = torch.randn(4, 3, 5, dtype=torch.float64)
    slopes = []
    for advantage_clip in (2.0, 5.0, 11.0):
        advantages = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64, requires_grad=True)
        probability = reward_probability(advantages, advantage_clip=advantage_clip)
        options = {"beta": 0.5, "advantage_clip": advantage_clip}
        nft_loss(velocity, old_velocity, latents, torch.full((3,), 0.5), x0, probability, **options).sum().backward()
        slopes.append(advantages.grad)
    torch.testing.assert_close(slopes[0], slopes[1])
    torch.testing.assert_close(slopes[0], slopes[2])


def test_reward_probability_ends_at_the_clip():
    advantages = torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 7.0])
    assert reward_probability(advantages).tolist() == [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]
    assert reward_probability(advantages, advantage_clip=10.0).tolist() == pytest.approx(
        [0.05, 0.25, 0.5, 0.625, 0.75, 0.85]
    )


def stored_timesteps(golden, dtype, order=None):
    """Per trained timestep: latents, sigma and target of the samples in order."""
    order = slice(None) if order is None else order
    x0, timesteps, noise = tensors(golden, "x0", "timesteps", "noise", dtype=dtype)
    for sigma, eps in zip(timesteps / 1000, noise, strict=True):
        yield noised_latents(x0[order], eps, sigma), sigma, eps - x0[order]


@DTYPES
def test_gradient_equals_advantage_weighted_matchings(dtype):
    golden = load("ff_awm_t")
    order = torch.from_numpy(golden["perm"])
    embeds, advantages = (x[order] for x in tensors(golden, "embeds", "adv", dtype=dtype))
    toy, loss = LinearToy(golden, "W0", "b0", dtype=dtype).trained(), 0.0
    for latents, sigma, target in stored_timesteps(golden, dtype, order):
        distance = mean_square(toy(latents, sigma, embeds) - target)
        log_prob = matching_log_prob(distance, sigma, weighting="sigma")
        assert log_prob.dtype == torch.float64
        loss = loss + clipped_surrogate(log_prob, log_prob.detach(), advantages, clip_range=1e-2).mean() / 2
    loss.backward()
    toy.assert_gradients(golden, 1e-6)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("uniform", -0.16),
        ("sigma", -0.5 * 0.16),
        ("sigma_squared", -0.25 * 0.16),
        ("huber", -0.5 * (0.4 - 1e-5)),
        ("ghuber", -0.5 * 4 * (0.16**0.25 - 10**-2.5)),
    ],
)
def test_matching_log_prob_equals_its_closed_form(weighting, expected):
    distance = torch.tensor([0.16, 0.0], dtype=torch.float64)
    actual = matching_log_prob(distance, torch.tensor([0.5, 0.5]), weighting=weighting)
    assert actual.tolist() == pytest.approx([expected, 0.0], rel=1e-8)


@pytest.mark.parametrize("weighting", ["uniform", "sigma", "sigma_squared", "huber", "ghuber"])
def test_matching_log_prob_has_a_finite_gradient_at_the_target(weighting):
    distance = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    matching_log_prob(distance, torch.ones(1), weighting=weighting).backward()
    assert -math.inf < distance.grad.item() < 0


def test_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match="`weighting` must be 'uniform', .* got 't'"):
        matching_log_prob(torch.ones(1), torch.ones(1), weighting="t")


def stored_crd(golden, dtype):
    """The toy, and per trained timestep the policy's and the KL's rows of the stored loss as arguments."""
    toy = LinearToy(golden, "W0", "b0", dtype=dtype).trained()
    old, reference = (LinearToy(golden, *names, dtype=dtype) for names in (("W_old", "b_old"), ("Wref", "bref")))
    (embeds,) = tensors(golden, "embeds", dtype=dtype)
    timesteps = []
    for latents, sigma, target in stored_timesteps(golden, dtype):
        velocity = toy(latents, sigma, embeds)
        distance = adaptive_mean_square(velocity - target)
        old_distance = adaptive_mean_square(old(latents, sigma, embeds) - target)
        unguided = reference(latents, sigma, torch.zeros_like(embeds))
        guided = unguided + 4.5 * (reference(latents, sigma, embeds) - unguided)
        timesteps.append((distance, old_distance, mean_square(velocity - guided)))
    return toy, timesteps


@pytest.mark.parametrize(
    ("dtype", "gradient_bound"), [(torch.float64, 1e-5), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
def test_loss_and_gradient_equal_centered_reward_distillations(dtype, gradient_bound):
    golden = load("ff_crd_default")
    toy, timesteps = stored_crd(golden, dtype)
    (advantages,) = tensors(golden, "adv", dtype=dtype)
    probability, together = reward_probability(advantages), torch.zeros(8, dtype=torch.int64)
    policy = torch.cat([crd_loss(d, d_old, probability, together) for d, d_old, _ in timesteps]).mean()
    weight = crd_kl_weight(probability, kl_beta=0.1)
    kl = torch.cat([weight * divergence for _, _, divergence in timesteps]).mean()
    assert policy.dtype == torch.float64
    assert_value(policy, golden["log0|train/policy_loss"], 1e-6)
    assert kl.item() == pytest.approx(golden["log0|train/kl_loss"].item(), rel=1e-5)
    assert_value(policy + kl, golden["log0|train/loss"], 1e-6)
    (policy + kl).backward()
    toy.assert_gradients(golden, gradient_bound)


def test_crd_centres_all_rows_of_equal_index_and_no_others():
    golden = load("ff_crd_default")
    _, ((distance, old_distance, _), _) = stored_crd(golden, torch.float64)
    probability, groups = reward_probability(torch.from_numpy(golden["adv"])), torch.from_numpy(golden["uid"])
    whole = crd_loss(distance, old_distance, probability, groups)
    for group in groups.unique():
        of_group = [x[groups == group] for x in (distance, old_distance, probability, groups)]
        torch.testing.assert_close(whole[groups == group], crd_loss(*of_group))
    assert not torch.allclose(whole, crd_loss(distance, old_distance, probability, torch.zeros_like(groups)))


def test_crd_on_two_ranks_equals_that_on_one():
    distance, old_distance, probability = torch.rand(3, 8, dtype=torch.float64)
    rows = [distance.requires_grad_(), old_distance, probability, torch.tensor([0, 1] * 4)]

    def loss_of_rank(rank, center_mean):
        return crd_loss(*(row[4 * rank : 4 * rank + 4] for row in rows), center_mean=center_mean)

    expected = crd_loss(*rows)
    actual = torch.cat(on_two_ranks(loss_of_rank, mean_per_group))
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(loss.sum(), distance)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_crd_loss_ignores_a_constant_and_is_zero_where_rewards_agree():
    reward = torch.rand(6, dtype=torch.float64)
    old_distance, index = torch.rand(6, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    constant = torch.tensor([3.0, -2.0]).double()[index]
    assert crd_loss(old_distance - reward + constant, old_distance, reward, index).max() < 1e-20
    rows = crd_loss(old_distance, old_distance, reward, index, advantage_clip=2.0)
    torch.testing.assert_close(rows, 2.0 * (reward - mean_per_group(reward, index)).square())


def test_gradient_of_crd_takes_its_centre_as_constant():
    distance = torch.tensor([0.2, 0.6], dtype=torch.float64, requires_grad=True)
    rows = crd_loss(distance, torch.zeros(2), torch.tensor([0.5, 0.5]), torch.zeros(2, dtype=torch.int64))
    # rho is -0.2 and -0.6, its mean -0.4: the slope of 5 (rho + 0.4)^2 by d is -10 (rho + 0.4). Only in the sum over
    # complete groups would a centre with gradient give the same.
    rows[0].backward()
    assert distance.grad.tolist() == pytest.approx([-2.0, 0.0])


def test_kl_weight_of_crd_runs_from_its_floor_to_beta():
    probability = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    weight = crd_kl_weight(probability, kl_beta=0.1)
    floor = 1e-4 / 0.1
    assert weight.tolist() == pytest.approx([0.1 * (floor + a * (1 - floor)) for a in (0.0, 0.25, 1.0)])
    with pytest.raises(ValueError, match="`kl_beta` must be finite and at least `kl_floor`, got 0.0 and 0.0001"):
        crd_kl_weight(probability, kl_beta=0.0)


def nft_of_ones(**options):
    row, element = torch.ones(1), torch.ones(1, 1)
    return nft_loss(element, element, element, row, element, row, **{"beta": 1.0} | options)


def test_beta_of_nft_must_be_positive():
    for beta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"`beta` .* got {beta}"):
            nft_of_ones(beta=beta)


@pytest.mark.parametrize("advantage_clip", [0.0, -1.0, math.inf, math.nan])
def test_clip_of_a_probability_must_be_positive_and_finite(advantage_clip):
    option, row = {"advantage_clip": advantage_clip}, torch.ones(1)
    message = f"`advantage_clip` is the advantage of reward probability 1 .* got {advantage_clip}"
    with pytest.raises(ValueError, match=message):
        reward_probability(row, **option)
    with pytest.raises(ValueError, match=message):
        nft_of_ones(**option)
    with pytest.raises(ValueError, match=message):
        crd_loss(row, row, row, row, **option)


def test_noised_latents_are_the_stored_ones():
    golden = load("diffusion_nft_loss")
    x0, xt, t = tensors(golden, "x0", "xt", "t", dtype=torch.float64)
    noise = (xt - append_dims(1 - t, 4) * x0) / append_dims(t, 4)
    assert np.allclose(noised_latents(x0, noise, t), xt)
    one = noised_latents(torch.ones(1, 2), torch.full((1, 2), 5.0), torch.tensor([0.25]))
    assert one.tolist() == [[2.0, 2.0]]
