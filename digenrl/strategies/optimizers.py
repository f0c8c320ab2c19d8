"""Optimizers made in the driver, on parameters without weights, and bound to the real ones on a worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from digenrl.policies.shards import full_tensor, local_tensor, shard_of, with_rows

_COMMON_ATTRIBUTES = frozenset(
    # LR schedulers put the last two on the driver's optimizer.
    [*vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)), "step", "_opt_called"]
)

_ORIGIN = "driver_group"
"""Key under which a parameter group says which of the driver's groups it is a part of."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer without its state; parameters are named."""

    optimizer_class: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    """Parameter groups, whose `"params"` are parameter names."""
    attributes: Mapping[str, Any]
    """What the optimizer's class keeps on the instance beside what all optimizers have."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, module: nn.Module) -> OptimizerSpec:
        """Describe an optimizer over `module`'s parameters.

        Raises:
            ValueError: the optimizer holds a parameter that is not the module's.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"`configure_optimizers` gave {type(optimizer).__name__} a parameter of shape "
                        f"{list(parameter.shape)} that is not one of the module's."
                    )
        groups = tuple(
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        )
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _COMMON_ATTRIBUTES}
        return cls(type(optimizer), dict(optimizer.defaults), groups, attributes)

    def bind(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer over the parameters of the same names.

        Sharded ones get a parameter group of their own: optimizers that handle a group in one call take either kind.
        """
        parameters = dict(module.named_parameters())
        optimizer = self.optimizer_class.__new__(self.optimizer_class)
        vars(optimizer).update(self.attributes)
        # Not `__init__`: its arguments need not be the defaults' names (AdamW's are not).
        optimizer.__setstate__(
            {
                "defaults": dict(self.defaults),
                "state": defaultdict(dict),
                "param_groups": [
                    {**group, "params": members, _ORIGIN: index}
                    for index, group in enumerate(self.groups)
                    for members in _by_kind([parameters[name] for name in group["params"]])
                ],
            }
        )
        return optimizer


def _by_kind(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return list(kinds.values()) or [[]]


def update_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Take over the hyper-parameters of the driver's parameter groups."""
    assert {group[_ORIGIN] for group in optimizer.param_groups} == set(range(len(settings))), "made by `bind`"
    for group in optimizer.param_groups:
        group.update(settings[group[_ORIGIN]])


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Give each group's settings (learning rate and so on) without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def changed_settings(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the settings of each group that are configured otherwise now.

    Raises:
        ValueError: the number of groups has changed.
    """
    if len(old) != len(new):
        raise ValueError(
            f"the checkpoint's optimizer has {len(old)} parameter groups, but {len(new)} are configured now."
        )
    return [
        {name: value for name, value in settings.items() if name in before and before[name] != value}
        for before, settings in zip(old, new, strict=True)
    ]


def named_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, *, keeps: bool = True
) -> dict[str, dict[str, Any]]:
    """Give the optimizer's state by parameter name, on the CPU, sharded tensors as wholes.

    All ranks call it together, and gather tensor by tensor; one that has no use for the result `keeps` nothing.
    """
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if parameter in optimizer.state:
            entries = state[name] = {}
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, DTensor):  # its ranks exchange what is on the device, and it may be in host memory
                    value = value.to(local_tensor(parameter).device)
                whole = full_tensor(value.detach()) if isinstance(value, Tensor) else value
                if keeps:
                    entries[key] = whole.to("cpu", copy=True) if isinstance(whole, Tensor) else whole
    return state


def load_named_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Replace the optimizer's state by one from `named_state`.

    Raises:
        ValueError: a name that is not one of the module's parameters.
    """
    parameters = dict(module.named_parameters())
    unknown: Sequence[str] = sorted(set(state) - set(parameters))
    if unknown:
        raise ValueError(f"the checkpoint has optimizer state of unknown parameters: {', '.join(unknown[:5])}.")
    is_step_on_device = {
        id(parameter): bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for name, entries in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: _placed(key, value, parameter, is_step_on_device[id(parameter)]) for key, value in entries.items()
        }


def _placed(key: str, value: Any, parameter: nn.Parameter, is_step_on_device: bool) -> Any:
    """Copy an entry to where the optimizer wants it: `step` counters stay on the CPU unless it needs them elsewhere."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return shard_of(value, parameter)
    return value.to("cpu" if key == "step" and not is_step_on_device else parameter.device, copy=True)


@dataclass(frozen=True)
class TrainingState:
    """Gradients and optimizer state of a trainer while they are in host memory, to make room for generation."""

    gradients: dict[nn.Parameter, _HostTensor]
    tensors: dict[tuple[nn.Parameter, str], _HostTensor]

    @classmethod
    def take(
        cls, optimizer: torch.optim.Optimizer, gradient_holders: Sequence[nn.Parameter] | None = None
    ) -> TrainingState:
        """Move them to host memory, bit by bit the same; the parameters keep only their values.

        Args:
            optimizer: with its state.
            gradient_holders: whose `grad` has the gradients; None is the optimizer's parameters.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients, tensors = {}, {}
        for holder in parameters if gradient_holders is None else gradient_holders:
            if holder.grad is not None:
                gradients[holder] = _HostTensor.of(holder.grad)
                holder.grad = None
        for parameter in parameters:
            entries = optimizer.state.get(parameter, {})
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    tensors[parameter, key] = _HostTensor.of(value)
                    entries[key] = torch.empty(0, dtype=value.dtype, device=local_tensor(value).device)
        return cls(gradients, tensors)

    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Move them back to where they were."""
        for holder, gradient in self.gradients.items():
            assert holder.grad is None, "a gradient was accumulated while the training state was away"
            holder.grad = gradient.on_device()
        for (parameter, key), value in self.tensors.items():
            optimizer.state[parameter][key] = value.on_device()


@dataclass(frozen=True)
class _HostTensor:
    """A copy of this rank's part of a tensor in host memory, and what it takes to make the tensor of it again."""

    part: Tensor
    device: torch.device
    like: DTensor | None
    """Without memory; None if the tensor was not sharded."""

    @classmethod
    def of(cls, tensor: Tensor) -> _HostTensor:
        part = local_tensor(tensor)
        like = with_rows(part.to("meta"), tensor) if isinstance(tensor, DTensor) else None
        return cls(part.to("cpu", copy=True), part.device, like)

    def on_device(self) -> Tensor:
        part = self.part.to(self.device)
        return part if self.like is None else with_rows(part, self.like)
