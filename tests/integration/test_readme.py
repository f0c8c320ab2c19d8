"""What the README shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from digenrl.cli import main
from examples.digits import pretrain

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder that looks like a clone after `make quickstart`, with a base policy that is barely trained."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    pretrain.main(["--output", str(tmp_path / "runs/digits/base.safetensors"), "--iterations", "2"])
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


def test_the_python_snippet_runs(workplace: Path) -> None:
    snippet = blocks("python")[0]
    assert "max_steps=120" in snippet
    assert len(snippet.strip().splitlines()) <= 12
    done = run([sys.executable, "-c", snippet.replace("max_steps=120", "max_steps=2")], workplace)
    assert done.returncode == 0, done.stderr
    assert (workplace / "runs/version_0/metrics.csv").read_text().count("\n") == 3


@pytest.mark.usefixtures("restored_process")
def test_the_yaml_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    settings = yaml.safe_load(blocks("yaml")[0])
    settings["trainer"]["max_steps"] = 1
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert (workplace / "runs/version_0/metrics.csv").exists()


def test_the_command_is_accepted(workplace: Path) -> None:
    command = next(line for line in "\n".join(blocks("bash")).splitlines() if "digenrl fit" in line).split()
    short = [sys.executable, "-m", "digenrl", *command[1:], "--trainer.max_steps", "1", "--print_config"]
    done = run(short, workplace)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"]["init_args"]["clip_range"] == 1e-3


def test_the_algorithm_of_the_readme_trains() -> None:
    from digenrl import DiffusionRLModule, DisaggregatedStrategy  # noqa: F401 (used by the snippet)
    from digenrl.diffusion import FlowSDE  # noqa: F401
    from tests.integration.toy_runs import fit, largest_difference
    from tests.toy import ToyPolicy, level_reward

    snippet = next(block for block in blocks("python") if "class Reinforce" in block)
    names = {"DiffusionRLModule": DiffusionRLModule, "FlowSDE": FlowSDE}
    exec(snippet, names)
    module = names["Reinforce"](ToyPolicy(), level_reward, group_size=4, num_steps=4)  # type: ignore[call-arg]
    _, _, colocated = fit("auto", module=module, max_steps=2)
    module = names["Reinforce"](ToyPolicy(), level_reward, group_size=4, num_steps=4)  # type: ignore[call-arg]
    _, _, weights = fit(DisaggregatedStrategy(engine="inline"), module=module, max_steps=2)
    assert largest_difference(weights, colocated) <= 1e-5
