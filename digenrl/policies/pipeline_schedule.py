"""The schedule of a pipeline's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from digenrl.diffusion.sigmas import dynamic_shift_sigmas, flow_match_sigmas

_WITHOUT_FORMULA = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")


def flow_match_schedule(
    config: Mapping[str, Any], num_steps: int, *, sequence_length: int, double_shift: bool = False
) -> Tensor:
    """Give the schedule [num_steps + 1] of a `FlowMatchEulerDiscreteScheduler`.

    Args:
        config: the scheduler's.
        num_steps: T.
        sequence_length: latent tokens of a sample, for a shift that depends on them.
        double_shift: whether the pipeline leaves the even steps to the scheduler; see `flow_match_sigmas`.

    Raises:
        ValueError: a setting that has no formula here.
    """
    without_formula = (*_WITHOUT_FORMULA, "use_dynamic_shifting") if double_shift else _WITHOUT_FORMULA
    unknown = [name for name in without_formula if config.get(name)]
    if config.get("time_shift_type", "exponential") != "exponential":
        unknown.append("time_shift_type")
    if unknown:
        raise ValueError(f"the pipeline's scheduler has {', '.join(unknown)}, which there is no schedule for.")
    if not config.get("use_dynamic_shifting", False):
        return flow_match_sigmas(num_steps, shift=config.get("shift", 1.0), double_shift=double_shift)
    return dynamic_shift_sigmas(
        num_steps,
        sequence_length=sequence_length,
        base_shift=config.get("base_shift", 0.5),
        max_shift=config.get("max_shift", 1.15),
        base_sequence_length=config.get("base_image_seq_len", 256),
        max_sequence_length=config.get("max_image_seq_len", 4096),
        terminal=config.get("shift_terminal"),
    )
