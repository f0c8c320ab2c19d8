"""The checkpoint a run can always go on from."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from digenrl.engines import WorkerError

log = logging.getLogger(__name__)


class RunCheckpoint(ModelCheckpoint):
    """Keeps the newest state of a run in `checkpoints/step=N.ckpt` of its run folder.

    Saved every `every_n_steps` optimizer steps, at the end, and when the run is interrupted or fails, so that
    `ckpt_path="last"` loses at most the step that was under way; more only where a trainer has died, or is at a task
    that does not end within seconds.

    Args:
        every_n_steps: steps between checkpoints.
        keep: how many to keep; -1 keeps all.
    """

    def __init__(self, every_n_steps: int = 50, keep: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` is a count and must be at least 1, got {every_n_steps}.")
        super().__init__(filename="{step}", every_n_train_steps=every_n_steps, save_top_k=keep)
        self._keeps_one = keep == 1
        self._has_begun = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder; what fails before training begins leaves nothing that is worth a checkpoint."""
        super().setup(trainer, pl_module, stage)
        self._has_begun = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that weights are built and all state is restored."""
        super().on_train_start(trainer, pl_module)
        self._has_begun = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final state."""
        super().on_train_end(trainer, pl_module)
        self._save_now(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what the last whole step has left; nothing if training had not begun."""
        super().on_exception(trainer, pl_module, exception)
        if not self._has_begun:
            return
        try:
            self._save_now(trainer)
        except WorkerError as error:
            last = f" The last one is {self.best_model_path}." if Path(self.best_model_path).is_file() else ""
            log.warning("no checkpoint of the interrupted run: %s%s", error, last)

    def _save_now(self, trainer: Trainer) -> None:
        if self.dirpath is None or not trainer.training or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        newest = Path(self.dirpath) / f"step={trainer.global_step}.ckpt"
        if newest.exists():
            return
        trainer.save_checkpoint(newest, weights_only=False)
        before, self.best_model_path = self.best_model_path, str(newest)
        if self._keeps_one and before and Path(before).parent == newest.parent and trainer.is_global_zero:
            Path(before).unlink(missing_ok=True)
