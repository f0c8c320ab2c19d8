"""MixGRPO and its fast variant, MixGRPO-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

from torch import Tensor

from digenrl.algorithms.reverse_process import KernelName, ReverseProcessModule
from digenrl.diffusion import (
    ExponentialDecayWindow,
    LinearDecayWindow,
    RandomWindow,
    SlidingWindow,
    Window,
    compress_sigmas,
)
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward
from digenrl.types import PromptBatch, Trajectory

WindowStrategy = Literal["progressive", "random", "decay", "exp_decay"]
_WINDOWS: dict[str, type[Window]] = {
    "progressive": SlidingWindow,
    "random": RandomWindow,
    "decay": LinearDecayWindow,
    "exp_decay": ExponentialDecayWindow,
}


class MixGRPO(ReverseProcessModule):
    """MixGRPO: stochastic steps in a window, the ODE around it (arXiv:2507.21802).

    Only the window is trained. It moves from high noise to low noise in the course of training, and then begins anew;
    it never shrinks at the end, as the published code's does. The samples of a group start from the same noise, so they
    differ by the noise of the window alone.

    MixGRPO-Flash is `flash`: what follows the window is solved in fewer steps by DPM-Solver++.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int = 12,
        num_steps: int = 25,
        kernel: KernelName = "flow",
        noise_level: float | None = None,
        sde_window: int = 4,
        sde_window_range: tuple[int, int] | None = None,
        window_strategy: WindowStrategy = "progressive",
        stride: int | None = None,
        steps_per_window: int | None = None,
        roll_back: bool | None = None,
        min_steps_per_window: int | None = None,
        decay_rate: float | None = None,
        decay_threshold: int | None = None,
        flash: bool = False,
        tail_ratio: float | None = None,
        tail_shift: float | None = None,
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
            kernel: how noise enters a step: `"flow"`, `"dance"`, `"cps"` or `"wan"`.
            noise_level: how much; None is the published value of the kernel: 0.7 of `"flow"`, 0.3 of `"dance"`, 0.8 of
                `"cps"`. `"wan"` has a noise of its own and takes None only.
            sde_window: number of consecutive steps that are stochastic and trained.
            sde_window_range: first step a window may begin with, and the end of the last; None is all steps but the
                last.
            window_strategy: how the window moves: `"progressive"` at an even pace, `"decay"` and `"exp_decay"` ever
                faster, or to a `"random"` place in each training step.
            stride: denoising steps that the window moves by; None is 1. Not with `"random"`.
            steps_per_window: training steps that the window rests, at first if it moves ever faster; None is 25. Not
                with `"random"`.
            roll_back: whether the window begins anew after its last place; None is True. Not with `"random"`.
            min_steps_per_window: training steps that it rests at the end, with `"decay"`; None is 1.
            decay_rate: decay of its rest per denoising step, with `"exp_decay"`; None is 0.1.
            decay_threshold: denoising step from which it decays, with `"exp_decay"`; None is 13.
            flash: solve what follows the window on fewer steps.
            tail_ratio: share of the remaining sigmas that these have, with `flash`; None is 0.4.
            tail_shift: shift of the policy's schedule, which these follow, with `flash`; None is 3.
            clip_range: how far the ratio may leave 1 before its gradient is cut.
            init_same_noise: see `ReverseProcessModule`.
            advantage_ddof: see `DiffusionRLModule`.
            advantage_eps: see there.
            lr: see there.
            **settings: see there, all but `timestep_fraction`.

        Raises:
            ValueError: a setting outside its bounds, or two that do not go together.
        """
        if "timestep_fraction" in settings:
            raise ValueError(
                f"`timestep_fraction` must be left out with MixGRPO, got {settings['timestep_fraction']}: `sde_window` "
                "says how many steps are trained."
            )
        super().__init__(
            policy,
            reward,
            group_size=group_size,
            num_steps=num_steps,
            kernel=kernel,
            noise_level=noise_level,
            clip_range=clip_range,
            init_same_noise=init_same_noise,
            timestep_fraction=1.0,
            advantage_ddof=advantage_ddof,
            advantage_eps=advantage_eps,
            lr=lr,
            **settings,
        )
        if window_strategy not in get_args(WindowStrategy):
            raise ValueError(
                f"`window_strategy` must be one of {', '.join(get_args(WindowStrategy))}, got {window_strategy!r}."
            )
        movement = {
            "stride": stride,
            "steps_per_window": steps_per_window,
            "roll_back": roll_back,
            "min_steps_per_window": min_steps_per_window,
            "decay_rate": decay_rate,
            "decay_threshold": decay_threshold,
        }
        self.window = self.make_window(
            _WINDOWS[window_strategy],
            sde_window,
            sde_window_range,
            default_bounds=(0, num_steps - 1),
            **_window_settings(window_strategy, movement),
        )
        self.num_trained_timesteps = sde_window
        self.check_last_step()
        for name, value in {"tail_ratio": tail_ratio, "tail_shift": tail_shift}.items():
            if value is not None and not flash:
                raise ValueError(f"`{name}` belongs to MixGRPO-Flash, got {value}; set `flash` or leave it out.")
        self.flash = flash
        self.tail_ratio = 0.4 if tail_ratio is None else tail_ratio
        self.tail_shift = 3.0 if tail_shift is None else tail_shift
        if not 0 < self.tail_ratio <= 1:
            raise ValueError(f"`tail_ratio` is the share of sigmas to keep and must be in (0, 1], got {tail_ratio}.")
        if not 0 < self.tail_shift < float("inf"):
            raise ValueError(f"`tail_shift` must be positive and finite, got {tail_shift}; 1 spaces sigmas evenly.")

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample with the SDE in the window and with the ODE around it."""
        window = self.recorded_steps(prompts.step)
        return self.sample_trajectory(prompts, self.kernel, sde_steps=window, tail_sigmas=self.tail_sigmas(window))

    def tail_sigmas(self, window: range) -> Tensor | None:
        """Give the schedule that follows a window, [M+1] to 0; None is the rest of the policy's own."""
        if not self.flash or window.stop == self.num_steps:
            return None
        sigmas = self.policy.sigmas(self.num_steps).to(self.device)
        return compress_sigmas(sigmas, start=window.stop, ratio=self.tail_ratio, shift=self.tail_shift)


def _window_settings(strategy: str, movement: Mapping[str, Any]) -> dict[str, Any]:
    """Give those settings of a strategy's window that are not None.

    Raises:
        ValueError: a setting of another strategy.
    """
    known = {name: {field.name for field in fields(window)} for name, window in _WINDOWS.items()}
    for name, value in movement.items():
        if value is not None and name not in known[strategy]:
            owners = " or ".join(owner for owner in known if name in known[owner])
            raise ValueError(
                f"`{name}` belongs to `window_strategy` {owners}, got {value} with {strategy}; leave it out."
            )
    return {name: value for name, value in movement.items() if value is not None}
