"""The part of a worker that hands over and takes its whole state, for checkpoints."""

from __future__ import annotations

from digenrl.engines import ObjectRef
from digenrl.strategies.optimizers import load_named_state, named_state
from digenrl.strategies.workers.training import Training


class State(Training):
    """Weights and optimizer state, by name."""

    def state_dict(self) -> ObjectRef:
        """Keep a copy of the module's whole state for the driver to fetch."""
        return self._store.put({name: value.to("cpu", copy=True) for name, value in self._module.state_dict().items()})

    def load_state_dict(self, state_dict: ObjectRef, strict: bool) -> None:
        """Replace the module's state by one that the driver keeps."""
        self._module.load_state_dict(self._store.get(state_dict), strict=strict)

    def optimizer_state(self) -> ObjectRef:
        """Keep a copy of the optimizer's state, by parameter name, for the driver to fetch."""
        self._bring_back()
        return self._store.put(named_state(self._optimizer, self._module))

    def load_optimizer_state(self, state: ObjectRef) -> None:
        """Replace the optimizer's state by one that the driver keeps."""
        self._bring_back()
        load_named_state(self._optimizer, self._module, self._store.get(state))

    def resume(self, version: int, seed: int) -> None:
        """Continue a run at the policy version and with the seed that it had."""
        self.policy_version, self._module.seed = version, seed
