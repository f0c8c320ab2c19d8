"""The guide's code runs as it stands there, and its rewards give what they say."""

from __future__ import annotations

import csv
import importlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from digenrl.cli import main
from digenrl.rewards import compute_rewards, set_up_reward
from digenrl.types import Prompt, PromptBatch
from examples.digits import pretrain

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/rewards.md").read_text()
RUNS, TRIALS = [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone after `make quickstart`, with the guide's files; what its policy draws does not matter."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "examples").symlink_to(ROOT / "examples")
    pretrain.main(["--output", str(folder / "runs/digits/base.safetensors"), "--iterations", "1"])
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", GUIDE, re.DOTALL):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return folder


@pytest.fixture(autouse=True)
def in_clone(restored_process: None, clone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(clone)
    monkeypatch.syspath_prepend(clone)
    yield
    sys.modules.pop("my_rewards", None)


@pytest.fixture
def my_rewards() -> ModuleType:
    return importlib.import_module("my_rewards")


def run_command(line: str) -> int:
    name, *words = shlex.split(line)
    assert name == "digenrl"
    in_this_process = ["--trainer.strategy.engine", "inline"] if words[0] == "fit" else []
    return main([*words, *in_this_process])


def first_metrics(clone: Path) -> dict[str, str]:
    newest = max((clone / "runs").glob("version_*"), key=lambda run: int(run.name.rpartition("_")[2]))
    with (newest / "metrics.csv").open() as file:
        return next(csv.DictReader(file))


def test_the_python_run_logs_each_reward(clone: Path) -> None:
    runpy.run_path("run.py", run_name="__main__")
    metrics = first_metrics(clone)
    means = {name: float(metrics[f"reward/{name}"]) for name in ("DigitReward", "Likeness", "Variety")}
    expected = (means["DigitReward"] + 0.2 * means["Likeness"] + 0.1 * means["Variety"]) / 1.3
    assert float(metrics["reward/mean"]) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["reward/dropped_groups"]) == 0


def test_the_commands_change_the_rewards_of_the_yaml(clone: Path) -> None:
    assert len(RUNS) == 2
    assert run_command(RUNS[0]) == 0
    metrics = first_metrics(clone)
    means = [float(metrics[f"reward/{name}"]) for name in ("DigitReward", "Likeness", "JpegCompressibility")]
    expected = (means[0] + 0.2 * means[1] + 0.3 * means[2]) / 1.5
    assert float(metrics["reward/mean"]) == pytest.approx(expected, rel=1e-4)
    assert run_command(RUNS[1]) == 0
    assert "reward/brightness" in first_metrics(clone)


def test_rewards_are_tried_on_files(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("draw.py", run_name="__main__")
    capsys.readouterr()
    assert len(TRIALS) == 3
    outputs = []
    for line in TRIALS:
        assert run_command(line) == 0
        outputs.append(capsys.readouterr().out)
    [shown] = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    assert lines_of(outputs[0]) == lines_of(shown)
    assert json.loads(outputs[1])[0]["rewards"]["Ink"] == pytest.approx(0.0, abs=0.1)
    assert lines_of(outputs[2])[-1].startswith("42.png 0.")


def lines_of(table: str) -> list[str]:
    return [" ".join(line.replace("─", " ").split()) for line in table.splitlines() if line.strip(" ─")]


def test_they_give_what_they_say(my_rewards: ModuleType) -> None:
    prompts = PromptBatch.for_step([Prompt("x", 0, metadata={"ink": 0.5})], step=0, group_size=3, seed=0)
    media = torch.tensor([0.0, 0.5, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    expected = {"brightness": [0.0, 0.5, 1.0], "Ink": [-0.5, 0.0, -0.5], "Variety": [1.5, 0.0, 1.5]}
    for name, values in expected.items():
        member = getattr(my_rewards, name)
        given = compute_rewards(member() if isinstance(member, type) else member, media, prompts)
        torch.testing.assert_close(given, torch.tensor(values))
    likeness = my_rewards.Likeness()
    set_up_reward(likeness, torch.device("cpu"))
    rewards = compute_rewards(likeness, media, prompts)
    assert rewards[1] == pytest.approx(1.0)
    assert (rewards <= 1 + 1e-6).all()


def test_a_run_without_the_column_ends_before_anything_is_generated(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "run.yaml", "--model.reward", "my_rewards.Ink"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert "must have the column `ink`, which reward `Ink` needs" in error
