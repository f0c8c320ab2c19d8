"""One step of the toy, stage by stage, for tests of what an algorithm does in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from digenrl import DisaggregatedStrategy
from digenrl.module import DiffusionRLModule
from digenrl.types import RowLosses, ScoredBatch, TimestepBatch
from tests.algorithms.cases import SMALL
from tests.integration.toy_runs import fit, toy_data
from tests.toy import ToyPolicy, level_reward


def toy(cls: type[DiffusionRLModule], **settings: Any) -> Any:
    """Build a small module of a class."""
    module = cls(ToyPolicy(), **{**SMALL, "reward": level_reward, **settings})
    module.configure_model()
    return module


def total_loss(losses: Tensor | RowLosses) -> Tensor:
    """Add up the losses of all rows."""
    return losses.sum() if isinstance(losses, Tensor) else (losses.policy + losses.regularizer).sum()


def move(weights: Any, seed: int = 1) -> None:
    """Move the trained weights of a policy, or those of a copy."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (*weights.parameters(), *weights.buffers()):
            if weight.is_floating_point() and (weight.requires_grad or not isinstance(weight, nn.Parameter)):
                weight.add_(0.3 * torch.randn(weight.shape, generator=rng))


def scored_batch(module: Any, texts: tuple[str, ...] = ("low", "top"), *, step: int = 0) -> ScoredBatch:
    """The samples of a step that are trained."""
    prompts = module.prompt_batch(texts, step=step)
    with torch.no_grad():
        trajectory = module.rollout(prompts)
        rewards = module.score(trajectory)
    advantages = module.advantages(rewards, torch.tensor(prompts.group_ids))
    return module.trained_samples(ScoredBatch.of_groups(trajectory, rewards, advantages))


def timestep_batch(module: Any, **settings: Any) -> TimestepBatch:
    """All rows of a step."""
    scored = scored_batch(module, **settings)
    return scored.timestep_batch(module.select_timesteps(scored.trajectory.prompts))


def final_latents_of(module: Any, policy: Any) -> Tensor:
    """Samples of step 0 as a policy or a copy makes them."""
    prompts = module.prompt_batch(["low", "top"], step=0)
    condition, sigmas = module.policy.encode(prompts.texts), module.policy.sigmas(module.num_steps)
    with torch.no_grad():
        return module._solve(policy, module.initial_latents(prompts), condition, sigmas, module.solver)


class RewardRecorder(Callback):
    """The mean reward of each step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.rewards.append(trainer.callback_metrics["reward/mean"].item())


def rewards_of_run(module: DiffusionRLModule, strategy: Any, *, max_steps: int = 5) -> list[float]:
    recorder = RewardRecorder()
    fit(strategy, module=module, max_steps=max_steps, callbacks=[recorder])
    return recorder.rewards


def assert_resumes(make: Any, folder: Path, *, colocated: bool = False, max_steps: int = 4) -> None:
    """Stop a run after each step and resume it: all weights and copies must end as in the whole run, bit by bit."""

    def run(name: str, ckpt_path: str | None = None) -> dict[str, Tensor]:
        pl.seed_everything(7, verbose=False)
        strategy = "auto" if colocated else DisaggregatedStrategy(2, 1, engine="inline", trainer_assist="off")
        saving = ModelCheckpoint(folder / name, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": max_steps}
        return fit(strategy, module=make(), data=toy_data(prompts_per_step=2), ckpt_path=ckpt_path, **options)[2]

    whole = run("whole")
    assert any(name.startswith("weight_copies.") for name in whole)
    for step in range(1, max_steps):
        resumed = run(f"resumed-{step}", str(folder / "whole" / f"step={step}.ckpt"))
        assert resumed.keys() == whole.keys()
        assert all(torch.equal(resumed[name], whole[name]) for name in whole), step
