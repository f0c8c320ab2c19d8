"""What a run logs of its steps, and when."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from digenrl.module import DiffusionRLModule
from digenrl.strategies.step_book import StepResult

log = logging.getLogger(__name__)


class StepLog:
    """Logs each step through its module, once, and may be told of it before.

    Where an optimizer step follows, this process logs when workers are busy with the step after it.
    """

    def __init__(self) -> None:
        self.fitting_timesteps: int | None = None
        """Timesteps at a time, of a batch size that is chosen by memory."""
        self._unlogged: StepResult | None = None
        self._parity_metrics: Mapping[str, float] = {}

    def note(self, result: StepResult) -> None:
        """Keep what is known of the newest step."""
        self._unlogged = result

    def note_parity(self, metrics: Mapping[str, float]) -> None:
        """Keep what a comparison of generators and trainers has measured, for the next step."""
        self._parity_metrics = metrics

    def write(self, module: DiffusionRLModule, num_accumulated: int) -> None:
        """Log what was kept, if it was not; the loss as that of a window of `num_accumulated` batches."""
        result, self._unlogged = self._unlogged, None
        if result is None:
            return
        self._note_timestep_batch_size(result, module.num_trained_timesteps)
        loss = result.loss * num_accumulated
        module.log_step(result.prompts, result.rewards, result.advantages, loss, result.metrics)
        module.log_dict(
            {
                "staleness/frac": result.num_stale_samples / len(result.prompts),
                "assist/micro_batches": float(result.num_assisted),
                **self._parity_metrics,
            }
        )
        self._parity_metrics = {}

    def _note_timestep_batch_size(self, result: StepResult, num_timesteps: int) -> None:
        """Say what `timestep_batch_size="auto"` has come to, where it is new."""
        metric = result.metrics.get("timestep_batch_size")
        if metric is None or round(metric.value) == self.fitting_timesteps:
            return
        self.fitting_timesteps = round(metric.value)
        log.info(
            "`timestep_batch_size` auto trains %d of %d timesteps at a time from step %d on, which fit into memory.",
            self.fitting_timesteps,
            num_timesteps,
            result.prompts.step,
        )
