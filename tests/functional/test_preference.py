"""Losses of preferences, compared with published implementations, with autograd and with closed forms."""

import math

import pytest
import torch

from digenrl.functional import (
    append_dims,
    group_preference_loss,
    is_clipped,
    mean_per_group,
    mean_square,
    noised_latents,
    pair_loss,
    pair_preference_loss,
    preference_pairs,
    sum_per_group,
)
from tests.functional.golden import DTYPES, LinearToy, assert_gradient, assert_value, load, tensors
from tests.functional.ranks import on_two_ranks

# Of each stored loss: beta, clip range (None: no old policy), weight of the KL.
GROUP_LOSSES = {
    "default": (100.0, 1e-2, 0.02),
    "tightclip": (100.0, 1e-3, 1e-3),
    "noclip": (10.0, None, 0.0),
    "emaref": (2000.0, 1e-5, 1e-3),
    "clipkl": (100.0, 1e-3, 0.02),
}
LAYOUTS = pytest.mark.parametrize("layout", ["contig", "interleaved"])
CASES = pytest.mark.parametrize("case", GROUP_LOSSES)


def stored_rows(golden, layout, case, dtype):
    """The velocity with its gradient, the arguments of the loss per row, and the weighted KL per row."""
    beta, clip_range, kl_weight = GROUP_LOSSES[case]
    keys = (f"{layout}.target_v", "model_v", "ref_v", "old_v", "advantages")
    target, velocity, reference_velocity, old_velocity, advantages = tensors(golden, *keys, dtype=dtype)
    velocity.requires_grad_()
    distance, reference, old = (mean_square(v - target) for v in (velocity, reference_velocity, old_velocity))
    kl = mean_square(velocity - reference_velocity)
    if case == "emaref":
        reference = old
    if clip_range is None:
        old, clip_range = distance.detach(), 0.5
    if case == "clipkl":
        clipped = is_clipped((old - distance.detach()).exp(), advantages, clip_range=clip_range)
        kl = torch.where(clipped, kl.detach(), kl)
    rows = [distance, reference, old, advantages, torch.from_numpy(golden[f"{layout}.group_labels"])]
    return velocity, rows, {"beta": beta, "clip_range": clip_range}, kl_weight * kl


@pytest.mark.parametrize(
    ("dtype", "loss_bound", "gradient_bound"),
    [(torch.float64, 2e-5, 5e-5), (torch.float32, 1e-4, 1e-4)],
    ids=["float64", "float32"],
)
@CASES
@LAYOUTS
def test_loss_and_gradient_equal_dgpos(layout, case, dtype, loss_bound, gradient_bound):
    golden = load("dgpo_loss")
    velocity, rows, options, kl = stored_rows(golden, layout, case, dtype)
    assert_value(rows[0], golden[f"{layout}.{case}.dsm"], 2e-6)
    policy = group_preference_loss(*rows, **options)
    assert policy.dtype == dtype
    assert_value(policy.mean(), golden[f"{layout}.{case}.dgpo_loss"], loss_bound)
    loss = (policy + kl).mean()
    assert_value(loss, golden[f"{layout}.{case}.loss"], loss_bound)
    loss.backward()
    assert_gradient(velocity.grad, golden[f"{layout}.{case}.grad_v"], gradient_bound)


@DTYPES
@pytest.mark.parametrize("case", sorted(set(GROUP_LOSSES) - {"noclip"}))
@LAYOUTS
def test_clipped_rows_are_dgpos(layout, case, dtype):
    golden = load("dgpo_loss")
    _, (distance, _, old, advantages, _), options, _ = stored_rows(golden, layout, case, dtype)
    clipped = is_clipped((old - distance).exp(), advantages, clip_range=options["clip_range"])
    assert clipped.tolist() == golden[f"{layout}.{case}.should_clip"].tolist()


def half(rows, rank):
    return [row[4 * rank : 4 * rank + 4] for row in rows]


@CASES
def test_loss_and_gradient_of_groups_on_two_ranks_equal_dgpos(case):
    whole, golden = load("dgpo_loss"), load("dgpo_loss_2ranks")
    velocity, rows, options, kl = stored_rows(whole, "interleaved", case, torch.float64)

    def loss_of_rank(rank, group_mean):
        policy = group_preference_loss(*half(rows, rank), **options, group_mean=group_mean)
        return (policy + kl[4 * rank : 4 * rank + 4]).mean()

    losses = torch.stack(on_two_ranks(loss_of_rank, mean_per_group))
    assert_value(losses, golden[f"{case}.loss"], 2e-5)
    losses.sum().backward()
    assert_gradient(velocity.grad, golden[f"{case}.grad_v"].reshape(8, 3, 2, 2), 5e-5)
    expected = torch.from_numpy(whole[f"interleaved.{case}.grad_v"]).double()
    torch.testing.assert_close(velocity.grad / 2, expected, rtol=0, atol=5e-5 * expected.abs().max().item())


def random_rows(num_rows=12, num_groups=3):
    distance, reference, old = (1 + 0.1 * torch.rand(num_rows, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(num_rows, dtype=torch.float64)
    return [distance.requires_grad_(), reference, old, advantages, torch.randperm(num_rows) % num_groups]


def test_gradient_is_that_of_the_log_sigmoid_over_beta():
    distance, reference, _, advantages, group_index = random_rows()
    rows = group_preference_loss(
        distance, reference, distance.detach(), advantages, group_index, beta=7.0, clip_range=0.1
    )
    (actual,) = torch.autograd.grad(rows.sum() / 4, distance)
    losses = [
        -torch.nn.functional.logsigmoid(-(7.0 * advantages * (distance - reference))[group_index == group].mean())
        for group in range(3)
    ]
    (expected,) = torch.autograd.grad(torch.stack(losses).sum() / 7.0, distance)
    torch.testing.assert_close(actual, expected)


def test_clipped_row_keeps_its_value_in_its_group_and_loses_its_gradient():
    distance = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    reference, old = torch.tensor([1.5, 1.5]).double(), torch.tensor([1.2, 1.0]).double()
    advantages, group_index = torch.tensor([1.0, -0.5]).double(), torch.tensor([0, 0])
    rows = group_preference_loss(distance, reference, old, advantages, group_index, beta=4.0, clip_range=0.1)
    weight = 1 / (1 + math.exp(-4.0 * (1.0 * -0.5 + -0.5 * -0.5) / 2))
    assert rows.tolist() == pytest.approx([weight, -0.5 * weight])
    rows.sum().backward()
    assert distance.grad.tolist() == pytest.approx([0.0, -0.5 * weight])


def test_group_preference_loss_follows_the_order_of_the_rows():
    rows, options = random_rows(), {"beta": 50.0, "clip_range": 0.02}
    expected = group_preference_loss(*rows, **options)
    order = torch.randperm(12)
    actual = group_preference_loss(*(row[order] for row in rows), **options)
    torch.testing.assert_close(actual, expected[order], rtol=1e-12, atol=1e-12)


def test_advantages_of_group_preference_are_clamped():
    rows, options = random_rows(), {"beta": 50.0, "clip_range": 0.02}
    large, clamped = ([*rows[:3], advantages, rows[4]] for advantages in (20 * rows[3], (20 * rows[3]).clamp(-5, 5)))
    expected = group_preference_loss(*clamped, **options)
    assert torch.equal(group_preference_loss(*large, **options), expected)
    assert not torch.equal(group_preference_loss(*large, **options, advantage_clip=math.inf), expected)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"beta": 0.0}, "`beta` .* got 0.0"),
        ({"beta": math.inf}, "`beta` .* got inf"),
        ({"clip_range": 0.0}, "`clip_range` .* got 0.0"),
        ({"advantage_clip": -1.0}, "`advantage_clip` .* got -1.0"),
    ],
)
def test_group_preference_option_outside_its_range_is_refused(option, message):
    with pytest.raises(ValueError, match=message):
        group_preference_loss(*random_rows(), **{"beta": 10.0, "clip_range": 0.01} | option)


def test_pair_loss_equals_numbers_worked_out_by_hand():
    residuals = torch.tensor([[0.1, 0.2], [0.15, 0.18]], dtype=torch.float64)
    margin = (residuals[0].square() - residuals[1].square()) @ torch.tensor([1.0, -1.0]).double()
    assert pair_loss(margin, beta=100.0).item() == pytest.approx(0.31191944, abs=2e-6)
    assert pair_loss(margin, beta=100.0).item() == pytest.approx(math.log1p(math.exp(-50 * 0.0201)), abs=1e-12)


def test_pair_loss_of_a_large_margin_does_not_overflow():
    loss = pair_loss(torch.tensor([1.0, -1.0, 0.0]), beta=1e5)
    assert loss.tolist() == pytest.approx([5e4, 0.0, math.log(2)])


def stored_distances(dtype):
    """The toy, and per row of 3 pairs (chosen rows first): d, d_ref and the sign."""
    golden = load("ff_dpo_default")
    pairs = torch.from_numpy(golden["pairs"])[torch.from_numpy(golden["pair_perm"])]
    row = torch.cat([pairs[:, 0], pairs[:, 1]])
    x0, embeds, noise, timesteps = tensors(golden, "x0", "embeds", "noise", "timesteps", dtype=dtype)
    noise, sigma = noise[0].repeat(2, 1, 1), timesteps[0].repeat(2) / 1000
    toy = LinearToy(golden, "W0", "b0", dtype=dtype).trained()
    latents, target = noised_latents(x0[row], noise, sigma), noise - x0[row]
    distance, reference = (
        mean_square(velocity(latents, sigma, embeds[row]) - target)
        for velocity in (toy, LinearToy(golden, "Wref", "bref", dtype=dtype))
    )
    return golden, toy, distance, reference.detach(), torch.tensor([1, 1, 1, -1, -1, -1])


@DTYPES
def test_pair_loss_and_gradient_equal_online_dpos(dtype):
    golden, toy, distance, reference, sign = stored_distances(dtype)
    margin = (sign * (distance - reference)).reshape(2, 3).sum(dim=0)
    loss = pair_loss(margin, beta=2000.0).mean()
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(golden["log1|train/loss"].item(), rel=1e-5)
    loss.backward()
    toy.assert_gradients(golden, 1e-6)


@DTYPES
def test_rows_of_pairs_equal_online_dpos(dtype):
    golden, toy, distance, reference, sign = stored_distances(dtype)
    rows = pair_preference_loss(distance, reference, sign, torch.tensor([5, 1, 9] * 2), beta=2000.0)
    assert rows.dtype == dtype
    assert rows.sum().item() / 3 == pytest.approx(golden["log1|train/loss"].item(), rel=1e-5)
    (rows.sum() / 3).backward()
    toy.assert_gradients(golden, 1e-6)


def test_rows_of_pairs_on_two_ranks_equal_online_dpos():
    golden, toy, distance, reference, sign = stored_distances(torch.float64)
    pair_index = torch.tensor([0, 1, 2] * 2)
    order = torch.tensor([0, 1, 4, 3, 5, 2])  # pairs 0 and 2 straddle the ranks, pair 1 does not
    rows = [row[order] for row in (distance, reference, sign, pair_index)]

    def loss_of_rank(rank, group_sum):
        of_rank = [row[3 * rank : 3 * rank + 3] for row in rows]
        return pair_preference_loss(*of_rank, beta=2000.0, group_sum=group_sum).sum()

    loss = sum(on_two_ranks(loss_of_rank, sum_per_group)) / 3
    assert loss.item() == pytest.approx(golden["log1|train/loss"].item(), rel=1e-5)
    loss.backward()
    toy.assert_gradients(golden, 1e-6)


def test_rows_in_no_pair_have_neither_loss_nor_gradient():
    distance, reference, _, scores, group_index = random_rows()
    pairs, sign = preference_pairs(scores, group_index), torch.zeros(12)
    sign[pairs[:, 0]], sign[pairs[:, 1]] = 1.0, -1.0
    rows = pair_preference_loss(distance, reference, sign, group_index, beta=30.0)
    margin = (distance - reference)[pairs] @ torch.tensor([1.0, -1.0]).double()
    torch.testing.assert_close(rows.sum(), pair_loss(margin, beta=30.0).sum())
    (actual,) = torch.autograd.grad(rows.sum(), distance)
    (expected,) = torch.autograd.grad(pair_loss(margin, beta=30.0).sum(), distance)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual == 0, sign == 0)
    assert rows[sign == 0].tolist() == [0.0] * 6


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_beta_of_a_pair_must_be_positive(beta):
    row = torch.ones(2)
    with pytest.raises(ValueError, match=f"`beta` .* got {beta}"):
        pair_loss(row, beta=beta)
    with pytest.raises(ValueError, match=f"`beta` .* got {beta}"):
        pair_preference_loss(row, row, row, torch.zeros(2, dtype=torch.int64), beta=beta)


def test_stored_dgpo_target_is_noise_less_data():
    golden = load("dgpo_loss")
    for layout in ("contig", "interleaved"):
        noise, x0, sigma = tensors(golden, f"{layout}.noise_per_sample", "x0", f"{layout}.sigma_t", dtype=torch.float64)
        assert_value(noise - x0, golden[f"{layout}.target_v"], 2e-6)
        latents = noised_latents(x0, noise, sigma)
        torch.testing.assert_close(latents, x0 + append_dims(sigma, 4) * (noise - x0))
