"""What a run has measured of itself, for planning the next one."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from digenrl.callbacks.run_folder import run_folder
from digenrl.strategies import DisaggregatedStrategy


class RunProfile(Callback):
    """Writes `profile.json` to the run folder at the end of training: seconds per sample and per weight exchange.

    `digenrl plan` reads it. Runs whose strategy has no workers, or that end before a step was made, have none.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the averages of this run."""
        if isinstance(trainer.strategy, DisaggregatedStrategy) and trainer.loggers:
            profile = trainer.strategy.profile()
            if profile is not None:
                profile.write(run_folder(trainer) / "profile.json")
