"""The part of a worker that hands over and takes its whole state, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from digenrl.engines import ObjectRef, WorkerError
from digenrl.strategies.optimizer_offload import to_host
from digenrl.strategies.optimizers import load_named_state, named_state
from digenrl.strategies.sharding import full_tensor, shard_of
from digenrl.strategies.workers.training import Training


class State(Training):
    """Weights and optimizer state, by name and whole, whatever the number of ranks: any other number can take them.

    Ranks that share a policy's blocks are asked together, and gather tensor by tensor; the first one hands over.
    """

    def state_dict(self) -> ObjectRef | None:
        """Keep a copy of the module's whole state for the driver to fetch; None on ranks after the first."""
        state = {}
        for name, value in self._module.state_dict().items():
            if not isinstance(value, Tensor):
                state[name] = value
                continue
            whole = full_tensor(value)
            if self._rank == 0:
                state[name] = whole.to("cpu", copy=True)
        return self._store.put(state) if self._rank == 0 else None

    def load_state_dict(self, state_dict: ObjectRef, strict: bool) -> None:
        """Replace the module's state by one that the driver keeps, of which a rank reads the rows that it holds.

        Raises:
            WorkerError: it is of another model.
        """
        given = self._store.get(state_dict)
        own = self._module.state_dict()
        state = {name: shard_of(value, own[name]) if name in own else value for name, value in given.items()}
        try:
            self._module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            reason = _misfit(given, own) or " ".join(str(error).split())
            raise WorkerError(f"the state does not fit: {reason}") from error

    def optimizer_state(self) -> ObjectRef | None:
        """Keep a copy of the optimizer's state, by parameter name, for the driver to fetch; see `state_dict`."""
        self._bring_back()
        state = named_state(self._optimizer, self._module, keeps=self._rank == 0)
        return self._store.put(state) if self._rank == 0 else None

    def load_optimizer_state(self, state: ObjectRef) -> None:
        """Replace the optimizer's state by one that the driver keeps."""
        self._bring_back()
        load_named_state(self._optimizer, self._module, self._store.get(state))
        if self._settings.offloads_optimizer:
            to_host(self._optimizer)

    def resume(self, version: int, seed: int) -> None:
        """Continue a run at the policy version and with the seed that it had."""
        self.policy_version, self._module.seed = version, seed


def _misfit(given: Mapping[str, object], own: Mapping[str, object]) -> str:
    """Say in one line what a state has that a module lacks, and the other way round."""
    reasons = []
    for words, names in (
        ("it lacks", [name for name in own if name not in given]),
        ("the module lacks its", [name for name in given if name not in own]),
    ):
        if names:
            reasons.append(f"{words} `{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    for name, value in given.items():
        target = own.get(name)
        if isinstance(value, Tensor) and isinstance(target, Tensor) and value.shape != target.shape:
            reasons.append(f"its `{name}` has shape {list(value.shape)}, the module's {list(target.shape)}")
            break
    return "; ".join(reasons)
