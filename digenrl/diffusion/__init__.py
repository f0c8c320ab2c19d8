"""Diffusion mathematics: the kernels of a denoising step, the schedules they run on, and samplers."""

from digenrl.diffusion.guidance import classifier_free_guidance
from digenrl.diffusion.kernels import DanceSDE, Euler, FlowCPS, FlowSDE, Kernel, KernelStep, WanLinearSDE
from digenrl.diffusion.noise import sample_noise
from digenrl.diffusion.sampling import SampledPath, VelocityFunction, sample_dpm_solver, sample_ode, sample_sde
from digenrl.diffusion.sigmas import (
    compress_sigmas,
    dance_sigmas,
    dpm_sigmas,
    dynamic_shift_sigmas,
    flow_match_sigmas,
    unipc_sigmas,
)
from digenrl.diffusion.windows import (
    ExponentialDecayWindow,
    LinearDecayWindow,
    RandomWindow,
    SlidingWindow,
    Window,
    random_timesteps,
    shared_timesteps,
)

__all__ = [
    "DanceSDE",
    "Euler",
    "ExponentialDecayWindow",
    "FlowCPS",
    "FlowSDE",
    "Kernel",
    "KernelStep",
    "LinearDecayWindow",
    "RandomWindow",
    "SampledPath",
    "SlidingWindow",
    "VelocityFunction",
    "WanLinearSDE",
    "Window",
    "classifier_free_guidance",
    "compress_sigmas",
    "dance_sigmas",
    "dpm_sigmas",
    "dynamic_shift_sigmas",
    "flow_match_sigmas",
    "random_timesteps",
    "sample_dpm_solver",
    "sample_noise",
    "sample_ode",
    "sample_sde",
    "shared_timesteps",
    "unipc_sigmas",
]
