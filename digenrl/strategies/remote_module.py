"""A module whose weights are on workers: how it gets there, and what it asks of them from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch import Tensor

from digenrl.module import DiffusionRLModule
from digenrl.rewards import check_picklable
from digenrl.strategies.evaluation import make_samples
from digenrl.types import PromptBatch

if TYPE_CHECKING:
    from digenrl.strategies.disaggregated import DisaggregatedStrategy


class RemoteModule:
    """What `DiffusionRLModule` asks when its weights are on the workers of a strategy."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy

    def fetch_state_dict(self) -> dict[str, Any]:
        """Fetch the whole state."""
        return self._strategy.lightning_module_state_dict()

    def push_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Replace the whole state."""
        self._strategy.replace_weights(state_dict, strict)

    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make samples on the generators: media [B, (F), C, H, W] in [0, 1]."""
        self._strategy.pause()
        return make_samples(self._strategy.pool, prompts)

    def step_metrics(self) -> dict[str, float]:
        """Give what is known only after the optimizer step: gradient norm, times, utilization."""
        steps = self._strategy.steps
        return {} if steps is None else steps.metrics

    def serve(self) -> None:
        """Answer workers that wait for this process, which is at something long."""
        steps = self._strategy.steps
        if steps is not None:
            steps.driver.serve()


def pickle_module(module: DiffusionRLModule) -> bytes:
    """Pickle a module for workers, which build its weights themselves.

    Raises:
        ValueError: its reward cannot be pickled; of another part the error is that of `pickle`.
    """
    try:
        blob: bytes = cloudpickle.dumps(module)
    except Exception:
        check_picklable(module.reward)  # most often it is the reward, and this says so
        raise
    return blob
