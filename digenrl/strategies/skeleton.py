"""A module's outline without its weights: what the driver holds instead of a model.

Workers describe the module they built; the driver installs the same names, shapes and dtypes on the meta device.
`parameters()`, `configure_optimizers`, model summaries and checkpoint keys then work as usual, in zero bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn


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
    same_as: str | None
    """Path of the submodule that this one is the same as."""
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


@dataclass(frozen=True)
class _Backup:
    """What a module of the driver had before the skeleton took its place."""

    module: ReferenceType[nn.Module]
    """Weak: a module is the key of its own backup, and must be able to go."""
    modules: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    non_persistent: set[str]
    placeholders: dict[str, Any]
    """Plain attributes, such as None, under the name of a part that workers have."""


_backups: WeakKeyDictionary[nn.Module, list[_Backup]] = WeakKeyDictionary()


def describe(module: nn.Module) -> tuple[ModuleOutline, ...]:
    """Describe all submodules of `module`, itself first."""
    first_name: dict[int, str] = {}
    outlines = []
    for path, submodule in module.named_modules(remove_duplicate=False):
        first_path = first_name.setdefault(id(submodule), path)
        if first_path != path:
            outlines.append(ModuleOutline(path, type(submodule).__name__, first_path, (), ()))
            continue
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
        outlines.append(ModuleOutline(path, type(submodule).__name__, None, tuple(parameters), buffers))
    return tuple(outlines)


def install(module: nn.Module, outlines: Sequence[ModuleOutline]) -> None:
    """Give `module` the outlined submodules, parameters and buffers, on the meta device; `remove` undoes it."""
    backups: dict[nn.Module, _Backup] = {}
    placed: dict[str, nn.Module] = {}
    parameters: dict[str, nn.Parameter] = {}
    for outline in outlines:
        target = placed[outline.path] = _place(module, outline, placed, backups)
        if outline.same_as is not None:
            continue
        if not isinstance(target, RemoteSubmodule):
            backups[target] = _empty(target)
        for entry in outline.parameters:
            full_name = f"{outline.path}.{entry.name}" if outline.path else entry.name
            if entry.tied_to is None:
                empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                parameters[full_name] = nn.Parameter(empty, requires_grad=entry.requires_grad)
            else:
                parameters[full_name] = parameters[entry.tied_to]
            _clear_the_way(target, entry.name, backups)
            target.register_parameter(entry.name, parameters[full_name])
        for entry in outline.buffers:
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            _clear_the_way(target, entry.name, backups)
            target.register_buffer(entry.name, empty, persistent=entry.persistent)
    _backups[module] = list(backups.values())


def remove(module: nn.Module) -> None:
    """Give `module` back what it had before `install`."""
    for backup in _backups.pop(module, []):
        target = backup.module()
        assert target is not None, "a part of a module that is still there"
        target._modules = dict(backup.modules)
        target._parameters = dict(backup.parameters)
        target._buffers = dict(backup.buffers)
        target._non_persistent_buffers_set = set(backup.non_persistent)
        vars(target).update(backup.placeholders)


def _place(
    module: nn.Module, outline: ModuleOutline, placed: dict[str, nn.Module], backups: dict[nn.Module, _Backup]
) -> nn.Module:
    """Give the submodule at the outline's path: the driver's own where it has one, else a stand-in."""
    if not outline.path:
        return module
    parent_path, _, name = outline.path.rpartition(".")
    parent = placed[parent_path]
    if name in parent._modules:  # below a submodule that was placed under another name before
        submodule = parent._modules[name]
        assert submodule is not None
        return submodule
    own = backups[parent].modules.get(name) if parent in backups else None
    if outline.same_as is not None:
        own = placed[outline.same_as]
    if own is None:
        own = RemoteSubmodule()
        own.class_name = outline.class_name
    _clear_the_way(parent, name, backups)
    parent.add_module(name, own)
    return own


def _empty(target: nn.Module) -> _Backup:
    backup = _Backup(
        ref(target),
        dict(target._modules),
        dict(target._parameters),
        dict(target._buffers),
        set(target._non_persistent_buffers_set),
        {},
    )
    target._modules, target._parameters, target._buffers = {}, {}, {}
    target._non_persistent_buffers_set = set()
    return backup


def _clear_the_way(target: nn.Module, name: str, backups: dict[nn.Module, _Backup]) -> None:
    if name in vars(target):
        backups[target].placeholders[name] = vars(target).pop(name)
