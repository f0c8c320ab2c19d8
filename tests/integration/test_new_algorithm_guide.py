"""The guide's code runs as it stands there, and its algorithm is the one of the same name."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from digenrl.algorithms import DGPO
from digenrl.cli import main
from digenrl.module import DiffusionRLModule, as_prompts
from digenrl.types import PromptBatch, ScoredBatch
from examples.digits import pretrain
from tests.toy import WORDS, ToyPolicy, level_reward

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/new_algorithm.md").read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone after `make quickstart`, with the guide's files and a policy that earns some reward."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "examples").symlink_to(ROOT / "examples")
    pretrain.main(["--output", str(folder / "runs/digits/base.safetensors"), "--iterations", "120"])
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", GUIDE, re.DOTALL):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return folder


@pytest.fixture(autouse=True)
def in_clone(restored_process: None, clone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(clone)
    monkeypatch.syspath_prepend(clone)
    yield
    sys.modules.pop("my_dgpo", None)


def test_the_python_run_trains(clone: Path) -> None:
    runpy.run_path("run.py", run_name="__main__")
    assert num_steps_of(newest_run(clone)) == 4


def test_the_command_runs_the_yaml(clone: Path) -> None:
    command = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)[0].split()
    assert command[0] == "digenrl"
    assert main(command[1:]) == 0
    assert num_steps_of(newest_run(clone)) == 2
    assert "clip_range: 0.02" in (newest_run(clone) / "config.yaml").read_text()


def test_the_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("check.py", run_name="__main__")
    assert "largest difference of a weight: " in capsys.readouterr().out


def test_the_check_finds_a_statistic_over_a_part_of_the_step(clone: Path) -> None:
    text, algorithm = (clone / "check.py").read_text(), (clone / "my_dgpo.py").read_text()
    returned = "return margin.sigmoid() * batch.advantages * current"
    assert returned in algorithm
    (clone / "wrong_dgpo.py").write_text(algorithm.replace(returned, f"{returned} / batch.advantages.abs().max()"))
    (clone / "wrong_check.py").write_text(text.replace("my_dgpo", "wrong_dgpo"))
    with pytest.raises(AssertionError):
        runpy.run_path("wrong_check.py", run_name="__main__")


def test_its_gradient_is_that_of_dgpo() -> None:
    settings = {"group_size": 4, "num_steps": 5, "beta": 10.0, "clip_range": 0.05, "seed": 0}
    own = importlib.import_module("my_dgpo").MyDGPO(ToyPolicy(), level_reward, timestep_fraction=0.6, **settings)
    dgpo = DGPO(ToyPolicy(), level_reward, num_trained_timesteps=3, solver="euler", old_rollout_from=None, **settings)  # type: ignore[arg-type]
    expected, found = gradient(dgpo), gradient(own)
    assert expected.abs().max() > 1e-4
    assert (found - expected).abs().max() / expected.abs().max() <= 1e-6


def gradient(module: DiffusionRLModule) -> Tensor:
    """The gradient of a step, with copies moved away from the policy, so that they matter and some rows are clipped."""
    module.configure_model()
    rng = torch.Generator().manual_seed(1)
    for name in sorted(module.weight_copies):
        for weights in module.policy_copy(name).weights.buffers():
            weights.mul_(1 + 0.2 * torch.randn(weights.shape, generator=rng))
    prompts = PromptBatch.for_step(as_prompts(WORDS), step=0, group_size=module.group_size, seed=module.seed)
    with torch.no_grad():
        trajectory = module.rollout(prompts)
        rewards = module.score(trajectory)
    advantages = module.advantages(rewards, torch.tensor(prompts.group_ids))
    batch = ScoredBatch.of_groups(trajectory, rewards, advantages).timestep_batch(module.select_timesteps(prompts))
    losses = module.timestep_loss(batch)
    assert isinstance(losses, Tensor)
    torch.autograd.backward(losses.mean())
    clipped = module.take_metrics()["ratio/clip_frac"].value
    assert 0 < clipped < 1
    return torch.cat([weights.grad.flatten() for weights in module.parameters() if weights.grad is not None])


def newest_run(folder: Path) -> Path:
    return max((folder / "runs").glob("version_*"), key=lambda run: int(run.name.rpartition("_")[2]))


def num_steps_of(run: Path) -> int:
    return len((run / "metrics.csv").read_text().splitlines()) - 1
