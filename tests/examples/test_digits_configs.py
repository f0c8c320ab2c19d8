"""Each configuration of the digits is right before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.algorithms import ROOT, read_rewards
from digenrl import algorithms
from digenrl.cli import main
from digenrl.engines import LocalEngine
from examples.digits import pretrain

CONFIGS = sorted((ROOT / "examples" / "digits").glob("*.yaml"))


class WorkerStarted(Exception):
    """All checks have passed."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is hardly trained."""
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    pretrain.main(["--output", str(path), "--iterations", "3"])
    return path


@pytest.fixture
def words(restored_process: None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Work in the repository's root, with options that keep a run in a scratch folder; leaves the process as it was."""
    monkeypatch.chdir(ROOT)
    return ["--model.policy.checkpoint", str(base), "--trainer.default_root_dir", str(tmp_path)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_checked_as_far_as_the_first_worker(
    config: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **kwargs: object) -> None:
        raise WorkerStarted

    monkeypatch.setattr(LocalEngine, "start", start)
    with pytest.raises(WorkerStarted):
        main(["fit", "--config", str(config), *words])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_names_an_algorithm_and_the_command_that_runs_it(config: Path) -> None:
    text = config.read_text()
    assert yaml.safe_load(text)["model"]["class_path"] in algorithms.__all__
    assert text.splitlines()[1] == f"#   digenrl fit --config examples/digits/{config.name}"


def test_an_algorithm_of_the_forward_process_makes_two_steps(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"max_steps": "2", "val_check_interval": "1", "callbacks": "[]", "strategy.engine": "inline"}
    options = [word for name, value in short.items() for word in (f"--trainer.{name}", value)]
    code = main(["fit", "--config", "examples/digits/diffusion_nft.yaml", *words, *options])
    assert code == 0, capsys.readouterr().err
    assert [step for step, _ in read_rewards(tmp_path / "version_0" / "metrics.csv")] == [0, 1, 2]
