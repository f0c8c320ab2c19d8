"""Losses of preferences: between two samples, or the better and the worse part of a group.

A distance is the mean square between a velocity and its target, d = mean_el((v - (noise - data))^2), at latents and
noise that the compared samples share with the reference and the old policy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from digenrl.functional.advantages import clamp_advantages
from digenrl.functional.groups import GroupReduction, mean_per_group, sum_per_group
from digenrl.functional.surrogate import is_clipped


def group_preference_loss(
    distance: Tensor,
    reference_distance: Tensor,
    old_distance: Tensor,
    advantages: Tensor,
    group_index: Tensor,
    *,
    beta: float,
    clip_range: float,
    advantage_clip: float = 5.0,
    group_mean: GroupReduction | None = None,
) -> Tensor:
    """Compute sigmoid(S_g) A d per row, with S_g = mean_g(beta A (d - d_ref)) detached.

    Its mean over a group has the gradient of -log sigmoid(-S_g), divided by beta: beta sharpens the sigmoid and
    leaves the learning rate alone. Rows whose ratio exp(d_old - d) is beyond the clip range on the side of their
    advantage (`is_clipped`) keep their value, here and in S_g, and lose their gradient.
    DGPO (arXiv:2510.08425); the clipping, the division by beta and the clamp of A are its published code's.

    Args:
        distance: [N] of the policy in training; the gradient flows through it.
        reference_distance: [N] of the reference.
        old_distance: [N] of the old policy; `distance` itself clips no row.
        advantages: [N].
        group_index: [N] integers in any order; rows with equal index form one group at one timestep. A group
            must be complete: the mean over a part of it is another S_g.
        beta: sharpness, above 0; published ones are 10 to 100, and 2000 with an EMA as reference.
        clip_range: in (0, 1).
        advantage_clip: A is first clamped to +- this value; `math.inf` leaves it alone.
        group_mean: the mean over whole groups, for groups of which only a part is given; None is the mean over
            the rows given. It gets values without gradient.

    Returns:
        [N], to be minimized.

    Raises:
        ValueError: `beta`, `clip_range` or `advantage_clip` is outside its range.
    """
    _check_beta(beta)
    advantages = clamp_advantages(advantages, advantage_clip)
    with torch.no_grad():
        margin = beta * advantages * (distance - reference_distance)
        group_margin = (group_mean or mean_per_group)(margin, group_index)
        clipped = is_clipped((old_distance - distance).exp(), advantages, clip_range=clip_range)
    distance = torch.where(clipped, distance.detach(), distance)
    return group_margin.sigmoid() * advantages * distance


def pair_loss(margin: Tensor, *, beta: float) -> Tensor:
    """Compute -log sigmoid(-beta / 2 margin), the loss of a preference.

    Diffusion-DPO (arXiv:2311.12908), with beta / 2 in the place of its beta T w(t).

    Args:
        margin: [P], d - d_ref of the chosen sample less that of the rejected one.
        beta: sharpness, above 0.

    Returns:
        [P], to be minimized.

    Raises:
        ValueError: `beta` is outside its range.
    """
    _check_beta(beta)
    return softplus(margin * (beta / 2))


def pair_preference_loss(
    distance: Tensor,
    reference_distance: Tensor,
    sign: Tensor,
    pair_index: Tensor,
    *,
    beta: float,
    group_sum: GroupReduction | None = None,
) -> Tensor:
    """Divide the `pair_loss` of two samples between their rows, wherever these are.

    The values of a pair's two rows add up to its `pair_loss`, and so do their gradients: each row has half the
    value and the whole gradient by its own distance. A pair needs no row but its own, so the two may be on
    different ranks or in different micro-batches if `group_sum` knows both.

    Args:
        distance: [N] of the policy in training; the gradient flows through it.
        reference_distance: [N] of the reference.
        sign: [N] 1 for the chosen row of a pair, -1 for the rejected one, 0 for a row in no pair, whose loss is 0.
        pair_index: [N] integers in any order; rows with equal index hold at most one pair, at one timestep. The
            index of a group, of which `preference_pairs` takes two samples, will do.
        beta: see `pair_loss`.
        group_sum: the sum over all rows of equal index, for pairs of which only a part is given; None is the sum
            over the rows given. It gets values without gradient.

    Returns:
        [N], to be minimized. Divide the sum by the number of pairs, which is not that of the rows.

    Raises:
        ValueError: `beta` is outside its range.
    """
    share = sign * (distance - reference_distance)
    margin = (group_sum or sum_per_group)(share.detach(), pair_index)
    # The row's own share, less its value: what is left is its gradient.
    loss = pair_loss(margin + (share - share.detach()), beta=beta)
    return sign.abs() * (loss - loss.detach() / 2)


def _check_beta(beta: float) -> None:
    if not 0.0 < beta < float("inf"):
        raise ValueError(f"`beta` is how sharp a preference is and must be in (0, inf), got {beta}.")
