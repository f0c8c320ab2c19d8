"""Checks of settings that algorithms of both families have, by the names that the user knows."""

from __future__ import annotations

import math


def check_kl_weights(**weights: float) -> None:
    """Check the weights of divergences.

    Raises:
        ValueError: a weight is negative or not finite.
    """
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"`{name}` is the weight of a divergence and must be in [0, inf), got {weight}; 0 is without."
            )


def check_clip_range(clip_range: float) -> None:
    """Check how far a ratio may leave 1.

    Raises:
        ValueError: it is not in (0, 1).
    """
    if not 0 < clip_range < 1:
        raise ValueError(f"`clip_range` bounds |ratio - 1| and must be in (0, 1), got {clip_range}.")


def check_beta(beta: float, meaning: str) -> None:
    """Check a `beta`, which is something else to each algorithm.

    Raises:
        ValueError: it is not positive or not finite.
    """
    if not 0 < beta < math.inf:
        raise ValueError(f"`beta` is {meaning} and must be in (0, inf), got {beta}.")


def check_finite_advantage_clip(advantage_clip: float) -> None:
    """Check the bound of advantages where these become probabilities.

    Raises:
        ValueError: it is inf, which elsewhere is without a bound.
    """
    if advantage_clip == math.inf:
        raise ValueError(
            "`advantage_clip` must be finite, got inf: it is the advantage of a sample that is certainly good."
        )
