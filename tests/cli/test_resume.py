from __future__ import annotations

import os
from pathlib import Path

import pytest

from digenrl.cli.errors import SettingError
from digenrl.cli.resume import changes, find_checkpoint


def test_last_is_the_newest_of_the_run_folders(tmp_path: Path) -> None:
    for age, name in enumerate(["version_1/checkpoints/a.ckpt", "version_0/checkpoints/b.ckpt"]):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert find_checkpoint("last", str(tmp_path)) == str(tmp_path / "version_1/checkpoints/a.ckpt")


def test_best_is_refused_because_a_new_run_has_none(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="must be the path of a checkpoint or `last`, got 'best'"):
        find_checkpoint("best", str(tmp_path))


def test_only_settings_that_both_sides_have_are_compared() -> None:
    saved = {"lr": 1e-4, "old": 1, "seed": None, "_class_path": "a.A", "_instantiator": "x"}
    now = {"lr": 1e-3, "new": 2, "seed": None, "_class_path": "a.B", "_instantiator": "y"}
    assert changes(saved, now) == [
        "`lr`: 0.0001 in the checkpoint, 0.001 now",
        "`model`: 'a.A' in the checkpoint, 'a.B' now",
    ]
