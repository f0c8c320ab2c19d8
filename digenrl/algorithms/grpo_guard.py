"""GRPO-Guard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.algorithms.reverse_process import KernelName
from digenrl.diffusion import KernelStep
from digenrl.functional import guard_log_ratio, guard_surrogate
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, TimestepBatch, Trajectory


class GRPOGuard(FlowGRPO):
    """GRPO-Guard: Flow-GRPO with a ratio that means the same at every step (arXiv:2510.22319).

    The ratio of a denoising step is below 1 on average, and its spread is another at each step, so that a clip range
    hardly ever acts on one side and at some steps. Here it is centred by the change of the step's mean and scaled by
    its std, and each step's loss is divided by dt, which evens out their gradients; see `guard_surrogate`. The means of
    the rollout are kept for this, which doubles what a trajectory holds.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        kernel: KernelName = "flow",
        clip_range: float = 2e-6,
        lr: float = 1e-4,
        **settings: Any,
    ) -> None:
        """Defaults are close to the authors' SD3.5-M setting.

        It differs in the guidance, 4.5, in `updates_per_rollout`, 2, and in the average that is validated, of
        `ema_decay` 0.9.

        Args:
            policy: see `DiffusionRLModule`.
            reward: see there.
            kernel: see `FlowGRPO`; not `"cps"`, whose log-prob is not that of a normal distribution.
            clip_range: see there, of this ratio; published ones are 2e-6 and 4e-6.
            lr: see `DiffusionRLModule`.
            **settings: see `FlowGRPO`.

        Raises:
            ValueError: a setting outside its bounds, or two that do not go together.
        """
        if kernel == "cps":  # before anything else: what the others ask of cps would not help
            raise ValueError(
                "`kernel` must be flow, dance or wan with GRPOGuard, got cps: the ratio is scaled by the std of a "
                "normal log-prob, and that of cps leaves its std out; take FlowGRPO for cps."
            )
        super().__init__(policy, reward, kernel=kernel, clip_range=clip_range, lr=lr, **settings)

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample as Flow-GRPO does, and keep the steps' means."""
        return self.sample_trajectory(prompts, self.kernel, sde_steps=self.sde_steps(prompts.step), keep_means=True)

    def surrogate(self, batch: TimestepBatch, step: KernelStep) -> Tensor:
        """Give the clipped surrogate of the centred and scaled ratio, over dt: [N]."""
        assert batch.old_log_probs is not None, "a stochastic kernel has log-probs"
        assert step.log_prob is not None, "a stochastic kernel has log-probs"
        assert batch.old_means is not None, "`rollout` keeps the means"
        with torch.no_grad():
            log_ratio = guard_log_ratio(step.log_prob, batch.old_log_probs, step.mean, batch.old_means, step.std)
            self.track_ratio(log_ratio.exp())
        return guard_surrogate(
            step.log_prob,
            batch.old_log_probs,
            step.mean,
            batch.old_means,
            step.std,
            batch.next_sigma - batch.sigma,
            batch.advantages,
            clip_range=self.clip_range,
            advantage_clip=torch.inf,
        )
