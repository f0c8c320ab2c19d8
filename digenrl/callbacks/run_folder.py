"""Where callbacks write."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """Give the folder of the first logger, else the Trainer's root; all ranks must ask, as for `trainer.log_dir`."""
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
    return folder
