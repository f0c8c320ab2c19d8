"""Schedules: the noise levels that a sampler visits, from 1 (noise) to 0 (data).

A schedule of T steps has T + 1 sigmas, float32, falling, the last one 0. It is computed in float64 and
rounded once. The schedules below all bend a straight line u by shift(u) = k u / (1 + (k - 1) u), which spends
more steps at high noise for k > 1 (Stable Diffusion 3, arXiv:2403.03206, eq. 23).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NUM_TRAIN_TIMESTEPS = 1000
"""Models of the SD3 family are trained on sigmas 1/1000, 2/1000, ..., 1."""


def flow_match_sigmas(num_steps: int, *, shift: float = 1.0, double_shift: bool = False) -> Tensor:
    """Make a schedule with a fixed shift.

    Args:
        num_steps: T, at least 1.
        shift: k, positive; 1 spaces the sigmas evenly. SD3 and SD3.5 have 3.
        double_shift: False bends 1, ..., 2/T, 1/T. True bends even steps from 1 to the already bent 1/1000,
            which is what diffusers' `FlowMatchEulerDiscreteScheduler` does for SD3 and SD3.5: the shift acts
            twice and the last sigma before 0 is far smaller.

    Returns:
        [T+1].

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_num_steps(num_steps)
    _check_shift(shift)
    lowest = float(_shift(_line(1.0, 1.0 / _NUM_TRAIN_TIMESTEPS, 2), shift)[-1])
    last = lowest if double_shift else 1.0 / num_steps
    return _close(_shift(_line(1.0, last, num_steps), shift))


def dynamic_shift_sigmas(
    num_steps: int,
    *,
    sequence_length: int,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_sequence_length: int = 256,
    max_sequence_length: int = 4096,
    terminal: float | None = None,
) -> Tensor:
    """Make a schedule whose shift grows with the size of the sample, as FLUX and Qwen-Image have it.

    log k is linear in the sequence length. The defaults are FLUX.1's; Qwen-Image has max_shift 0.9,
    max_sequence_length 8192 and terminal 0.02.

    Args:
        num_steps: T, at least 1.
        sequence_length: number of latent tokens of a sample.
        base_shift: log k at `base_sequence_length`.
        max_shift: log k at `max_sequence_length`; longer samples continue the line.
        base_sequence_length: tokens.
        max_sequence_length: tokens, more than `base_sequence_length`.
        terminal: in (0, 1), stretches the schedule so that the last sigma before 0 has this value and the
            first stays 1; None leaves it alone.

    Returns:
        [T+1].

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_num_steps(num_steps)
    if sequence_length < 1:
        raise ValueError(f"`sequence_length` counts latent tokens and must be at least 1, got {sequence_length}.")
    if not 0 < base_sequence_length < max_sequence_length:
        raise ValueError(
            "`base_sequence_length` must be positive and below `max_sequence_length`, "
            f"got {base_sequence_length} and {max_sequence_length}."
        )
    if terminal is not None and not 0 < terminal < 1:
        raise ValueError(
            f"`terminal` is the last sigma before 0 and must be in (0, 1), got {terminal}; use None for no stretch."
        )
    if terminal is not None and num_steps == 1:
        raise ValueError("`terminal` needs a `num_steps` of at least 2, got 1; use None for no stretch.")
    slope = (max_shift - base_shift) / (max_sequence_length - base_sequence_length)
    log_shift = base_shift + slope * (sequence_length - base_sequence_length)
    sigmas = _shift(_line(1.0, 1.0 / num_steps, num_steps), math.exp(log_shift))
    if terminal is not None:
        sigmas = 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])
    return _close(sigmas)


def dance_sigmas(num_steps: int, *, shift: float) -> Tensor:
    """Make DanceGRPO's schedule: the bent 1, 1 - 1/T, ..., 0 (arXiv:2505.07818), whatever the model's own is.

    Args:
        num_steps: T, at least 1.
        shift: k, positive. Published runs have 3 (FLUX, Wan2.1, Qwen-Image), 5 (HunyuanVideo), 7 (SkyReels).

    Returns:
        [T+1].

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_num_steps(num_steps)
    _check_shift(shift)
    return _shift(_line(1.0, 0.0, num_steps + 1), shift).float()


def dpm_sigmas(num_steps: int, *, shift: float) -> Tensor:
    """Make the schedule of diffusers' `DPMSolverMultistepScheduler` with `use_flow_sigmas`, which DGPO has.

    It bends the even steps from 0.999 to 0, so that the first sigma is a little below 1.

    Args:
        num_steps: T, at least 1.
        shift: k, positive; DGPO (arXiv:2510.08425) has 3.

    Returns:
        [T+1].

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_num_steps(num_steps)
    _check_shift(shift)
    return _shift(_line(1.0 - 1.0 / _NUM_TRAIN_TIMESTEPS, 0.0, num_steps + 1), shift).float()


def unipc_sigmas(num_steps: int, *, shift: float) -> Tensor:
    """Make the schedule of diffusers' `UniPCMultistepScheduler` with `use_flow_sigmas`, which Wan has.

    It bends all but the last of the even steps from 1 to 1/1000. That solver begins 1e-6 below 1, for the sake of its
    logarithms, and cuts timesteps to integers; this schedule begins at 1.

    Args:
        num_steps: T, at least 1.
        shift: k, positive; Wan2.1 has 3, or 5 for 720 rows.

    Returns:
        [T+1].

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_num_steps(num_steps)
    _check_shift(shift)
    return _close(_shift(_line(1.0, 1.0 / _NUM_TRAIN_TIMESTEPS, num_steps + 1)[:-1], shift))


def compress_sigmas(sigmas: Tensor, *, start: int, ratio: float, shift: float) -> Tensor:
    """Make a shorter schedule from `sigmas[start]` to 0: a bent line, as `dance_sigmas` is.

    MixGRPO-Flash (arXiv:2507.21802) solves what follows its window on such a schedule. Of the remaining sigmas
    it keeps the given share, and at least one step: always to 0, where the published code stops short if
    little remains.

    Args:
        sigmas: [T+1] float32.
        start: where the rest begins, in [0, T).
        ratio: in (0, 1], share of the T + 1 - start remaining sigmas; 1 keeps their number.
        shift: k of `sigmas`, positive.

    Returns:
        [M+1] with M at most T - start, on the device of `sigmas`; the first entry is `sigmas[start]`.

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_shift(shift)
    num_sigmas = len(sigmas) - start
    if start < 0 or num_sigmas < 2:
        raise ValueError(f"`start` must leave a step to compress and be in [0, {len(sigmas) - 1}), got {start}.")
    if not 0 < ratio <= 1:
        raise ValueError(f"`ratio` is the share of sigmas to keep and must be in (0, 1], got {ratio}.")
    first = float(_shift(sigmas[start].double(), 1 / shift))
    # Bending back and forth in float64 returns to the same float32 number.
    return _shift(_line(first, 0.0, max(int(num_sigmas * ratio), 2)), shift).to(sigmas)


def _line(first: float, last: float, num: int) -> Tensor:
    return torch.linspace(first, last, num, dtype=torch.float64)


def _shift(u: Tensor, shift: float) -> Tensor:
    return shift * u / (1 + (shift - 1) * u)


def _close(sigmas: Tensor) -> Tensor:
    """Append the final 0 and round to float32."""
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"`num_steps` counts denoising steps and must be at least 1, got {num_steps}.")


def _check_shift(shift: float) -> None:
    if not 0 < shift < math.inf:
        raise ValueError(f"`shift` must be positive and finite, got {shift}; 1 spaces the sigmas evenly.")
