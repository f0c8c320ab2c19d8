"""Checks of settings that algorithms of both families have, by the names that the user knows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from digenrl.policies import PipelinePolicy

if TYPE_CHECKING:
    from digenrl.module import DiffusionRLModule


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


def check_has_effect(condition: str, **settings: tuple[Any, Any]) -> None:
    """Check settings that change nothing under a condition that holds: they must be left as they are.

    Args:
        condition: as the message says it, such as "`kl_beta` 0".
        **settings: by their names, what was given and the default.

    Raises:
        ValueError: one was changed.
    """
    for name, (value, default) in settings.items():
        if value != default:
            raise ValueError(f"`{name}` must be left out with {condition}, where it changes nothing, got {value}.")


def check_guidance_is_used(module: DiffusionRLModule, *scales: float) -> None:
    """Check that how guidance is computed is only said where there is guidance.

    Args:
        module: an algorithm.
        *scales: all that it has.

    Raises:
        ValueError: none of them is above 1.
    """
    if all(scale == 1 for scale in scales):
        check_has_effect(
            "`guidance_scale` 1",
            guidance_rescale=(module.guidance_rescale, "none"),
            guidance_batching=(module.guidance_batching, "joint"),
            guidance_scale_2=(getattr(module.policy, "guidance_scale_2", None), None),
        )


def check_schedule(module: DiffusionRLModule) -> None:
    """Check that the policy of a pipeline has a schedule of as many steps as rollouts and validation have.

    Raises:
        ValueError: it has none.
    """
    if isinstance(module.policy, PipelinePolicy):
        for num_steps in (module.num_steps, module.validation_steps):
            module.policy.check_steps(num_steps)
