"""The part of a worker that keeps a copy of its training state, from which one that takes its place goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from digenrl.engines import ObjectLost, ObjectRef
from digenrl.strategies.sharding import full_tensor, local_tensor
from digenrl.strategies.weight_planes import weights_digest
from digenrl.strategies.workers.training import Training


@dataclass(frozen=True)
class StateEntry:
    """This rank's rows of a tensor of the optimizer's state."""

    rows: Tensor
    device: str
    """Kind of the one that it was on: counters, and state that is offloaded, stay in host memory."""
    is_sharded: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StateEntry:
        """Describe a tensor; nothing is copied where it is in host memory."""
        return cls(local_tensor(tensor.detach()).cpu(), tensor.device.type, isinstance(tensor, DTensor))

    def give_back(self, parameter: Tensor) -> Tensor:
        """Make it anew, sharded as its parameter is."""
        rows = self.rows.to(parameter.device if self.device == parameter.device.type else self.device, copy=True)
        if not self.is_sharded:
            return rows
        assert isinstance(parameter, DTensor), "the state of a parameter is sharded as it is"
        return DTensor.from_local(
            rows,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


@dataclass(frozen=True)
class TrainerSnapshot:
    """A rank's training state between two optimizer steps, on the CPU."""

    policy_version: int
    random_states: tuple[Tensor, ...]
    """Of torch on the CPU and, where there is one, on the device."""
    weights: dict[str, Tensor] | None
    """This rank's rows of the trained weights, and all buffers; None if another rank of its host has handed over the
    very same ones."""
    optimizer: dict[str, dict[str, Any]] | None
    """State by parameter name, of this rank's rows."""


class Snapshots(Training):
    """What trainers do so that their group can be rebuilt (docs/design/restarts.md)."""

    def ping(self) -> None:
        """Answer: this worker is alive and does not wait for another."""

    def frozen_digest(self) -> str:
        """Digest everything that is not published; ranks that share the weights ask together."""
        published = self._module.published_weights()
        frozen = ((name, tensor) for name, tensor in self._module.state_dict().items() if name not in published)
        return weights_digest((name, full_tensor(tensor)) for name, tensor in frozen)  # they gather tensor by tensor

    def take_snapshot(self) -> ObjectRef:
        """Keep a copy of what an optimizer step changes, for the driver to adopt."""
        self._bring_back()
        is_copy = self._settings.sharding == "none" and self._hosts[self._rank] in self._hosts[: self._rank]
        return self._store.put(
            TrainerSnapshot(
                self.policy_version,
                tuple(self._random_states()),
                None if is_copy else {name: tensor.cpu() for name, tensor in self._changing_tensors().items()},
                None if is_copy else self._optimizer_state(),
            )
        )

    def restore_snapshot(self, snapshots: Sequence[ObjectRef]) -> None:
        """Go on from the first snapshot that can be read and has weights, with the random state of the very first.

        Raises:
            ObjectLost: none can be read any more.
        """
        read = [snapshot for snapshot in map(self._read_snapshot, snapshots) if snapshot is not None]
        source = next((snapshot for snapshot in read if snapshot.weights is not None), None)
        if source is None:
            raise ObjectLost(snapshots[0].worker)
        assert source.weights is not None
        assert source.optimizer is not None
        with torch.no_grad():
            for name, tensor in self._changing_tensors().items():
                tensor.copy_(source.weights[name])
        self._load_optimizer_state(source.optimizer)
        self.policy_version = source.policy_version
        torch.set_rng_state(read[0].random_states[0].clone())
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(read[0].random_states[1].clone(), self._device)

    def _read_snapshot(self, ref: ObjectRef) -> TrainerSnapshot | None:
        try:
            snapshot = self._store.get(ref)
        except ObjectLost:
            return None
        assert isinstance(snapshot, TrainerSnapshot)
        return snapshot

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def _changing_tensors(self) -> dict[str, Tensor]:
        """Give views of the trained weights and of all buffers, among them the copies of the weights."""
        return {
            name: local_tensor(tensor.detach())
            for name, tensor in (*self._trained_parameters().items(), *self._module.named_buffers())
        }

    def _optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Give this rank's rows of the optimizer's state by parameter name."""
        return {
            name: {
                key: StateEntry.of(value) if isinstance(value, Tensor) else value
                for key, value in self._optimizer.state[parameter].items()
            }
            for name, parameter in self._trained_parameters().items()
            if parameter in self._optimizer.state
        }

    def _load_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        self._optimizer.state.clear()
        for name, parameter in self._trained_parameters().items():
            if name in state:
                self._optimizer.state[parameter] = {
                    key: value.give_back(parameter) if isinstance(value, StateEntry) else value
                    for key, value in state[name].items()
                }
