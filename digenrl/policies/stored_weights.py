"""Reading the weights that a policy leaves on the meta device, by each rank no more than it holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from digenrl.policies.policy import DiffusionPolicy
from digenrl.policies.shards import local_rows, local_tensor, with_rows
from digenrl.policies.stored_tensors import StoredTensor


@torch.no_grad()
def load_stored_weights(policy: DiffusionPolicy, device: torch.device | str = "cpu") -> None:
    """Give memory and values to all that a built policy, sharded or not, has on the meta device.

    Raises:
        ValueError: `stored_weights` does not name one of them, or its file has another shape.
        FileNotFoundError: a file is missing.
    """
    names = _names_on_meta(policy)
    if not names:
        return
    stored = policy.stored_weights()
    by_path: dict[str, list[tuple[list[str], Tensor, StoredTensor]]] = {}
    for tensor, all_names in names:
        source = next((stored[name] for name in all_names if name in stored), None)
        if source is None:
            raise ValueError(
                f"`{all_names[0]}` is on the meta device and `{type(policy).__name__}.stored_weights` does not say "
                f"where its values are ({len(names)} tensors are on meta): name it there, or make it in `build`."
            )
        by_path.setdefault(source.path, []).append((all_names, tensor, source))
    for path, entries in by_path.items():
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            for all_names, tensor, source in entries:
                if source.key not in keys:
                    raise ValueError(f"`{path}` has no tensor `{source.key}`, which `{all_names[0]}` is read from.")
                _put(policy, all_names, _read(file, tensor, source, all_names[0], torch.device(device)))


def _names_on_meta(policy: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Give the tensors on the meta device, each with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in _named_tensors(policy):
        if local_tensor(tensor).is_meta:
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _named_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(policy.named_parameters(remove_duplicate=False), policy.named_buffers(remove_duplicate=False))


def _read(file: safe_open, tensor: Tensor, source: StoredTensor, name: str, device: torch.device) -> Tensor:
    stored = file.get_slice(source.key)
    shape = list(stored.get_shape())
    if shape != list(tensor.shape):
        raise ValueError(f"`{source.key}` in `{source.path}` has shape {shape}, but `{name}` has {list(tensor.shape)}.")
    start, stop = local_rows(tensor)
    rows = torch.empty_like(local_tensor(tensor), device=device)
    if rows.numel() > 0:
        rows.copy_(stored[start:stop] if tensor.ndim else file.get_tensor(source.key))
    whole = with_rows(rows, tensor) if isinstance(tensor, DTensor) else rows
    return nn.Parameter(whole, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole


def _put(policy: nn.Module, names: list[str], value: Tensor) -> None:
    """Register a tensor under its names; tied ones stay tied."""
    for name in names:
        path, _, last = name.rpartition(".")
        owner = policy.get_submodule(path)
        if isinstance(value, nn.Parameter):
            owner._parameters[last] = value
        else:
            owner._buffers[last] = value
