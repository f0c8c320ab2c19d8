"""Whether generators and trainers compute the same: what is compared at the start of a fit, and how it is said."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from digenrl.types import Trajectory

log = logging.getLogger(__name__)

ParityCheck: TypeAlias = Literal["raise", "warn", "off"]
"""What a deviation at the start of a fit does."""

NUM_SAMPLES = 2
"""That each generator makes for the comparison; a group has as many."""

_ANYWAY = "or set `parity_check` to warn to run anyway"


class ParityError(RuntimeError):
    """Generators and trainers do not compute the same, or a rollout is not what training needs."""


@dataclass(frozen=True)
class Tolerances:
    """How far rollout and training may part by rounding, which batches of other sizes and sharded weights may change.

    Trainers recompute each batch as it was made, so that on one kind of device there is mostly none.
    """

    ratio: float
    """Of |ratio - 1|, over all recorded steps."""
    velocity: float
    """Of the largest difference, as a part of the largest entry."""

    @classmethod
    def of(cls, device: str, *, in_half: bool) -> Tolerances:
        """Give those of a kind of device.

        Measured on tiny models of five families on CPUs: there is no difference in equal batches. In others ratios part
        by at most 2.4e-7 in float32 and 2.4e-4 in bfloat16 (noise level 0.3 and above; less noise magnifies it), by the
        usual mistakes (a timestep rounded to half precision, latents scored before their cast) by 7e-4 to 3e-3. The
        values for CUDA are wider and provisional: they have not been measured.

        Args:
            device: cpu or cuda.
            in_half: whether any part of the policy computes in half precision.
        """
        return _TOLERANCES[device, in_half]


_TOLERANCES = {
    ("cpu", False): Tolerances(ratio=1e-6, velocity=1e-5),
    ("cpu", True): Tolerances(ratio=5e-4, velocity=2e-2),
    ("cuda", False): Tolerances(ratio=1e-5, velocity=1e-4),
    ("cuda", True): Tolerances(ratio=1e-3, velocity=2e-2),
}


@dataclass(frozen=True)
class ParitySample:
    """What a generator makes for the comparison."""

    trajectory: Trajectory  # B samples
    noise: Tensor  # [B, ...] float32 that it starts from
    velocity: Tensor  # [B, ...] float32 there, guided, of the policy that makes samples

    def to(self, device: torch.device | str, *, copy: bool = False) -> ParitySample:
        """Move all tensors to `device`; `copy` makes new ones even if they are there."""
        return ParitySample(
            self.trajectory.to(device, copy=copy),
            self.noise.to(device, copy=copy),
            self.velocity.to(device, copy=copy),
        )

    def find_fault(self, *, version: int, num_steps: int, recorded: range, latent_shape: tuple[int, ...]) -> str | None:
        """Say what of the rollout does not fit its training, if anything; see `Trajectory`."""
        if self.trajectory.policy_version != version:
            return f"its rollout is of policy version {self.trajectory.policy_version}, the trainers are at {version}"
        return find_misfit(self.trajectory, num_steps, recorded, latent_shape) or find_not_finite(
            {**named_tensors(self.trajectory), "velocity": self.velocity}
        )


@dataclass(frozen=True)
class ParityMeasure:
    """What one trainer finds of what one generator has made."""

    tolerances: Tolerances
    fault: str | None = None
    """Of the rollout itself; nothing is recomputed then."""
    ratio: float | None = None
    """Largest |ratio - 1|; None where there are no log-probs."""
    velocity: float | None = None
    """Largest difference, as a part of the largest entry."""


@dataclass(frozen=True)
class GeneratorParity:
    """What was found of one generator."""

    generator: str
    changed: Mapping[str, str]
    """Tensors that are not as they were published, by the rank that holds them."""
    measures: Mapping[str, ParityMeasure]
    """By trainer."""

    def fault(self) -> str | None:
        """Say in one line what is wrong, the most basic first, if anything is."""
        for rank, tensor in self.changed.items():
            return (
                f"parity check of {self.generator}: what {rank} holds of {tensor} is not what was published last, by "
                f"its digest; change weights by optimizer steps and `load_state_dict` only, {_ANYWAY}."
            )
        for trainer, measure in self.measures.items():
            if measure.fault is not None:
                return f"parity check of {self.generator}: {measure.fault}; mend `rollout` or the policy, {_ANYWAY}."
            found = (
                ("velocity at its initial noise", "parts by", measure.velocity, measure.tolerances.velocity),
                ("ratio of its recorded steps", "leaves 1 by", measure.ratio, measure.tolerances.ratio),
            )
            for quantity, verb, value, tolerance in found:
                if value is not None and not value <= tolerance:
                    return (
                        f"parity check of {self.generator}: the {quantity}, recomputed by {trainer}, {verb} "
                        f"{value:.3g}, tolerance {tolerance:g}; let `velocity` depend on its arguments and the trained "
                        f"weights alone, {_ANYWAY}."
                    )
        return None

    def clip_warning(self, clip_range: float | None) -> str | None:
        """Say where rounding alone leaves a clip range, if it does."""
        ratio = self.largest("ratio")
        if clip_range is None or ratio is None or not ratio > clip_range:
            return None
        return (
            f"parity check of {self.generator}: the ratio of its recorded steps leaves 1 by {ratio:.3g} before any "
            f"update, more than `clip_range` {clip_range:g}, which cuts off gradients: raise it, or use "
            "`precision` 32-true."
        )

    def largest(self, quantity: Literal["ratio", "velocity"]) -> float | None:
        """Give the largest of the trainers' values, NaN being larger than all; None if there is none."""
        return largest(getattr(measure, quantity) for measure in self.measures.values())


@dataclass(frozen=True)
class ParityReport:
    """What was found of all generators."""

    generators: tuple[GeneratorParity, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Give the largest deviations, for loggers."""
        found = {
            name: largest(entry.largest(quantity) for entry in self.generators) for name, quantity in _METRICS.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def settle(self, mode: ParityCheck, clip_range: float | None) -> None:
        """Raise, or warn, for each generator of which something is wrong.

        Args:
            mode: which of the two; a ratio that is within its tolerance and beyond `clip_range` is only warned of.
            clip_range: how far the algorithm lets the ratio leave 1; None if it does not.

        Raises:
            ParityError: something is wrong, and `mode` says so.
        """
        faults = [fault for entry in self.generators if (fault := entry.fault()) is not None]
        if faults and mode == "raise":
            raise ParityError(faults[0])
        for fault in faults:
            log.warning("%s", fault)
        for entry in self.generators:
            warning = entry.clip_warning(clip_range)
            if warning is not None and entry.fault() is None:
                log.warning("%s", warning)


_METRICS: dict[str, Literal["ratio", "velocity"]] = {
    "parity/ratio_max_abs_dev": "ratio",
    "parity/velocity_max_dev": "velocity",
}


def find_misfit(trajectory: Trajectory, num_steps: int, recorded: range, latent_shape: tuple[int, ...]) -> str | None:
    """Say which shape of a trajectory is not what `Trajectory` documents, if one is not.

    Args:
        trajectory: of B samples.
        num_steps: T.
        recorded: the K steps that were to be recorded; the trajectory may have none, for losses on final latents.
        latent_shape: of one sample's latents.
    """
    sigmas, num_samples = trajectory.sigmas, len(trajectory)
    if sigmas.shape != (num_steps + 1,):
        return f"`sigmas` of {num_steps} steps must be [{num_steps + 1}], got {list(sigmas.shape)}"
    if not (sigmas.diff() < 0).all() or sigmas[-1] != 0:
        return f"`sigmas` must fall to 0, got {[round(value, 4) for value in sigmas.tolist()]}"
    if trajectory.timestep_indices and trajectory.timestep_indices != tuple(recorded):
        return f"`timestep_indices` must be {list(recorded)}, got {list(trajectory.timestep_indices)}"
    num_recorded = len(trajectory.timestep_indices)
    expected = {
        "final_latents": (num_samples, *latent_shape),
        "latents": (num_samples, num_recorded + 1, *latent_shape),
        "old_means": (num_samples, num_recorded, *latent_shape),
        "old_log_probs": (num_samples, num_recorded),
    }
    for name, shape in expected.items():
        value: Tensor | None = getattr(trajectory, name)
        if value is not None and value.shape != shape:
            return f"`{name}` must be {list(shape)}, got {list(value.shape)}"
    old = trajectory.old_log_probs
    if old is not None and old.dtype not in (torch.float32, torch.float64):
        return f"`old_log_probs` must be float32, which rounding would move too far, got {old.dtype}"
    return None


def named_tensors(trajectory: Trajectory) -> dict[str, Tensor]:
    """Give all tensors of a trajectory and its condition, by name."""
    names = ("sigmas", "latents", "final_latents", "old_log_probs", "old_means")
    found = {name: value for name in names if (value := getattr(trajectory, name)) is not None}
    for entry in fields(trajectory.condition):
        value = getattr(trajectory.condition, entry.name)
        if isinstance(value, Tensor):
            found[f"condition.{entry.name}"] = value
    return found


def find_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name the first tensor with a number that is not finite, if one has any."""
    for name, value in tensors.items():
        if value.is_floating_point() and not (is_finite := value.isfinite()).all():
            return (
                f"`{name}` of its rollout has {int((~is_finite).sum())} of {value.numel()} numbers that are not finite"
            )
    return None


def velocity_deviation(velocity: Tensor, reference: Tensor) -> float:
    """Give the largest difference of two tensors of one shape, as a part of the reference's largest entry."""
    difference, largest = (velocity.float() - reference).abs().max().item(), reference.abs().max().item()
    if difference == 0:
        return 0.0
    return difference / largest if largest > 0 else math.inf


def ratio_deviation(log_prob: Tensor, old_log_prob: Tensor) -> float:
    """Give the largest |ratio - 1| of new and old log-probs, each [B]."""
    return torch.expm1(log_prob.double() - old_log_prob.double()).abs().max().item()


def largest(values: Iterable[float | None]) -> float | None:
    """Give the largest of those that are not None, NaN being larger than all; None if there is none."""
    return max(
        (value for value in values if value is not None), key=lambda value: (math.isnan(value), value), default=None
    )
