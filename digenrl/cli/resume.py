"""Continuing from a checkpoint: which one, and what has changed since it was written."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from digenrl.cli.errors import SettingError, nearest, show
from digenrl.module import DiffusionRLModule

_KEYS = ("ckpt_path",)
_CLASS_KEY, _INSTANTIATOR_KEY = "_class_path", "_instantiator"  # LightningCLI puts them among the hyper-parameters
_CLASS = "model"


def find_checkpoint(path: Any, root: str) -> str | None:
    """Give the checkpoint that `path` names; `last` is the newest of the run folders under `root`.

    Lightning looks for `last` in the folder of the new run, finds none and starts from the beginning.

    Raises:
        SettingError: there is none, or it is not a checkpoint.
    """
    if path is None:
        return None
    if path == "hpc":  # Lightning knows where SLURM has left it
        return "hpc"
    newest = _newest(root)
    if path == "last":
        if newest is None:
            raise SettingError(_KEYS, f"is `last`, but no run folder in `{root}` has a checkpoint.")
        return str(newest)
    if not isinstance(path, str) or path == "best":  # the best of a run is known only while it runs
        raise SettingError(_KEYS, f"must be the path of a checkpoint or `last`, got {show(path)}.")
    file = Path(path)
    if not file.exists():
        siblings = [str(entry) for entry in file.parent.glob("*")]
        close = nearest(path, siblings) or newest
        hint = f"; did you mean `{close}`?" if close is not None else f"; paths are relative to {Path.cwd()}."
        raise SettingError(_KEYS, f"is `{path}`, which does not exist{hint}")
    if file.is_file() and not zipfile.is_zipfile(file):
        raise SettingError(_KEYS, f"is `{path}`, which is not a checkpoint, or was cut off while it was written.")
    return path


def check_resume(path: str | None, model: LightningModule) -> list[str]:
    """Read a checkpoint's settings without its weights and check the seed; says which settings have changed.

    What the configuration says now holds; LightningCLI would silently take the values of the checkpoint.

    Raises:
        SettingError: the file is not a Lightning checkpoint.
        ValueError: the module was given another seed than the checkpoint's.
    """
    if path is None or not Path(path).is_file():
        return []
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise SettingError(_KEYS, f"is `{path}`, which cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
        raise SettingError(_KEYS, f"is `{path}`, which is not a Lightning checkpoint.")
    if isinstance(model, DiffusionRLModule):
        # The base class's own part only, which Lightning runs again: a wrong seed is found before workers start.
        DiffusionRLModule.on_load_checkpoint(model, checkpoint)
    return [f"checkpoint {path}", *changes(checkpoint.get("hyper_parameters", {}), dict(model.hparams))]


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which settings differ; those that only one side has are not compared."""
    names = {key: _CLASS if key == _CLASS_KEY else key for key in saved if key in now and key != _INSTANTIATOR_KEY}
    return [
        f"`{name}`: {show(saved[key])} in the checkpoint, {show(now[key])} now"
        for key, name in names.items()
        if saved[key] != now[key]
    ]


def _newest(root: str) -> Path | None:
    found = [path for path in Path(root).glob("version_*/**/*.ckpt") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
