"""A module's outline without its weights: what the driver holds instead of a model.

Workers describe the module they built; the driver installs the same names, shapes and dtypes on the meta device.
`parameters()`, `configure_optimizers`, model summaries and checkpoint keys then work as usual, in zero bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class TensorOutline:
    """A parameter or buffer, or a second name of one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    tied_to: str | None
    """Full name of the parameter that this one is the same as."""
    persistent: bool = True
    """Whether a buffer is part of the state dict."""


@dataclass(frozen=True)
class ModuleOutline:
    """One submodule."""

    path: str
    class_name: str
    parameters: tuple[TensorOutline, ...]
    buffers: tuple[TensorOutline, ...]


class RemoteSubmodule(nn.Module):
    """Stands in the driver for a submodule that exists on workers only."""

    class_name: str = "RemoteSubmodule"

    def _get_name(self) -> str:  # what model summaries print
        return self.class_name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there is nothing to compute with."""
        raise RuntimeError(
            f"`{self.class_name}` has its weights on workers; call it inside `rollout`, `score`, `timestep_loss` or "
            "`validation_step`, which run there."
        )


def describe(module: nn.Module) -> tuple[ModuleOutline, ...]:
    """Describe all submodules of `module`, itself first."""
    first_name: dict[int, str] = {}
    outlines = []
    for path, submodule in module.named_modules():
        parameters = []
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{path}.{name}" if path else name
            tied_to = first_name.setdefault(id(parameter), full_name)
            parameters.append(
                TensorOutline(
                    name,
                    tuple(parameter.shape),
                    parameter.dtype,
                    parameter.requires_grad,
                    None if tied_to == full_name else tied_to,
                )
            )
        buffers = tuple(
            TensorOutline(
                name,
                tuple(buffer.shape),
                buffer.dtype,
                False,
                None,
                persistent=name not in submodule._non_persistent_buffers_set,
            )
            for name, buffer in submodule.named_buffers(recurse=False)
        )
        outlines.append(ModuleOutline(path, type(submodule).__name__, tuple(parameters), buffers))
    return tuple(outlines)


def install(module: nn.Module, outlines: Sequence[ModuleOutline]) -> None:
    """Give `module` the outlined submodules, parameters and buffers, on the meta device."""
    parameters: dict[str, nn.Parameter] = {}
    for outline in outlines:
        target = _target(module, outline)
        for entry in outline.parameters:
            full_name = f"{outline.path}.{entry.name}" if outline.path else entry.name
            if entry.tied_to is None:
                empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                parameters[full_name] = nn.Parameter(empty, requires_grad=entry.requires_grad)
            else:
                parameters[full_name] = parameters[entry.tied_to]
            target.register_parameter(entry.name, parameters[full_name])
        for entry in outline.buffers:
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            target.register_buffer(entry.name, empty, persistent=entry.persistent)


def remove(module: nn.Module) -> None:
    """Take away what `install` added."""
    for submodule in list(_own_modules(module)):
        for name, child in list(submodule.named_children()):
            if isinstance(child, RemoteSubmodule):
                delattr(submodule, name)
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            if parameter.is_meta:
                delattr(submodule, name)
        for name, buffer in list(submodule.named_buffers(recurse=False)):
            if buffer.is_meta:
                delattr(submodule, name)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    return (submodule for submodule in module.modules() if not isinstance(submodule, RemoteSubmodule))


def _target(module: nn.Module, outline: ModuleOutline) -> nn.Module:
    parent_path, _, name = outline.path.rpartition(".")
    parent = module.get_submodule(parent_path)
    if not outline.path:
        return module
    if name not in parent._modules:
        stand_in = RemoteSubmodule()
        stand_in.class_name = outline.class_name
        parent.add_module(name, stand_in)
    return module.get_submodule(outline.path)
