"""An optimizer whose state is in host memory, but for the parameters that it is stepping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.engines import WorkerError
from digenrl.policies.shards import local_tensor

PIECE_BYTES = 256 * 2**20
"""Of parameters whose state is on the device at a time; large enough that copying is not a matter of latency."""


def step_in_pieces(optimizer: torch.optim.Optimizer, *, piece_bytes: int = PIECE_BYTES) -> None:
    """Step an optimizer some parameters at a time, and bring the state of each to the device only meanwhile.

    The steps are those of `optimizer.step`, bit by bit, for optimizers that treat parameters one by one, as Adam and
    its kin do. Sharded parameters bring their shares.

    Raises:
        WorkerError: the optimizer keeps something in its parameter groups from step to step.
    """
    groups = optimizer.param_groups
    try:
        for group in groups:
            for piece in _pieces(group["params"], piece_bytes):
                alone = {**group, "params": piece}
                optimizer.param_groups = [alone]
                _to_device(optimizer, piece)
                optimizer.step()
                _check_unchanged(optimizer, group, alone)
                to_host(optimizer, piece)
    finally:
        optimizer.param_groups = groups


def to_host(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter] | None = None) -> None:
    """Move the state of some parameters, or of all, to host memory; numbers without axes stay where they are."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in stepped if parameters is None else parameters:
        entries = optimizer.state.get(parameter, {})
        for key, value in _tensors(entries):
            entries[key] = _copy_to_host(value)


def _to_device(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        entries = optimizer.state.get(parameter, {})
        device = local_tensor(parameter).device
        for key, value in _tensors(entries):
            entries[key] = _copy_to_device(value, device)


def _tensors(entries: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in list(entries.items()):
        if isinstance(value, Tensor) and value.dim() > 0:
            yield key, value


def _copy_to_host(value: Tensor) -> Tensor:
    if type(value) is Tensor and value.device.type == "cuda":
        # Pinned memory is copied several times faster; sharded and quantized tensors cannot be pinned as they are.
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
    return value.to("cpu", copy=True)


def _copy_to_device(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, copy=True)


def _pieces(parameters: Sequence[nn.Parameter], piece_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Cut parameters into pieces of at most so many bytes, or one parameter."""
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = local_tensor(parameter).nbytes
        if piece and size + num_bytes > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += num_bytes
    if piece:
        yield piece


def _check_unchanged(optimizer: torch.optim.Optimizer, group: dict[str, Any], alone: dict[str, Any]) -> None:
    for name, value in alone.items():
        if name != "params" and value is not group.get(name) and value != group.get(name):
            raise WorkerError(
                f"`offload_optimizer` steps parameters a piece at a time, but {type(optimizer).__name__} changes "
                f"`{name}` of its parameter groups at each step: leave the option out, or use another optimizer."
            )
