"""How far a run has come, and how it is interrupted."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes, as a shell gives them for a program that a signal has ended."""


class SecondInterrupt(Callback):
    """Lets a second Ctrl-C end the program at once; Lightning switches it off at the first. Workers die with it."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Switch it on again, before others write checkpoints and pictures."""
        if isinstance(exception, KeyboardInterrupt):
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


class Progress(Callback):
    """Notes that the settings were found to fit together, by the strategy and by all callbacks."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        """Set then; workers run."""
        self.notes: list[str] = []
        """What to say then."""

    @property
    def received_sigterm(self) -> bool:
        """Whether the run was asked to end; in a validation Lightning goes on to its end."""
        return self.trainer is not None and self.trainer.received_sigterm

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note it."""
        self.trainer = trainer
        for note in self.notes:
            log.info("%s", note)
        self.notes = []

    def save_traceback(self, error: BaseException) -> str:
        """Write the traceback to the run folder, if there is one; returns where it is."""
        folder = None if self.trainer is None else self.trainer.log_dir
        if folder is None:
            return ""
        file = Path(folder) / "error.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)))
        return f" Traceback: {file}"
