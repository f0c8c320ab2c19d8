"""Flow-GRPO and what belongs to it: its fast variant, its other kernels, its KL term."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.algorithms.checks import check_has_effect, check_kl_weights
from digenrl.algorithms.reverse_process import KernelName, ReverseProcessModule
from digenrl.averaging import NoUpdates
from digenrl.diffusion import FlowCPS, RandomWindow
from digenrl.functional import kl_to_reference, mean_square
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, RowLosses, TimestepBatch, Trajectory

_REFERENCE = "reference"


class FlowGRPO(ReverseProcessModule):
    """Flow-GRPO: group-relative policy optimization of flow models (arXiv:2505.05470).

    The ODE sampler becomes an SDE with the same marginals (eq. 9), each of its steps a Gaussian policy; samples
    of one prompt are compared with each other (eq. 4), and each recorded step is trained with PPO's clipped
    surrogate (eq. 5).

    Flow-GRPO-Fast is `sde_window`: only a few steps are stochastic and trained. Flow-CPS (arXiv:2509.05952) is
    `kernel="cps"`.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 24,
        num_steps: int = 10,
        timestep_fraction: float | None = None,
        kernel: KernelName = "flow",
        noise_level: float | None = None,
        sde_window: int | None = None,
        sde_window_range: tuple[int, int] | None = None,
        clip_range: float = 1e-4,
        kl_beta: float = 0.0,
        kl_form: Literal["code", "paper"] = "code",
        lr: float = 3e-4,
        **settings: Any,
    ) -> None:
        """Defaults are close to the authors' SD3.5-M settings.

        These differ in the advantages' std, which is the step's, in the guidance, 4.5, in `kl_beta`, 0.04 and 0.01, in
        `updates_per_rollout`, 2, and in the average that is validated, of `ema_decay` 0.9.

        Args:
            policy: see `DiffusionRLModule`, as for `settings` and the other arguments not named here.
            reward: see there.
            group_size: see there.
            num_steps: see there.
            timestep_fraction: see there; None is 0.9, which leaves out the last of 10 steps, whose distribution is very
                peaked. Not with `sde_window`, whose steps are all trained.
            kernel: how noise enters a step: `"flow"`, `"dance"`, `"cps"` or `"wan"`.
            noise_level: how much; None is the published value of the kernel: 0.7 of `"flow"`, 0.3 of `"dance"`, 0.8 of
                `"cps"`. `"wan"` has a noise of its own and takes None only.
            sde_window: number of consecutive steps that are stochastic and trained, the others follow the ODE; None is
                all steps. A window is drawn for each training step.
            sde_window_range: first step a window may begin with, and the end of the last; None is (0, half the steps).
            clip_range: how far the ratio may leave 1 before its gradient is cut.
            kl_beta: weight of the KL divergence to the policy that training started from; 0 is without.
            kl_form: `"code"` is dt times the divergence, as published code has it, `"paper"` the divergence itself; not
                with `"cps"`, which has a form of its own.
            lr: see there.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds, or two that do not go together.
        """
        if num_steps == 1 and sde_window is None and timestep_fraction is None:
            raise ValueError(
                "`num_steps` must be at least 2, got 1: the last step is not trained; or set `timestep_fraction` to 1."
            )
        default_fraction = 0.9 if sde_window is None else 1.0
        super().__init__(
            policy,
            reward,
            group_size=group_size,
            num_steps=num_steps,
            timestep_fraction=default_fraction if timestep_fraction is None else timestep_fraction,
            kernel=kernel,
            noise_level=noise_level,
            clip_range=clip_range,
            lr=lr,
            **settings,
        )
        if kl_form not in ("code", "paper"):
            raise ValueError(f"`kl_form` must be code or paper, got {kl_form!r}.")
        check_kl_weights(kl_beta=kl_beta)
        if kl_beta == 0:
            check_has_effect("`kl_beta` 0", kl_form=(kl_form, "code"))
        if kernel == "cps" and kl_beta > 0 and kl_form != "code":
            raise ValueError(
                f"`kl_form` must be code with kernel cps, got {kl_form}: its divergence is the mean square "
                "between the means, which has no other form."
            )
        if sde_window is not None:
            if timestep_fraction is not None:
                raise ValueError(
                    f"`timestep_fraction` must be left out with `sde_window`, got {timestep_fraction}: all steps "
                    "of the window are trained."
                )
            self.num_trained_timesteps = sde_window
            self.window = self.make_window(
                RandomWindow, sde_window, sde_window_range, default_bounds=(0, num_steps // 2)
            )
        elif sde_window_range is not None:
            raise ValueError("`sde_window_range` bounds a window, but `sde_window` gives none; set both or neither.")
        self.check_last_step()
        self.kl_beta = kl_beta
        self.kl_form: Literal["code", "paper"] = kl_form
        if kl_beta > 0:
            self.add_weight_copy(_REFERENCE, NoUpdates())

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample with the SDE, in the window if there is one."""
        return self.sample_trajectory(prompts, self.kernel, sde_steps=self.sde_steps(prompts.step))

    def timestep_loss(self, batch: TimestepBatch) -> Tensor | RowLosses:
        """Give the surrogate of each recorded step, eq. 5, and the KL divergence if it has a weight."""
        step = self.score_step(batch)
        losses = self.surrogate(batch, step)
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
