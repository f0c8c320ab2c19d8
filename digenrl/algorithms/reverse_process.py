"""What algorithms have in common that train on the reverse process: the steps of a rollout with their log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from digenrl.algorithms.checks import (
    check_clip_range,
    check_guidance_is_used,
    check_has_effect,
    check_schedule,
)
from digenrl.diffusion import DanceSDE, FlowCPS, FlowSDE, Kernel, KernelStep, WanLinearSDE, Window
from digenrl.functional import clipped_surrogate
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, RowLosses, TimestepBatch, derive_seed

KernelName = Literal["flow", "dance", "cps", "wan"]
_KERNELS: dict[str, Callable[..., Kernel]] = {
    "flow": FlowSDE,
    "dance": DanceSDE,
    "cps": FlowCPS,
    "wan": WanLinearSDE,
}


class ReverseProcessModule(DiffusionRLModule):
    """Base of algorithms that train the recorded steps of a rollout, each with PPO's clipped surrogate.

    Steps are stochastic everywhere, or in a window if a subclass gives one; each is then a Gaussian policy. The
    log-prob is the mean over the elements of a sample, as in published code; clip ranges are calibrated to that.
    """

    advantages_scale_gradient: ClassVar[bool] = True

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        kernel: KernelName,
        noise_level: float | None = None,
        clip_range: float,
        train_guidance: bool = True,
        init_same_noise: bool = False,
        **settings: Any,
    ) -> None:
        """Check the settings.

        Args:
            policy: see `DiffusionRLModule`, as for `settings`.
            reward: see there.
            kernel: how noise enters a step: `"flow"`, `"dance"`, `"cps"` or `"wan"`.
            noise_level: how much; None is the published value of the kernel: 0.7 of `"flow"`, 0.3 of `"dance"`, 0.8 of
                `"cps"`. `"wan"` has a noise of its own and takes None only.
            clip_range: how far the ratio may leave 1 before its gradient is cut.
            train_guidance: whether the policy is trained as it makes samples, with their classifier-free guidance.
                False trains it to make them without: their steps are scored, also for the ratio, under the policy
                without guidance, which costs rollouts a further pass.
            init_same_noise: whether the samples of a group start from the same noise, and differ by that of their
                steps only.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(policy, reward, **settings)
        check_schedule(self)
        if type(self).guidance_scales is DiffusionRLModule.guidance_scales:  # a subclass may have more of them
            check_guidance_is_used(self, self.guidance_scale)
        if self.guidance_scale == 1:
            check_has_effect("`guidance_scale` 1", train_guidance=(train_guidance, True))
        if kernel not in get_args(KernelName):
            raise ValueError(f"`kernel` must be one of {', '.join(get_args(KernelName))}, got {kernel!r}.")
        if kernel == "wan" and self.num_steps < 2:
            raise ValueError(
                f"`num_steps` must be at least 2 with kernel wan, got {self.num_steps}: a single step has no noise."
            )
        check_clip_range(clip_range)
        self.kernel = _make_kernel(kernel, noise_level)
        self.clip_range = clip_range
        self.train_guidance = train_guidance
        self.init_same_noise = init_same_noise
        self.window: Window | None = None
        """Steps that are stochastic and trained, the others follow the ODE; None is all of them."""

    def sde_steps(self, step: int) -> range | None:
        """Say which denoising steps of a training step are stochastic: those of the window; None is all."""
        return None if self.window is None else self.window.steps(step, seed=self.seed)

    def recorded_steps(self, step: int) -> range:
        """Give the window, or the first trained steps."""
        window = self.sde_steps(step)
        return super().recorded_steps(step) if window is None else window

    def initial_latents(self, prompts: PromptBatch) -> Tensor:
        """Draw the noise that samples start from, each sample's own or its group's, [B, ...] float32."""
        if not self.init_same_noise:
            return super().initial_latents(prompts)
        # Of the group and not of its first sample: a group's samples may be made on different workers.
        seeds = [derive_seed(self.seed, "group initial", prompts.step, group) for group in prompts.group_ids]
        return self.policy.initial_latents(seeds)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor | RowLosses:
        """Give the surrogate of each recorded step."""
        return self.surrogate(batch, self.score_step(batch))

    def surrogate(self, batch: TimestepBatch, step: KernelStep) -> Tensor:
        """Give PPO's clipped surrogate of recorded steps, [N], and report their ratios.

        Args:
            batch: the rows.
            step: what `score_step` says of them under the current weights.
        """
        assert batch.old_log_probs is not None, "a stochastic kernel has log-probs"
        assert step.log_prob is not None, "a stochastic kernel has log-probs"
        self.track_ratio((step.log_prob - batch.old_log_probs).exp())
        return clipped_surrogate(
            step.log_prob,
            batch.old_log_probs,
            batch.advantages,
            clip_range=self.clip_range,
            advantage_clip=torch.inf,
        )

    def track_ratio(self, ratio: Tensor) -> None:
        """Report how far ratios [N] are from 1."""
        deviation = (ratio.detach() - 1).abs()
        self.track("ratio/max_abs_dev", deviation, reduction="max")
        self.track("ratio/clip_frac", (deviation > self.clip_range).float())

    def make_window(
        self,
        kind: type[Window],
        size: int,
        bounds: tuple[int, int] | None,
        *,
        default_bounds: tuple[int, int],
        **settings: Any,
    ) -> Window:
        """Make a window of `size` steps within `bounds`, the first step and the end, that `sde_window` names.

        Raises:
            ValueError: the bounds are not those of denoising steps, or the window does not fit them.
        """
        start, stop = default_bounds if bounds is None else bounds
        described = f"{start} to {stop}{' by default' if bounds is None else ''}"
        if not 0 <= start < stop <= self.num_steps:
            raise ValueError(
                f"`sde_window_range` must be within the {self.num_steps} steps, in order, got {described}."
            )
        if not 1 <= size <= stop - start:
            raise ValueError(
                f"`sde_window` must be in [1, {stop - start}], the number of steps in `sde_window_range`, which is "
                f"{described}, got {size}."
            )
        return kind(size=size, start=start, stop=stop, **settings)

    def check_last_step(self) -> None:
        """Check that each step that may be trained has noise.

        Raises:
            ValueError: Flow-CPS with its last step.
        """
        stop = self.num_trained_timesteps if self.window is None else self.window.stop
        if isinstance(self.kernel, FlowCPS) and stop == self.num_steps:
            raise ValueError(
                f"`timestep_fraction` or `sde_window_range` must leave out the last of the {self.num_steps} steps with "
                "kernel cps: it has no noise, so nothing of it can be trained."
            )


def _make_kernel(name: str, noise_level: float | None) -> Kernel:
    if noise_level is None:
        return _KERNELS[name]()
    if name == "wan":
        raise ValueError(
            f"`noise_level` must be null with kernel wan, which has a noise of its own, got {noise_level}."
        )
    if not noise_level > 0:
        raise ValueError(
            f"`noise_level` must be above 0, got {noise_level}: without noise a step has no log-prob to train."
        )
    if noise_level > 1 and name == "cps":
        raise ValueError(
            f"`noise_level` must be at most 1 with kernel cps, got {noise_level}: at 1 all noise is fresh."
        )
    if math.isinf(noise_level):
        raise ValueError(f"`noise_level` must be finite, got {noise_level}.")
    return _KERNELS[name](noise_level)
