"""All algorithms, as small as they go: a new one is covered by adding a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from digenrl.algorithms import DGPO, FlowGRPO
from digenrl.module import DiffusionRLModule
from tests.toy import ToyPolicy, level_reward

STEP_SIZE = 1e4  # so large that the moved weights are the gradient, to float32's own precision

SMALL: dict[str, Any] = {"group_size": 4, "num_steps": 5, "seed": 0}

CASES: dict[str, tuple[type[DiffusionRLModule], dict[str, Any]]] = {
    "FlowGRPO": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2}),
    "FlowGRPO-CPS": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "kernel": "cps", "noise_level": 0.8}),
    "FlowGRPO-Fast": (FlowGRPO, {"sde_window": 2, "sde_window_range": (0, 4), "clip_range": 1e-2}),
    "FlowGRPO-KL": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "kl_beta": 0.5}),
    "FlowGRPO-guided": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "guidance_scale": 2.0}),
    "FlowGRPO-batch": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "advantage_scope": "batch"}),
    "FlowGRPO-batch-KL": (
        FlowGRPO,
        {"timestep_fraction": 0.8, "clip_range": 1e-2, "advantage_scope": "batch", "kl_beta": 0.5},
    ),
    "FlowGRPO-batch-clipped": (
        FlowGRPO,
        {
            "timestep_fraction": 0.8,
            "clip_range": 1e-2,
            "advantage_scope": "batch",
            "advantage_clip": 0.5,
            "kl_beta": 0.5,
        },
    ),
    "DGPO": (DGPO, {"beta": 10.0, "clip_range": 0.05, "num_trained_timesteps": 3, "kl_beta": 0.1}),
    "DGPO-old-rollout": (
        DGPO,
        {
            "clip_range": 0.05,
            "num_trained_timesteps": 3,
            "beta": 10.0,
            "reference": "old",
            "old_rollout_from": 0,
            "guidance_scale": 2.0,
            "clips_kl": True,
            "kl_beta": 0.1,
        },
    ),
}


def make(case: str, *, descends: bool = False, moves_copies: bool = False, **settings: Any) -> DiffusionRLModule:
    """Make a case's module.

    Args:
        case: its name.
        descends: by plain gradient descent, so that the difference of the weights is the gradient.
        moves_copies: away from the policy at the start, so that no term of the loss is zero by chance.
        **settings: over the case's own.
    """
    cls, own = CASES[case]
    methods: dict[str, Callable[..., Any]] = {}
    if descends:
        methods["configure_optimizers"] = _configure_descent
    if moves_copies:
        methods["configure_model"] = _build_and_move_copies
    reward = settings.pop("reward", level_reward)
    return type(cls.__name__, (cls,), methods)(ToyPolicy(), reward, **{**SMALL, **own, **settings})


def _configure_descent(self: DiffusionRLModule) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=STEP_SIZE)


def _build_and_move_copies(self: DiffusionRLModule) -> None:
    is_new = not self._is_built
    super(type(self), self).configure_model()
    if is_new:
        rng = torch.Generator().manual_seed(1)
        for name in sorted(self.weight_copies):
            for weights in self.policy_copy(name).weights.buffers():
                weights.mul_(1 + 0.05 * torch.randn(weights.shape, generator=rng))
