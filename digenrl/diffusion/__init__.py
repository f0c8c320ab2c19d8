"""Diffusion mathematics: the kernels of a denoising step and the schedules it runs on."""

from digenrl.diffusion.kernels import DanceSDE, Euler, FlowCPS, FlowSDE, Kernel, KernelStep, WanLinearSDE
from digenrl.diffusion.sigmas import dance_sigmas, dynamic_shift_sigmas, flow_match_sigmas

__all__ = [
    "DanceSDE",
    "Euler",
    "FlowCPS",
    "FlowSDE",
    "Kernel",
    "KernelStep",
    "WanLinearSDE",
    "dance_sigmas",
    "dynamic_shift_sigmas",
    "flow_match_sigmas",
]
