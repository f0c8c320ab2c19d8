"""All algorithms, as small as they go: a new one is covered by adding a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from digenrl.algorithms import AWM, CRD, DGPO, DanceGRPO, DiffusionNFT, FlowGRPO, GRPOGuard, MixGRPO, OnlineDPO
from digenrl.module import DiffusionRLModule
from digenrl.rewards import SeveralRewards
from tests.rewards.test_several import calm
from tests.toy import ToyPolicy, level_reward

STEP_SIZE = 1e4  # so large that the moved weights are the gradient, to float32's own precision

SMALL: dict[str, Any] = {"reward": level_reward, "group_size": 4, "num_steps": 5, "seed": 0}
SEVERAL = SeveralRewards([level_reward, calm], weights=[1.0, 0.5])

CASES: dict[str, tuple[type[DiffusionRLModule], dict[str, Any]]] = {
    "FlowGRPO": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2}),
    "FlowGRPO-CPS": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "kernel": "cps", "noise_level": 0.8}),
    "FlowGRPO-Fast": (FlowGRPO, {"sde_window": 2, "sde_window_range": (0, 4), "clip_range": 1e-2}),
    "FlowGRPO-KL": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "kl_beta": 0.5}),
    "FlowGRPO-guided": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "guidance_scale": 1.5}),
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
    "FlowGRPO-2-updates": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "updates_per_rollout": 2}),
    "FlowGRPO-same-noise": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "init_same_noise": True}),
    # More noise than the published 0.3: with so little, the float32 rounding of rollouts on other workers alone moves
    # the gradient by up to 1.3e-6. `test_dance_grpo` shows for 0.3 that training is exact in any batching.
    "DanceGRPO": (DanceGRPO, {"clip_range": 1e-2, "noise_level": 0.9}),
    "DanceGRPO-best": (
        DanceGRPO,
        {"clip_range": 1e-2, "noise_level": 0.9, "best_of_n": 3, "random_timesteps": False},
    ),
    "DanceGRPO-rewards": (DanceGRPO, {"clip_range": 1e-2, "noise_level": 0.9, "reward": SEVERAL}),
    "DanceGRPO-rewards-best": (
        DanceGRPO,
        {"clip_range": 1e-2, "noise_level": 0.9, "reward": SEVERAL, "best_of_n": 2, "updates_per_rollout": 2},
    ),
    "MixGRPO": (MixGRPO, {"clip_range": 1e-2, "sde_window": 2, "steps_per_window": 1}),
    "MixGRPO-Flash": (
        MixGRPO,
        {
            "clip_range": 1e-2,
            "sde_window": 2,
            "window_strategy": "random",
            "kernel": "dance",
            "flash": True,
            "tail_ratio": 0.7,
            "tail_shift": 1.0,
        },
    ),
    "MixGRPO-rewards": (
        MixGRPO,
        {
            "clip_range": 1e-2,
            "sde_window": 3,
            "window_strategy": "exp_decay",
            "reward": SEVERAL,
            "updates_per_rollout": 2,
        },
    ),
    "GRPOGuard": (GRPOGuard, {"timestep_fraction": 0.8, "clip_range": 1e-2}),
    "GRPOGuard-KL": (GRPOGuard, {"timestep_fraction": 0.8, "clip_range": 1e-2, "kl_beta": 0.5, "kernel": "dance"}),
    "GRPOGuard-batch": (
        GRPOGuard,
        {
            "sde_window": 2,
            "sde_window_range": (1, 4),
            "clip_range": 1e-2,
            "kl_beta": 0.5,
            "advantage_scope": "batch",
            "updates_per_rollout": 2,
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
    "DGPO-rewards": (DGPO, {"beta": 10.0, "clip_range": 0.5, "num_trained_timesteps": 3, "reward": SEVERAL}),
    "DGPO-2-updates": (
        DGPO,
        {
            "beta": 10.0,
            "clip_range": 0.5,
            "num_trained_timesteps": 3,
            "old_rollout_from": None,
            "updates_per_rollout": 2,
            "reference_guidance_scale": 2.0,
            "solver": "euler",
        },
    ),
    "DiffusionNFT": (DiffusionNFT, {"num_trained_timesteps": 3, "kl_beta": 0.1, "old_rate": 0.2}),
    "DiffusionNFT-2-updates": (
        DiffusionNFT,
        {
            "num_trained_timesteps": 5,
            "beta": 0.5,
            "kl_beta": 0.0,
            "old_rate": 0.5,
            "updates_per_rollout": 2,
            "guidance_scale": 2.0,
            "reward": SEVERAL,
        },
    ),
    "AWM": (AWM, {"num_trained_timesteps": 3, "weighting": "sigma"}),
    "AWM-2-updates": (
        AWM,
        {
            "num_trained_timesteps": 3,
            "weighting": "huber",
            "clip_range": 0.9,
            "kl_beta": 0.0,
            "average_kl_beta": 0.0,
            "updates_per_rollout": 2,
        },
    ),
    "AWM-batch": (
        AWM,
        {"num_trained_timesteps": 4, "advantage_scope": "batch", "average_kl_beta": 0.5, "updates_per_rollout": 2},
    ),
    "OnlineDPO": (OnlineDPO, {"beta": 5.0, "num_trained_timesteps": 3}),
    "OnlineDPO-2-updates": (
        OnlineDPO,
        {
            "beta": 5.0,
            "num_trained_timesteps": 3,
            "timestep_density": "uniform",
            "reward": SEVERAL,
            "updates_per_rollout": 2,
        },
    ),
    "CRD": (CRD, {"num_trained_timesteps": 3, "sampler_flat": 1, "sampler_rate": 0.3}),
    "CRD-2-updates": (
        CRD,
        {
            "num_trained_timesteps": 4,
            "adaptive_distance": False,
            "kl_beta": 0.0,
            "sampler_flat": 0,
            "sampler_rate": 0.3,
            "updates_per_rollout": 2,
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
    return type(cls.__name__, (cls,), methods)(ToyPolicy(), **{**SMALL, **own, **settings})


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
