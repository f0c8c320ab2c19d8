"""DanceGRPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from digenrl.algorithms.reverse_process import ReverseProcessModule
from digenrl.diffusion import KernelStep
from digenrl.diffusion import random_timesteps as draw_timesteps
from digenrl.functional import best_of_n as choose_best_of_n
from digenrl.functional import weighted_sum
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, TimestepBatch, Trajectory


class DanceGRPO(ReverseProcessModule):
    """DanceGRPO: group-relative policy optimization of images and videos (arXiv:2505.07818).

    All steps are stochastic, with the same noise coefficient. The samples of a group start from the same noise, each is
    trained at timesteps of its own, and the last step is never trained: what is decoded is its prediction of the data.
    Several rewards keep their own advantages, and so their own clipping: the loss is the weighted sum of theirs.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 12,
        num_steps: int = 16,
        timestep_fraction: float = 0.6,
        random_timesteps: bool = True,
        best_of_n: int | None = None,
        noise_level: float = 0.3,
        clip_range: float = 1e-4,
        init_same_noise: bool = True,
        advantage_ddof: int = 1,
        advantage_eps: float = 1e-8,
        lr: float = 1e-5,
        **settings: Any,
    ) -> None:
        """Defaults are the authors' FLUX setting, but for their several updates per rollout.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            timestep_fraction: share of the steps but the last that a sample is trained at, in (0, 1].
            random_timesteps: draw them for each sample; False trains the noisiest.
            best_of_n: train this many samples of a group only, the worse half of them its worst and the better half its
                best; None is all.
            noise_level: eta, the noise coefficient of all steps.
            clip_range: how far the ratio may leave 1 before its gradient is cut.
            init_same_noise: see `ReverseProcessModule`.
            advantage_ddof: see `DiffusionRLModule`.
            advantage_eps: see there.
            lr: see there.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds.
        """
        if num_steps < 2:
            raise ValueError(f"`num_steps` must be at least 2, got {num_steps}: the last step is not trained.")
        super().__init__(
            policy,
            reward,
            group_size=group_size,
            num_steps=num_steps,
            timestep_fraction=timestep_fraction,
            kernel="dance",
            noise_level=noise_level,
            clip_range=clip_range,
            init_same_noise=init_same_noise,
            advantage_ddof=advantage_ddof,
            advantage_eps=advantage_eps,
            lr=lr,
            **settings,
        )
        self.num_trained_timesteps = math.floor((num_steps - 1) * timestep_fraction + 1e-9)
        if self.num_trained_timesteps < 1:
            raise ValueError(
                f"`timestep_fraction` is the trained share of the {num_steps - 1} steps before the last and must be in "
                f"[{1 / (num_steps - 1):g}, 1], got {timestep_fraction}."
            )
        if best_of_n is not None and not 2 <= best_of_n <= group_size:
            raise ValueError(
                f"`best_of_n` is how many samples of a group are trained and must be in [2, {group_size}], the "
                f"`group_size`, got {best_of_n}."
            )
        self.random_timesteps = random_timesteps
        self.best_of_n = best_of_n

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample with the SDE, and take the last step's prediction of the data."""
        return self.sample_trajectory(prompts, self.kernel, final="prediction")

    def join_advantages(self, advantages: Tensor) -> Tensor:
        """Keep those of several rewards apart, [B, R]: each has a surrogate of its own."""
        return advantages

    def select_samples(self, rewards: Tensor, advantages: Tensor, group_ids: Tensor) -> Sequence[int] | None:
        """Keep the `best_of_n` of each group; the first and the last of a group whose samples are all equal."""
        if self.best_of_n is None:
            return None
        scores = advantages if advantages.ndim == 1 else weighted_sum(advantages, self.reward_weights)
        # Ranks are distinct: no group is without order, so each keeps as many as the divisor of the losses counts.
        ranks = torch.empty_like(group_ids)
        ranks[scores.argsort(stable=True)] = torch.arange(len(scores))
        kept: list[int] = choose_best_of_n(ranks, group_ids, self.best_of_n).tolist()
        return kept

    @property
    def num_trained_samples(self) -> int:
        """Those that `best_of_n` keeps."""
        return self.best_of_n or self.group_size

    def recorded_steps(self, step: int) -> range:
        """Give all steps but the last, or the first trained ones if all samples are trained at these."""
        return range(self.num_steps - 1) if self.random_timesteps else super().recorded_steps(step)

    def select_timesteps(self, prompts: PromptBatch) -> Tensor:
        """Draw each sample's timesteps from all but the last, [B, k], or take the first."""
        if not self.random_timesteps:
            return super().select_timesteps(prompts)
        return draw_timesteps(prompts.seeds, num_available=self.num_steps - 1, num_chosen=self.num_trained_timesteps)

    def surrogate(self, batch: TimestepBatch, step: KernelStep) -> Tensor:
        """Give the clipped surrogate, or the weighted sum of those of several rewards, [N]."""
        if batch.advantages.ndim == 1:
            return super().surrogate(batch, step)
        parts = [replace(batch, advantages=advantages) for advantages in batch.advantages.unbind(1)]
        surrogates = [super(DanceGRPO, self).surrogate(part, step) for part in parts]
        return weighted_sum(torch.stack(surrogates, dim=1), self.reward_weights)
