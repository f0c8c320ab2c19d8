"""Denoising steps as conditional distributions: sampling the next latents, and scoring given ones.

Sigma runs from 1 (noise) to 0 (data), latents are (1 - sigma) data + sigma noise, and the velocity is
noise - data. Letters in shapes: N rows (one row is one sample at one timestep).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.functional import append_dims, mean_square


@dataclass(frozen=True)
class KernelStep:
    """A step from sigma to next_sigma, in float32, or in float64 if the latents were."""

    next_latents: Tensor  # [N, ...]
    mean: Tensor  # [N, ...] of the next latents, given the latents
    std: Tensor  # [N] conditional standard deviation, its sqrt(dt) included
    log_prob: Tensor | None  # [N] of the next latents, mean over elements; None if deterministic or not asked for


@dataclass(frozen=True)
class Kernel(ABC):
    """The distribution of the next latents, given the latents and the velocity there.

    All kernels take an Euler step along the velocity, remove a further part of the noise that the velocity
    predicts and put fresh noise in its place; a subclass says how much (`_std_and_pull`). Rollout and
    training must use equal kernels: kernels are immutable, compare by value, can be hashed and pickled.

    Example:
        >>> sigmas = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
        >>> latents, velocity, new_velocity = torch.randn(3, 2, 4, 8, 8)
        >>> place = {"sigma": sigmas[2], "next_sigma": sigmas[3], "sigma_max": sigmas[1]}
        >>> kernel = FlowSDE(noise_level=0.7)
        >>> old = kernel.step(latents, velocity, **place)
        >>> new = kernel.step(latents, new_velocity, **place, next_latents=old.next_latents)
        >>> (new.log_prob - old.log_prob).exp().shape  # the ratio, [N]
        torch.Size([2])
    """

    def step(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor | float,
        next_sigma: Tensor | float,
        *,
        sigma_max: Tensor | float,
        noise: Tensor | None = None,
        next_latents: Tensor | None = None,
        rng: torch.Generator | None = None,
        needs_log_prob: bool = True,
    ) -> KernelStep:
        """Sample the next latents, or score given ones.

        Gradients flow from the velocity into `mean`, `log_prob` and sampled `next_latents`; `log_prob` takes
        the next latents as constants. Scoring the latents an earlier call sampled gives the same `log_prob`,
        bit for bit.

        Args:
            latents: [N, ...] at `sigma`.
            velocity: [N, ...] predicted noise - data at `latents`.
            sigma: [N] or one number, in (0, 1]; rows may sit at different timesteps.
            next_sigma: [N] or one number, in [0, sigma).
            sigma_max: [N] or one number, the second value of the schedule; it bounds noise coefficients that
                have a pole at sigma 1.
            noise: [N, ...] standard normal draws to use.
            next_latents: [N, ...] to score; returned as they are.
            rng: random source to draw from if neither is given; None is torch's global one.
            needs_log_prob: whether the next latents are to be scored.

        Raises:
            ValueError: both `noise` and `next_latents` are given, or a shape differs from that of `latents`.
        """
        if noise is not None and next_latents is not None:
            raise ValueError(
                "`noise` samples the next latents and `next_latents` scores given ones: got both, give one."
            )
        for name, value in (("velocity", velocity), ("noise", noise), ("next_latents", next_latents)):
            if value is not None and value.shape != latents.shape:
                raise ValueError(
                    f"`{name}` must have the shape of `latents`, {tuple(latents.shape)}, got {tuple(value.shape)}."
                )
        # Half precision would move the log-prob by more than the usual clip ranges.
        latents = latents.to(torch.promote_types(latents.dtype, torch.float32))
        velocity = velocity.to(latents.dtype)
        sigma, next_sigma = _per_row(sigma, latents), _per_row(next_sigma, latents)
        std, pull = self._std_and_pull(sigma, next_sigma, _per_row(sigma_max, latents))

        def elementwise(row_values: Tensor) -> Tensor:
            return append_dims(row_values, latents.ndim)

        # Fewer passes over the latents round more: a guided gradient then differs by over 1e-6 between batch sizes.
        predicted_noise = latents + velocity * elementwise(1 - sigma)
        mean = latents + velocity * elementwise(next_sigma - sigma) - predicted_noise * elementwise(pull)
        if next_latents is None:
            if self.is_deterministic:
                next_latents = mean
            else:
                noise = _standard_normal(latents, rng) if noise is None else noise.to(latents.dtype)
                next_latents = mean + noise * elementwise(std)
        log_prob = None
        if needs_log_prob and not self.is_deterministic:
            log_prob = self._log_prob(next_latents.detach().to(latents.dtype) - mean, std)
        return KernelStep(next_latents=next_latents, mean=mean, std=std, log_prob=log_prob)

    @property
    @abstractmethod
    def is_deterministic(self) -> bool:
        """Whether no step adds noise, so that there is no log-prob."""

    @abstractmethod
    def _std_and_pull(self, sigma: Tensor, next_sigma: Tensor, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
        """Give the conditional std [N] and the share [N] of predicted noise to remove beside Euler's step."""

    def _log_prob(self, residual: Tensor, std: Tensor) -> Tensor:
        """Give the normal log-density of next latents - mean [N, ...], averaged over elements: [N]."""
        return -mean_square(residual) / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Euler(Kernel):
    """Euler's step of the probability-flow ODE, latents + velocity (next_sigma - sigma); no log-prob."""

    @property
    def is_deterministic(self) -> bool:
        """True."""
        return True

    def _std_and_pull(self, sigma: Tensor, next_sigma: Tensor, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(sigma), torch.zeros_like(sigma)


@dataclass(frozen=True)
class _SDE(Kernel):
    """Euler-Maruyama step of an SDE with the marginals of the ODE; subclasses give its noise coefficient.

        mean = latents + (velocity - g^2 / 2 score) (next_sigma - sigma),  std = g sqrt(sigma - next_sigma)

    with noise coefficient g(sigma) and score = -(latents + (1 - sigma) velocity) / sigma
    (Flow-GRPO, arXiv:2505.05470, eq. 9).
    """

    @property
    def is_deterministic(self) -> bool:
        """True if the noise coefficient is 0 everywhere."""
        return False

    def _std_and_pull(self, sigma: Tensor, next_sigma: Tensor, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
        dt = sigma - next_sigma
        coefficient = self._noise_coefficient(sigma, sigma_max)
        return coefficient * dt.sqrt(), coefficient.square() * dt / (2 * sigma)

    @abstractmethod
    def _noise_coefficient(self, sigma: Tensor, sigma_max: Tensor) -> Tensor:
        """Give g [N], without sqrt(dt)."""


@dataclass(frozen=True)
class FlowSDE(_SDE):
    """Flow-GRPO's step: g = noise_level sqrt(sigma / (1 - sigma)) (arXiv:2505.05470, eq. 9).

    Near sigma 1 the pole is cut off: 1 - sigma is replaced by max(1 - sigma, 1 - sigma_max), and in g only.
    At sigma 1 this is the published code's rule; unlike its test for sigma == 1 it also holds for schedules
    that start at 0.999999.
    """

    noise_level: float = 0.7
    """Scale of the noise, at least 0; 0 is the Euler step."""

    def __post_init__(self) -> None:
        """Check the noise level."""
        _check_level("noise_level", self.noise_level, math.inf)

    @property
    def is_deterministic(self) -> bool:
        """True if `noise_level` is 0."""
        return self.noise_level == 0

    def _noise_coefficient(self, sigma: Tensor, sigma_max: Tensor) -> Tensor:
        return self.noise_level * (sigma / torch.maximum(1 - sigma, 1 - sigma_max)).sqrt()


@dataclass(frozen=True)
class DanceSDE(_SDE):
    """DanceGRPO's step: g = eta at every sigma (arXiv:2505.07818, its SDE for rectified flows)."""

    eta: float = 0.3
    """Noise coefficient, at least 0; 0 is the Euler step."""

    def __post_init__(self) -> None:
        """Check the noise coefficient."""
        _check_level("eta", self.eta, math.inf)

    @property
    def is_deterministic(self) -> bool:
        """True if `eta` is 0."""
        return self.eta == 0

    def _noise_coefficient(self, sigma: Tensor, sigma_max: Tensor) -> Tensor:
        return torch.full_like(sigma, self.eta)


@dataclass(frozen=True)
class WanLinearSDE(_SDE):
    """The step of Flow-GRPO's published Wan2.1 code: g = sigma_max sigma, without a free noise level.

    A schedule of one step has sigma_max 0, so no noise and no finite log-prob: use at least two steps.
    """

    def _noise_coefficient(self, sigma: Tensor, sigma_max: Tensor) -> Tensor:
        return sigma_max * sigma


@dataclass(frozen=True)
class FlowCPS(Kernel):
    """Coefficients-preserving step (Flow-CPS, arXiv:2509.05952).

        std = next_sigma sin(noise_level pi / 2)
        mean = (1 - next_sigma) predicted data + sqrt(next_sigma^2 - std^2) predicted noise

    so that the data keep the weight the schedule gives them, and old and new noise together keep theirs. Its
    `log_prob` is -mean_el((next_latents - mean)^2), without variance and constants. That is part of the
    method: its clip ranges are not those of the SDE kernels. The last step is noiseless (std 0).
    """

    noise_level: float = 0.8
    """Share of fresh noise as an angle in quarter turns, from 0 (Euler's step) to 1 (all noise is fresh)."""

    def __post_init__(self) -> None:
        """Check the noise level."""
        _check_level("noise_level", self.noise_level, 1.0)

    @property
    def is_deterministic(self) -> bool:
        """True if `noise_level` is 0."""
        return self.noise_level == 0

    def _std_and_pull(self, sigma: Tensor, next_sigma: Tensor, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.noise_level * math.pi / 2
        # The Euler step keeps next_sigma of the predicted noise, this one next_sigma cos(angle).
        return next_sigma * math.sin(angle), next_sigma * (1 - math.cos(angle))

    def _log_prob(self, residual: Tensor, std: Tensor) -> Tensor:
        return -mean_square(residual)


def _check_level(name: str, value: float, upper: float) -> None:
    if not 0 <= value <= upper or math.isinf(value):
        interval = "[0, inf)" if math.isinf(upper) else f"[0, {upper:g}]"
        raise ValueError(
            f"`{name}` is how much noise a step adds and must be in {interval}, got {value}; "
            "use 0 for deterministic steps."
        )


def _per_row(value: Tensor | float, latents: Tensor) -> Tensor:
    """Bring a value per row, or one for all, to [N] in the type and on the device of the latents."""
    return torch.as_tensor(value, dtype=latents.dtype, device=latents.device).expand(len(latents))


def _standard_normal(latents: Tensor, rng: torch.Generator | None) -> Tensor:
    """Draw noise like `latents`, on the random source's device."""
    device = latents.device if rng is None else rng.device
    return torch.randn(latents.shape, generator=rng, dtype=latents.dtype, device=device).to(latents.device)
