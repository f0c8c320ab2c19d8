"""Flow-GRPO."""

from __future__ import annotations

from torch import Tensor

from digenrl.diffusion.kernels import FlowSDE
from digenrl.functional import clipped_surrogate, group_advantages
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, TimestepBatch, Trajectory


class FlowGRPO(DiffusionRLModule):
    """Flow-GRPO: group-relative policy optimization of flow models (arXiv:2505.05470).

    The ODE sampler becomes an SDE with the same marginals (eq. 9), each of its steps a Gaussian policy; samples
    of one prompt are compared with each other (eq. 4), and each recorded step is trained with PPO's clipped
    surrogate (eq. 5). The log-prob is the mean over the elements of a sample, as in the authors' code; clip
    ranges are calibrated to that.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 10,
        timestep_fraction: float = 0.9,
        noise_level: float = 0.7,
        clip_range: float = 1e-4,
        advantage_clip: float = 5.0,
        normalize_by_std: bool = True,
        validation_steps: int | None = None,
        lr: float = 3e-4,
        weight_decay: float = 1e-4,
        seed: int | None = None,
    ) -> None:
        """Defaults are the authors' SD3.5-M setting, but for the advantages' std, which is the group's own.

        Args:
            policy: see `DiffusionRLModule`, as for the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            timestep_fraction: see there; 0.9 of 10 steps leaves out the last, whose distribution is very peaked.
            noise_level: a in sigma_t = a sqrt(t / (1 - t)), the noise the SDE injects.
            clip_range: how far the ratio may leave 1 before its gradient is cut.
            advantage_clip: advantages are clamped to plus or minus this.
            normalize_by_std: divide the advantages by the std of their group.
            validation_steps: see there.
            lr: see there.
            weight_decay: see there.
            seed: see there.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(
            policy,
            reward,
            group_size=group_size,
            num_steps=num_steps,
            timestep_fraction=timestep_fraction,
            validation_steps=validation_steps,
            lr=lr,
            weight_decay=weight_decay,
            seed=seed,
        )
        if noise_level <= 0:
            raise ValueError(
                f"`noise_level` must be above 0, got {noise_level}: without noise a step has no log-prob to train."
            )
        if not 0 < clip_range < 1:
            raise ValueError(f"`clip_range` bounds |ratio - 1| and must be in (0, 1), got {clip_range}.")
        if advantage_clip <= 0:
            raise ValueError(f"`advantage_clip` must be above 0, got {advantage_clip}.")
        self.kernel = FlowSDE(noise_level)
        self.clip_range = clip_range
        self.advantage_clip = advantage_clip
        self.normalize_by_std = normalize_by_std

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample with the SDE."""
        return self.sample_trajectory(prompts, self.kernel)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Standardize each reward within its group, eq. 4."""
        return group_advantages(rewards, group_ids, normalize_by_std=self.normalize_by_std)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """PPO's clipped surrogate of each recorded step, eq. 5."""
        assert batch.old_log_probs is not None, "FlowSDE always has log-probs"
        log_probs = self.log_probs(batch)
        deviation = ((log_probs - batch.old_log_probs).exp() - 1).abs()
        self.track("ratio/max_abs_dev", deviation, reduction="max")
        self.track("ratio/clip_frac", (deviation > self.clip_range).float())
        return clipped_surrogate(
            log_probs,
            batch.old_log_probs,
            batch.advantages,
            clip_range=self.clip_range,
            advantage_clip=self.advantage_clip,
        )
