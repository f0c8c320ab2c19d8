"""The schedule of a policy of a pipeline: that of the pipeline's scheduler, or another that was chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from digenrl.diffusion.sigmas import dance_sigmas, dpm_sigmas, dynamic_shift_sigmas, flow_match_sigmas

Schedule: TypeAlias = Literal["pipeline", "dance", "dpm"] | Sequence[float]
"""The pipeline's own, `dance_sigmas` or `dpm_sigmas`, or sigmas as they are."""

_FORMULAS: Mapping[str, Callable[..., Tensor]] = {"dance": dance_sigmas, "dpm": dpm_sigmas}
_EULER = "FlowMatchEulerDiscreteScheduler"
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
        ValueError: another scheduler, or a setting that has no formula here.
    """
    if config["_class_name"] != _EULER:
        raise ValueError(
            f"the pipeline's scheduler is a {config['_class_name']} and no {_EULER}, so there is no schedule for it: "
            "set `schedule`, or give the pipeline that one."
        )
    is_dynamic = config.get("use_dynamic_shifting", False)
    # The formulas stretch a schedule, to end at a sigma above 0, only where its shift grows with the sample.
    without_formula = (*_WITHOUT_FORMULA, "use_dynamic_shifting" if double_shift else "")
    unknown = [name for name in without_formula if config.get(name)]
    if not is_dynamic and config.get("shift_terminal"):
        unknown.append("shift_terminal")
    if config.get("time_shift_type", "exponential") != "exponential":
        unknown.append("time_shift_type")
    if unknown:
        raise ValueError(
            f"the pipeline's scheduler has {', '.join(unknown)}, which there is no schedule for: set `schedule`, or "
            "give the pipeline a scheduler without."
        )
    if not is_dynamic:
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


def check_schedule(schedule: Schedule, shift: float | None) -> None:
    """Check a policy's `schedule` and `schedule_shift`.

    Raises:
        ValueError: one is wrong, or they do not go together.
    """
    is_formula = isinstance(schedule, str) and schedule in _FORMULAS
    if isinstance(schedule, str) and not is_formula and schedule != "pipeline":
        names = ", ".join(("pipeline", *_FORMULAS))
        raise ValueError(f"`schedule` must be one of {names}, or a list of sigmas, got {schedule!r}.")
    if is_formula and shift is None:
        raise ValueError(
            f"`schedule` {schedule} needs a `schedule_shift`: published runs have 3, and 5 for HunyuanVideo."
        )
    if not is_formula and shift is not None:
        raise ValueError(
            f"`schedule_shift` is for a `schedule` of {' or '.join(_FORMULAS)}, got {shift}: leave it out."
        )
    if shift is not None and not 0 < shift < math.inf:
        raise ValueError(f"`schedule_shift` must be positive and finite, got {shift}; 1 spaces the sigmas evenly.")
    if not isinstance(schedule, str):
        _check_sigmas(schedule)


def chosen_schedule(schedule: Schedule, shift: float | None, num_steps: int) -> Tensor:
    """Give a schedule [num_steps + 1] that is not the pipeline's own.

    Raises:
        ValueError: `schedule` is a list of another number of steps, or `shift` is out of bounds.
    """
    if isinstance(schedule, str):
        return _FORMULAS[schedule](num_steps, shift=shift)
    if len(schedule) != num_steps + 1:
        raise ValueError(
            f"`schedule` lists the {len(schedule)} sigmas of {len(schedule) - 1} steps, and {num_steps} are asked for: "
            "`num_steps` and `validation_steps` must be as many."
        )
    return torch.tensor(schedule, dtype=torch.float32)


def _check_sigmas(sigmas: Sequence[float]) -> None:
    falls = all(after < before for before, after in zip(sigmas[:-1], sigmas[1:], strict=True))
    if len(sigmas) < 2 or not falls or not 0 < sigmas[0] <= 1 or sigmas[-1] != 0:
        raise ValueError(f"`schedule` must list sigmas that fall from at most 1 to 0, got {list(sigmas)}.")
