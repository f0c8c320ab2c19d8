"""A policy's weights in a checkpoint."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from digenrl.cli.errors import UsageError, one_line
from digenrl.policies import DiffusionPolicy

log = logging.getLogger(__name__)

_POLICY = "policy."
_AVERAGE = "weight_copies.ema."
_DEFAULT_INTERVAL = 8  # `ema_interval` of the base class


@dataclass(frozen=True)
class TrainedWeights:
    """What a checkpoint has of a policy."""

    path: Path
    policy: Mapping[str, Tensor]
    """By the names that the policy's state has."""
    average: Mapping[str, Tensor]
    """Those of them that `ema_decay` averages; empty without."""
    num_averaged_steps: int
    """Optimizer steps that the average has followed."""
    num_steps: int
    """Optimizer steps of the run."""
    hyper_parameters: Mapping[str, Any]
    """Of the algorithm."""

    @classmethod
    def read(cls, path: Path) -> TrainedWeights:
        """Read a checkpoint, its tensors from the file as they are wanted.

        Raises:
            UsageError: it is not one that a run of ours has written.
        """
        if path.is_dir():
            raise UsageError(f"`--checkpoint` must be a file, and `{path}` is a folder.")
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, OSError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"`--checkpoint` is `{path}`, which cannot be read: {reason}") from error
        state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
        policy = _below(_POLICY, state) if isinstance(state, dict) else {}
        if not policy:
            raise UsageError(f"`--checkpoint` is `{path}`, which has no weights of a policy: no `policy.*`.")
        assert isinstance(state, dict)
        return cls(
            path,
            policy,
            average=_below(f"{_AVERAGE}weights.", state),
            num_averaged_steps=int(state.get(f"{_AVERAGE}num_steps", 0)),
            num_steps=int(checkpoint.get("global_step", 0)),
            hyper_parameters=checkpoint.get("hyper_parameters", {}),
        )


def load_weights(policy: DiffusionPolicy, weights: TrainedWeights, *, is_averaged: bool) -> None:
    """Put a checkpoint's weights, or their average, into a policy that is built.

    Raises:
        UsageError: they are not of such a policy, or there is no average.
    """
    state = dict(weights.policy)
    _check_fit(policy, state, weights.path)
    if is_averaged:
        if not weights.average:
            raise UsageError(
                f"`--ema` needs an average, and `{weights.path}` has none: its run was without `ema_decay`."
            )
        interval = weights.hyper_parameters.get("ema_interval", _DEFAULT_INTERVAL)
        if weights.num_averaged_steps < interval:
            log.warning(
                "the average is still the start of training: it moves every %d steps, and has seen %d.",
                interval, weights.num_averaged_steps,
            )  # fmt: skip
        state.update(weights.average)
        _check_fit(policy, state, weights.path)
    policy.load_state_dict(state)


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _check_fit(policy: DiffusionPolicy, state: Mapping[str, Tensor], path: Path) -> None:
    own = policy.state_dict()
    unknown, absent = sorted(set(state) - set(own)), sorted(set(own) - set(state))
    remedy = "give the `--config` of its run"
    if unknown or absent:
        raise UsageError(
            f"`{path}` is not of this {type(policy).__name__}: {len(unknown)} of its weights have no place "
            f"({_few(unknown)}) and {len(absent)} are missing ({_few(absent)}); {remedy}."
        )
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise UsageError(
                f"`{path}` is not of this {type(policy).__name__}: `{one_line(name)}` has shape {list(value.shape)}, "
                f"but the policy's has {list(own[name].shape)}; {remedy}."
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "") if names else "none"
