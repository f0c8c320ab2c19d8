"""A module's other weights: references, old policies, averages, and which of them make the samples."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from digenrl.averaging import ConstantDecay, DecaySchedule, EveryNth, WarmupDecay
from digenrl.policies import DiffusionPolicy, VelocityField, WeightCopy

_EMA = "ema"
_ROUND = "rollout"


class WeightCopies(LightningModule):
    """The part of `DiffusionRLModule` that keeps copies of the trained weights (docs/design/weight_copies.md)."""

    policy: DiffusionPolicy

    def __init__(self) -> None:
        super().__init__()
        self.weight_copies = nn.ModuleDict()
        """By name, once the policy is built; see `add_weight_copy`."""
        self.updates_per_rollout = 1
        self._schedules: dict[str, DecaySchedule] = {}
        self._published: list[str] = []
        self._sampler: str | None = None

    def add_weight_copy(self, name: str, schedule: DecaySchedule, *, for_rollout: bool = False) -> None:
        """Keep other weights of the policy beside the trained ones; call it in the constructor.

        Args:
            name: by which `policy_copy` finds it: `"reference"`, `"old"`.
            schedule: how it follows the trained weights after each optimizer step.
            for_rollout: whether `rollout` or `sample` need it; generators then receive it with the weights.
        """
        self._schedules[name] = schedule
        if for_rollout:
            self._published.append(name)

    def add_sampler(self, name: str, schedule: DecaySchedule) -> None:
        """Let a copy of the weights make the samples that are trained; call it in the constructor.

        It follows `schedule` at the end of a round of `updates_per_rollout` steps and never changes inside one: that is
        what strategies are promised of the weights that make samples.
        """
        if self._sampler is not None:
            del self._schedules[self._sampler]
            self._published.remove(self._sampler)
        self._sampler = name
        self.add_weight_copy(name, EveryNth(schedule, self.updates_per_rollout), for_rollout=True)

    def policy_copy(self, name: str) -> WeightCopy:
        """Give the policy with other weights: called as the policy is, and without gradient."""
        copy = self.weight_copies[name]
        assert isinstance(copy, WeightCopy), "`configure_model` makes the copies"
        return copy

    @property
    def rollout_policy(self) -> VelocityField:
        """What makes the samples that are trained: the policy, or the copy that `add_sampler` named."""
        return self.policy if self._sampler is None else self.policy_copy(self._sampler)

    @property
    def sampler_steps(self) -> int:
        """Optimizer steps that the copy which makes the samples has followed; 0 if there is none."""
        return 0 if self._sampler is None else int(self.policy_copy(self._sampler).num_steps)

    @property
    def validation_policy(self) -> VelocityField:
        """What makes validation samples: the policy, or its average."""
        return self.policy_copy(_EMA) if _EMA in self._schedules else self.policy

    def update_weight_copies(self) -> None:
        """Let the copies follow an optimizer step."""
        for name in self._schedules:
            self.policy_copy(name).update()

    def published_weights(self) -> dict[str, Tensor]:
        """Give what generators receive after an optimizer step, by its name in the state: what rollouts need."""
        published: dict[str, Tensor] = {
            name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad
        }
        for name in self._published:
            published.update(self.weight_copies[name].state_dict(prefix=f"weight_copies.{name}.", keep_vars=True))
        return published

    def _add_usual_copies(self, *, updates_per_rollout: int, ema_decay: float | None, ema_interval: int) -> None:
        """Add those that every algorithm may have."""
        self.updates_per_rollout = updates_per_rollout
        if ema_decay is not None:
            if not 0 < ema_decay < 1:
                raise ValueError(f"`ema_decay` is the largest decay of an average, in (0, 1), got {ema_decay}.")
            self.add_weight_copy(_EMA, WarmupDecay(ema_decay, ema_interval), for_rollout=True)
        if updates_per_rollout > 1:
            self.add_sampler(_ROUND, ConstantDecay(0.0))

    def _build_weight_copies(self) -> None:
        for name, schedule in self._schedules.items():
            self.weight_copies[name] = WeightCopy(self.policy, schedule)
