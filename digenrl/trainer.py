"""Lightning's Trainer with defaults for RL runs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import Strategy

from digenrl.callbacks import RunCheckpoint, RunProfile, StepProgress
from digenrl.strategies import DisaggregatedStrategy


class Trainer(pl.Trainer):
    """`lightning.pytorch.Trainer` with other defaults; the stock one works as well.

    Steps, not epochs, are what an RL run counts, so validation goes by `val_check_interval` in steps, every step
    is logged, the progress bar counts steps, the newest state is kept, and the sanity check is off. All metrics of
    every step are in
    `metrics.csv` of the run folder (`default_root_dir/version_N`), whatever other loggers are given;
    `logger=False` turns that off, too.
    """

    def __init__(
        self,
        *args: Any,
        strategy: str | Strategy | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        default_root_dir: str | None = None,
        callbacks: list[Callback] | Callback | None = None,
        enable_progress_bar: bool | None = None,
        enable_checkpointing: bool | None = None,
        validate_first: bool = False,
        num_sanity_val_steps: int = 0,
        check_val_every_n_epoch: int | None = None,
        log_every_n_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        """Take Lightning's arguments.

        Args:
            *args: see Lightning's Trainer.
            strategy: None is `DisaggregatedStrategy()`, one generator and one trainer.
            logger: added to the CSV logger of the run folder; False for no logger at all.
            default_root_dir: where run folders go; None is `runs`.
            callbacks: see Lightning's Trainer.
            enable_progress_bar: see Lightning's Trainer.
            enable_checkpointing: see Lightning's Trainer; without a checkpoint callback, `RunCheckpoint` is added.
            validate_first: run the whole validation before the first step of a new run, so that curves begin at 0.
            num_sanity_val_steps: see Lightning's Trainer.
            check_val_every_n_epoch: None lets `val_check_interval` count steps across epochs.
            log_every_n_steps: see Lightning's Trainer.
            **kwargs: see Lightning's Trainer.
        """
        root = default_root_dir or "runs"
        self.validate_first = validate_first
        super().__init__(
            *args,
            strategy=DisaggregatedStrategy() if strategy is None else strategy,
            logger=_loggers(logger, root),
            default_root_dir=root,
            callbacks=_callbacks(callbacks, enable_progress_bar, enable_checkpointing, **kwargs),
            enable_progress_bar=enable_progress_bar,
            enable_checkpointing=enable_checkpointing,
            num_sanity_val_steps=num_sanity_val_steps,
            check_val_every_n_epoch=check_val_every_n_epoch,
            log_every_n_steps=log_every_n_steps,
            **kwargs,
        )

    def fit(  # type: ignore[override]
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: Any = None,
        **kwargs: Any,
    ) -> None:
        """Train, see Lightning's Trainer; validates before the first step if `validate_first`."""
        if self.validate_first and ckpt_path is None:
            if isinstance(train_dataloaders, LightningDataModule):
                self.validate(model, datamodule=train_dataloaders, verbose=False)
            else:
                self.validate(model, dataloaders=val_dataloaders, datamodule=datamodule, verbose=False)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, **kwargs)


def _callbacks(
    callbacks: list[Callback] | Callback | None,
    enable_progress_bar: bool | None,
    enable_checkpointing: bool | None,
    *,
    barebones: bool = False,
    **_: Any,
) -> list[Callback]:
    given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
    if barebones:
        return given
    added: list[Callback] = [RunProfile()]
    if enable_progress_bar is not False and not any(isinstance(callback, ProgressBar) for callback in given):
        added.append(StepProgress())
    if enable_checkpointing is not False and not any(isinstance(callback, Checkpoint) for callback in given):
        added.append(RunCheckpoint())
    return [*added, *given]


def _loggers(logger: Logger | list[Logger] | bool | None, root: str) -> list[Logger] | bool:
    if logger is False:
        return False
    given = logger if isinstance(logger, list) else [logger] if isinstance(logger, Logger) else []
    if any(isinstance(entry, CSVLogger) for entry in given):
        return given
    # First, so that its folder is the run folder.
    return [CSVLogger(root, name="", flush_logs_every_n_steps=1), *given]
