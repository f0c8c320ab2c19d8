"""Losses on the forward process: they noise a finished sample and compare velocities, without any log-prob of steps.

Velocities are compared at latents = (1 - sigma) data + sigma noise, where the target is noise - data.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from digenrl.functional.advantages import clamp_advantages
from digenrl.functional.groups import GroupReduction, mean_per_group
from digenrl.functional.rows import append_dims

_SMALLEST_MEAN_ABS = 1e-5  # of DiffusionNFT's code: below it, rounding would be scaled up to size 1
_HUBER_EPS = 1e-10  # of AWM's code: the slope of a root has a pole at distance 0
_GHUBER_POWER = 0.25  # of AWM's code


def noised_latents(final_latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Compute (1 - sigma) data + sigma noise.

    Args:
        final_latents: [N, ...] data.
        noise: [N, ...].
        sigma: [N].

    Returns:
        [N, ...].
    """
    sigma = append_dims(sigma, final_latents.ndim)
    return (1 - sigma) * final_latents + sigma * noise


def adaptive_mean_square(x: Tensor) -> Tensor:
    """Average the squares of a row's elements, over their mean absolute value, which is detached.

    The gradient is then of the same size for rows near and far from their target. The mean absolute value counts
    as 1e-5 if it is smaller. DiffusionNFT (arXiv:2509.16117) normalizes its regression so.

    Args:
        x: [N, ...] with at least one axis after the rows.

    Returns:
        [N] in float64.
    """
    x = x.double().flatten(start_dim=1)
    return x.square().mean(dim=1) / x.detach().abs().mean(dim=1).clamp(min=_SMALLEST_MEAN_ABS)


def reward_probability(advantages: Tensor, *, advantage_clip: float = 5.0) -> Tensor:
    """Map advantages from [-c, c] to [0, 1], and those outside to the ends: clip(A / (2 c) + 1 / 2, 0, 1).

    The optimality probability of a sample in DiffusionNFT (arXiv:2509.16117), and the target reward in CRD's code.

    Args:
        advantages: [N].
        advantage_clip: c, positive and finite.

    Returns:
        [N].

    Raises:
        ValueError: `advantage_clip` is outside its range.
    """
    _check_finite_clip(advantage_clip)
    return clamp_advantages(advantages, advantage_clip) / (2 * advantage_clip) + 0.5


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    latents: Tensor,
    sigma: Tensor,
    final_latents: Tensor,
    reward_probability: Tensor,
    *,
    beta: float,
    advantage_clip: float = 5.0,
) -> Tensor:
    """Compute c (p L(v+) + (1 - p) L(v-)) / beta, the loss of DiffusionNFT (arXiv:2509.16117).

        v+ = (1 - beta) v_old + beta v,  v- = (1 + beta) v_old - beta v,
        L(u) = adaptive_mean_square(latents - sigma u - data)

    p is the probability of the sample being good: v moves toward what made good samples, and the implicit
    negative v- toward what made bad ones. The factors c and 1 / beta are its published code's and in the result;
    with c the clip of p's advantages, d loss / d A = (L(v+) - L(v-)) / (2 beta) whatever the clip is. The KL is
    not in the result: add its weight times `mean_square(velocity - reference_velocity)`.

    Args:
        velocity: [N, ...] of the policy in training; the gradient flows through it.
        old_velocity: [N, ...] of the old policy.
        latents: [N, ...] at `sigma`, where both velocities are taken.
        sigma: [N].
        final_latents: [N, ...] data.
        reward_probability: p [N], see the function of that name.
        beta: how far v+ and v- are from v_old, above 0; published ones are 1 and 0.1.
        advantage_clip: c, of `reward_probability`.

    Returns:
        [N] in float64, to be minimized.

    Raises:
        ValueError: `beta` or `advantage_clip` is outside its range.
    """
    if not 0.0 < beta < float("inf"):
        raise ValueError(f"`beta` is the share of the velocity in training and must be in (0, inf), got {beta}.")
    _check_finite_clip(advantage_clip)
    sigma = append_dims(sigma, latents.ndim)
    positive = (1 - beta) * old_velocity + beta * velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    positive_loss, negative_loss = (
        adaptive_mean_square(latents - sigma * v - final_latents) for v in (positive, negative)
    )
    policy_loss = reward_probability * positive_loss + (1 - reward_probability) * negative_loss
    return advantage_clip / beta * policy_loss


def matching_log_prob(
    distance: Tensor, sigma: Tensor, *, weighting: Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"]
) -> Tensor:
    """Compute the log-prob that advantage weighted matching (AWM, arXiv:2509.25050) gives a sample, -w(sigma) d.

    Train it with `clipped_surrogate`. The robust forms are those of its published code:

        huber: -sigma (sqrt(d + e) - sqrt(e)),  ghuber: -sigma ((d + e)^q - e^q) / q,  e = 1e-10, q = 1/4

    Args:
        distance: [N] mean square of velocity - (noise - data).
        sigma: [N].
        weighting: w is 1, sigma or sigma^2, or a robust form of the distance with w = sigma.

    Returns:
        [N] in float64.

    Raises:
        ValueError: `weighting` is unknown.
    """
    distance, sigma = distance.double(), sigma.double()
    match weighting:
        case "uniform":
            return -distance
        case "sigma":
            return -sigma * distance
        case "sigma_squared":
            return -sigma.square() * distance
        case "huber":
            return -sigma * _root(distance, 0.5)
        case "ghuber":
            return -sigma * _root(distance, _GHUBER_POWER) / _GHUBER_POWER
    raise ValueError(
        f"`weighting` must be 'uniform', 'sigma', 'sigma_squared', 'huber' or 'ghuber', got {weighting!r}."
    )


def crd_loss(
    distance: Tensor,
    old_distance: Tensor,
    reward_probability: Tensor,
    center_index: Tensor,
    *,
    advantage_clip: float = 5.0,
    center_mean: GroupReduction | None = None,
) -> Tensor:
    """Compute c ((rho - mean rho) - (a - mean a))^2 with the implicit reward rho = d_old - d.

    Centred reward distillation (CRD, arXiv:2603.14128): the reward that a policy implies is known up to a
    constant per prompt, which centring removes. Both means are detached. The method centres within a prompt;
    its public implementation over all samples of a timestep. The factor c is that implementation's. The KL is
    not in the result, see `crd_kl_weight`.

    Args:
        distance: [N] of the policy in training, `adaptive_mean_square` or `mean_square` of velocity - target;
            the gradient flows through it.
        old_distance: [N] the same of the old policy.
        reward_probability: a [N], see the function of that name.
        center_index: [N] integers in any order; rows with equal index are centred together, so rows of
            different timesteps must differ in it.
        advantage_clip: c, of `reward_probability`.
        center_mean: the mean over all rows of equal index, if only a part of them is given; None is the mean
            over the rows given. It gets values without gradient.

    Returns:
        [N], to be minimized.

    Raises:
        ValueError: `advantage_clip` is outside its range.
    """
    _check_finite_clip(advantage_clip)
    excess = (old_distance - distance) - reward_probability
    center = (center_mean or mean_per_group)(excess.detach(), center_index)
    return advantage_clip * (excess - center).square()


def crd_kl_weight(reward_probability: Tensor, *, kl_beta: float, kl_floor: float = 1e-4) -> Tensor:
    """Compute kl_floor + a (kl_beta - kl_floor): the better a sample, the closer CRD keeps it to the reference.

    Multiply it with `mean_square(velocity - reference_velocity)`. Good samples are where exploiting a reward
    model shows (CRD, arXiv:2603.14128).

    Args:
        reward_probability: a [N], see the function of that name.
        kl_beta: weight at a = 1, at least `kl_floor`.
        kl_floor: weight at a = 0, at least 0.

    Returns:
        [N].

    Raises:
        ValueError: a weight is outside its range.
    """
    if not 0.0 <= kl_floor <= kl_beta < float("inf"):
        raise ValueError(f"`kl_beta` must be finite and at least `kl_floor`, got {kl_beta} and {kl_floor}.")
    return kl_floor + reward_probability * (kl_beta - kl_floor)


def _root(distance: Tensor, power: float) -> Tensor:
    """Raise a distance to a power below 1, with a finite slope at 0, where the result is 0."""
    return (distance + _HUBER_EPS).pow(power) - float(_HUBER_EPS**power)


def _check_finite_clip(advantage_clip: float) -> None:
    if not 0.0 < advantage_clip < float("inf"):
        raise ValueError(
            f"`advantage_clip` is the advantage of reward probability 1 and must be in (0, inf), got {advantage_clip}."
        )
