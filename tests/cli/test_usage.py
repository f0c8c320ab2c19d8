from __future__ import annotations

import subprocess
import sys

from tests.cli.commands import Digenrl


def test_usage_shows_the_settings_of_our_classes_and_few_of_lightnings() -> None:
    # In a process of its own: other tests define algorithms, which usage would show as well.
    command = [sys.executable, "-m", "digenrl", "fit", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    for option in (
        "--model.group_size INT",
        "--data.prompts_per_step INT",
        "--trainer.strategy.engine auto|local|ray|inline",
    ):
        assert option in result.stdout
    assert "  FlowGRPO: kernel, noise_level, " in result.stdout
    assert "AlphaDropout" not in result.stdout
    assert len(result.stdout.splitlines()) < 240


def test_usage_shows_the_settings_of_the_classes_that_are_named(digenrl: Digenrl) -> None:
    words = ["--model", "tests.cli.toy_parts.MyGRPO", "--model.reward", "tests.cli.toy_parts.Bright"]
    out = digenrl("validate", "--config", "toy.yaml", *words, "--help").out
    for option in (
        "--model.margin NUMBER",
        "--model.clip_range NUMBER",
        "--model.policy.hidden INT",
        "--model.reward.level NUMBER",
    ):
        assert option in out
    assert "samples per prompt and step" in out  # said by the base class only
