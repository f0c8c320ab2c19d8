"""Flow-GRPO and what belongs to it: its fast variant, its other kernels, its KL term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from digenrl.averaging import NoUpdates
from digenrl.diffusion import DanceSDE, FlowCPS, FlowSDE, Kernel, RandomWindow, WanLinearSDE, Window
from digenrl.functional import clipped_surrogate, kl_to_reference, mean_square
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, RowLosses, TimestepBatch, Trajectory

KernelName = Literal["flow", "dance", "cps", "wan"]
_KERNELS: dict[str, Callable[[float], Kernel]] = {"flow": FlowSDE, "dance": DanceSDE, "cps": FlowCPS}
_REFERENCE = "reference"


class FlowGRPO(DiffusionRLModule):
    """Flow-GRPO: group-relative policy optimization of flow models (arXiv:2505.05470).

    The ODE sampler becomes an SDE with the same marginals (eq. 9), each of its steps a Gaussian policy; samples
    of one prompt are compared with each other (eq. 4), and each recorded step is trained with PPO's clipped
    surrogate (eq. 5). The log-prob is the mean over the elements of a sample, as in the authors' code; clip
    ranges are calibrated to that.

    Flow-GRPO-Fast is `sde_window`: only a few steps are stochastic and trained. Flow-CPS (arXiv:2509.05952) is
    `kernel="cps"`.
    """

    advantages_scale_gradient: ClassVar[bool] = True

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 10,
        timestep_fraction: float = 0.9,
        kernel: KernelName = "flow",
        noise_level: float = 0.7,
        sde_window: int | None = None,
        sde_window_range: tuple[int, int] | None = None,
        clip_range: float = 1e-4,
        kl_beta: float = 0.0,
        kl_form: Literal["code", "paper"] = "code",
        lr: float = 3e-4,
        **settings: Any,
    ) -> None:
        """Defaults are the authors' SD3.5-M setting, but for the advantages' std, which is the group's own.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            timestep_fraction: see there; 0.9 of 10 steps leaves out the last, whose distribution is very peaked.
            kernel: how noise enters a step: `"flow"`, `"dance"`, `"cps"` or `"wan"`.
            noise_level: a of the kernel; `"wan"` has none and takes 1.
            sde_window: number of consecutive steps that are stochastic and trained, the others follow the ODE; None is
                all steps. A window is drawn for each training step.
            sde_window_range: first step a window may begin with, and the end of the last; None is (0, half the steps).
            clip_range: how far the ratio may leave 1 before its gradient is cut.
            kl_beta: weight of the KL divergence to the policy that training started from; 0 is without.
            kl_form: `"code"` is dt times the divergence, as published code has it, `"paper"` the divergence itself.
            lr: see there.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds, or two that do not go together.
        """
        super().__init__(
            policy,
            reward,
            group_size=group_size,
            num_steps=num_steps,
            timestep_fraction=timestep_fraction,
            lr=lr,
            **settings,
        )
        if kernel not in get_args(KernelName):
            raise ValueError(f"`kernel` must be one of {', '.join(get_args(KernelName))}, got {kernel!r}.")
        if not 0 < clip_range < 1:
            raise ValueError(f"`clip_range` bounds |ratio - 1| and must be in (0, 1), got {clip_range}.")
        if kl_form not in ("code", "paper"):
            raise ValueError(f"`kl_form` must be code or paper, got {kl_form!r}.")
        if not kl_beta >= 0:
            raise ValueError(f"`kl_beta` is the weight of a divergence and must be at least 0, got {kl_beta}.")
        self.kernel = _make_kernel(kernel, noise_level)
        self.clip_range = clip_range
        self.kl_beta = kl_beta
        self.kl_form: Literal["code", "paper"] = kl_form
        self.window = self._make_window(sde_window, sde_window_range)
        self._check_last_step(kernel)
        if kl_beta > 0:
            self.add_weight_copy(_REFERENCE, NoUpdates())

    def recorded_steps(self, step: int) -> range:
        """Give the window, or the first trained steps."""
        return super().recorded_steps(step) if self.window is None else self.window.steps(step, seed=self.seed)

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample with the SDE, in the window if there is one."""
        window = None if self.window is None else self.recorded_steps(prompts.step)
        return self.sample_trajectory(prompts, self.kernel, sde_steps=window)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor | RowLosses:
        """PPO's clipped surrogate of each recorded step, eq. 5, and the KL divergence if it has a weight."""
        assert batch.old_log_probs is not None, "a stochastic kernel has log-probs"
        step = self.score_step(batch)
        assert step.log_prob is not None, "a stochastic kernel has log-probs"
        self.track_ratio((step.log_prob - batch.old_log_probs).exp())
        losses = clipped_surrogate(
            step.log_prob, batch.old_log_probs, batch.advantages, clip_range=self.clip_range, advantage_clip=torch.inf
        )
        return losses if self.kl_beta == 0 else RowLosses(losses, self.kl_beta * self.divergence(batch, step.mean))

    def divergence(self, batch: TimestepBatch, mean: Tensor) -> Tensor:
        """Give the KL divergence of recorded steps to the reference, [N]; see `kl_to_reference`."""
        with torch.no_grad():
            reference = self.score_step(batch, self.policy_copy(_REFERENCE))
        if isinstance(batch.kernel, FlowCPS):
            divergence = mean_square(mean - reference.mean)  # its steps end without noise, and its authors do so
        else:
            dt = batch.sigma - batch.next_sigma
            divergence = kl_to_reference(mean, reference.mean, reference.std, dt=dt, form=self.kl_form)
        self.track("kl", divergence.detach())
        return divergence

    def track_ratio(self, ratio: Tensor) -> None:
        """Report how far ratios [N] are from 1."""
        deviation = (ratio.detach() - 1).abs()
        self.track("ratio/max_abs_dev", deviation, reduction="max")
        self.track("ratio/clip_frac", (deviation > self.clip_range).float())

    def _make_window(self, size: int | None, bounds: tuple[int, int] | None) -> Window | None:
        if size is None:
            if bounds is not None:
                raise ValueError(
                    "`sde_window_range` bounds a window, but `sde_window` gives none; set both or neither."
                )
            return None
        start, stop = bounds or (0, self.num_steps // 2)
        if not 0 <= start < stop <= self.num_steps:
            raise ValueError(
                f"`sde_window_range` must be within the {self.num_steps} steps, in order, got {start} to {stop}."
            )
        try:
            window = RandomWindow(size=size, start=start, stop=stop)
        except ValueError as error:
            raise ValueError(f"`sde_window` must fit `sde_window_range`, {start} to {stop}, got {size}.") from error
        return window

    def _check_last_step(self, kernel: str) -> None:
        stop = self.num_trained_timesteps if self.window is None else self.window.stop
        if kernel == "cps" and stop == self.num_steps:
            raise ValueError(
                f"`timestep_fraction` or `sde_window_range` must leave out the last of the {self.num_steps} steps with "
                "kernel cps: it has no noise, so nothing of it can be trained."
            )


def _make_kernel(name: str, noise_level: float) -> Kernel:
    if name == "wan":
        if noise_level != 1:
            raise ValueError(
                f"`noise_level` must be 1 with kernel wan, which has a noise of its own, got {noise_level}."
            )
        return WanLinearSDE()
    kernel = _KERNELS[name](noise_level)
    if kernel.is_deterministic:
        raise ValueError(
            f"`noise_level` must be above 0, got {noise_level}: without noise a step has no log-prob to train."
        )
    return kernel
