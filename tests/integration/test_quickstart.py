"""The quickstart job, shortened, from its command to its pictures."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

from examples.digits import pretrain

ROOT = Path(__file__).parents[2]


def test_quickstart_learns_and_leaves_its_results(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    pretrain.main(["--output", str(base)])
    command = [sys.executable, "-m", "digenrl", "fit", "--config", "examples/digits/flow_grpo.yaml"]
    shortened = {
        "--model.policy.checkpoint": str(base),
        "--model.lr": "2e-4",
        "--trainer.max_steps": "30",
        "--trainer.val_check_interval": "15",
        "--trainer.default_root_dir": str(tmp_path / "runs"),
    }
    for option, value in shortened.items():
        command += [option, value]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    validations = [float(row["val/reward/mean"]) for row in rows if row["val/reward/mean"]]
    assert len(validations) == 3
    assert 0.80 <= validations[0] <= 0.87
    assert validations[-1] >= 0.93
    assert max(float(row["ratio/max_abs_dev"]) for row in rows if row["ratio/max_abs_dev"]) <= 1e-6
    for name in ("samples_before.png", "samples_after.png", "reward_curve.png", "timeline.png"):
        assert min(Image.open(folder / name).size) > 200
    assert "Run finished" in done.stdout
    assert str(folder.name) in done.stdout
