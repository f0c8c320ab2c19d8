"""A user's classes work on worker processes from wherever they are written, without being registered anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PARTS = """\
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from digenrl import Condition, DiffusionPolicy, DiffusionRLModule, DisaggregatedStrategy, PromptData, Trainer
from digenrl.diffusion import FlowSDE, flow_match_sigmas
from digenrl.rewards import Reward


@dataclass(frozen=True)
class Size(Condition):
    size: Tensor


class Policy(DiffusionPolicy):
    latent_shape = (4,)

    def build(self):
        self.net = nn.Linear(6, 4)

    def encode(self, prompts):
        return Size(torch.tensor([float(prompt) for prompt in prompts]))

    def velocity(self, latents, sigma, condition):
        assert isinstance(condition, Size), "a class that was sent is the class that it was"
        return self.net(torch.cat([latents, sigma[:, None], condition.size[:, None]], dim=1))

    def decode(self, latents):
        return latents.sigmoid()[:, None, None]

    def sigmas(self, num_steps):
        return flow_match_sigmas(num_steps)


class Reinforce(DiffusionRLModule):
    def __init__(self, policy: DiffusionPolicy, reward: Reward, *, noise_level: float = 0.7, **settings):
        super().__init__(policy, reward, **settings)
        self.noise_level = noise_level

    def rollout(self, prompts):
        return self.sample_trajectory(prompts, FlowSDE(self.noise_level))

    def timestep_loss(self, batch):
        self.track("process", torch.full_like(batch.advantages, os.getpid()))
        return -batch.advantages * self.log_probs(batch)


def reward(media, prompts):
    return media.flatten(1).mean(1)
"""

RUN = """\
def train(strategy):
    module = Reinforce(Policy(), reward, noise_level=0.5, group_size=4, num_steps=3, lr=1e-3, seed=0)
    trainer = Trainer(strategy=strategy, max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, PromptData(["1", "2"], prompts_per_step=2))
    assert (trainer.callback_metrics["process"] == os.getpid()) == (strategy == "auto")
    return module.state_dict()


ours, theirs = train(DisaggregatedStrategy(engine="local")), train("auto")
assert max((ours[name] - theirs[name]).abs().max() for name in theirs) <= 1e-7
print("equal")
"""

SCRIPT = f"import os\n{PARTS}\n\n{RUN}"

CELLS = """\
cells = {cells!r}
namespace = {{"__name__": "__main__"}}
for cell in cells:
    exec(cell, namespace)
"""

CONFIG = """\
model:
  class_path: mine.Reinforce
  init_args: {policy: mine.Policy, reward: mine.reward, noise_level: 0.5, group_size: 4, num_steps: 3}
data: {prompts: ["1", "2"], prompts_per_step: 2}
trainer: {strategy: {engine: local}, max_steps: 2, accelerator: cpu, default_root_dir: runs}
"""


def run(arguments: list[str], folder: Path, *, stdin: str = "") -> str:
    """Run Python in `folder`; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["script", "cells"])
def test_classes_of_the_main_program_train_on_workers(tmp_path: Path, way: str) -> None:
    # `cells` is a notebook: each cell is executed in a namespace that calls itself `__main__` and has no file.
    (tmp_path / "script.py").write_text(SCRIPT)
    cells = CELLS.format(cells=["import os", PARTS, *RUN.split("\n\n\n")])
    arguments, stdin = {"script": (["script.py"], ""), "cells": (["-"], cells)}[way]
    assert run(arguments, tmp_path, stdin=stdin).endswith("equal\n")


def test_a_configuration_names_classes_by_their_dotted_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import os\n{PARTS}")
    (tmp_path / "run.yaml").write_text(CONFIG)
    run(["-m", "digenrl", "fit", "--config", "run.yaml"], tmp_path)
    rows = (tmp_path / "runs/version_0/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 2
    assert "process" in rows[0].split(",")
