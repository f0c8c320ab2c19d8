"""A run that is stopped and resumed ends as if it had not been."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from tests.integration.toy_runs import fit, toy_data
from tests.toy import WORDS, ToyPolicy, level_reward


class Scheduled(FlowGRPO):
    """The toy with a learning rate that changes every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StepRecorder(Callback):
    """What each step was given and what it gave."""

    def __init__(self) -> None:
        self.prompts: list[list[str]] = []
        self.rewards: list[float] = []
        self.lrs: list[float] = []
        self.optimizer_state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.prompts.append([getattr(prompt, "text", prompt) for prompt in batch])
        self.rewards.append(trainer.callback_metrics["reward/mean"].item())
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if isinstance(trainer.strategy, DisaggregatedStrategy):
            self.optimizer_state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]


def scheduled(**settings: Any) -> Scheduled:
    defaults = {"group_size": 4, "num_steps": 4, "lr": 1e-2, "clip_range": 1e-2}
    return Scheduled(ToyPolicy(), level_reward, **{**defaults, **settings})


def run(
    strategy: Any, folder: Path, *, max_steps: int, data: Any, ckpt_path: str | None = None
) -> tuple[dict[str, Tensor], StepRecorder]:
    recorder = StepRecorder()
    checkpoints = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    _, _, weights = fit(
        strategy,
        module=scheduled(),
        data=data,
        ckpt_path=ckpt_path,
        max_steps=max_steps,
        callbacks=[checkpoints, recorder],
        enable_checkpointing=True,
    )
    return weights, recorder


def prompt_data() -> Any:
    # 4 prompts, 3 a step: epochs of 2 steps, and steps that reach into the next pass
    return toy_data(prompts_per_step=3, seed=None)


def shuffled_loader() -> Any:
    return DataLoader(WORDS * 2, batch_size=3, shuffle=True, drop_last=True, collate_fn=list)


@pytest.mark.parametrize("make_data", [prompt_data, shuffled_loader])
@pytest.mark.parametrize(("engine", "workers"), [("inline", (1, 1)), ("inline", (2, 1)), ("local", (1, 1))])
def test_resume_is_bit_exact_after_every_step(
    tmp_path: Path, make_data: Any, engine: Any, workers: tuple[int, int]
) -> None:
    pl.seed_everything(7, verbose=False)
    whole, whole_steps = run(
        DisaggregatedStrategy(*workers, engine=engine, trainer_assist="off"),
        tmp_path / "whole",
        max_steps=6,
        data=make_data(),
    )
    for stopped_after in range(1, 6) if engine == "inline" else (3,):
        pl.seed_everything(99, verbose=False)  # the checkpoint's seed counts, not this one
        resumed, steps = run(
            DisaggregatedStrategy(*workers, engine=engine, trainer_assist="off"),
            tmp_path / f"resumed-{stopped_after}",
            max_steps=6,
            data=make_data(),
            ckpt_path=str(tmp_path / "whole" / f"step={stopped_after}.ckpt"),
        )
        assert all(torch.equal(resumed[name], whole[name]) for name in whole), stopped_after
        assert steps.prompts == whole_steps.prompts[stopped_after:]
        assert steps.rewards == whole_steps.rewards[stopped_after:]
        assert steps.lrs == whole_steps.lrs[stopped_after:]
        assert_same_state(steps.optimizer_state, whole_steps.optimizer_state)


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, key in itertools.product(ours, ("step", "exp_avg", "exp_avg_sq")):
        assert torch.equal(ours[name][key], theirs[name][key]), (name, key)


def test_resume_under_a_stock_strategy_is_bit_exact(tmp_path: Path) -> None:
    pl.seed_everything(7, verbose=False)
    whole, whole_steps = run("auto", tmp_path / "whole", max_steps=5, data=prompt_data())
    pl.seed_everything(99, verbose=False)
    checkpoint = str(tmp_path / "whole" / "step=3.ckpt")
    resumed, steps = run("auto", tmp_path / "resumed", max_steps=5, data=prompt_data(), ckpt_path=checkpoint)
    assert steps.prompts == whole_steps.prompts[3:]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_checkpoint_moves_between_stock_and_disaggregated_strategies(tmp_path: Path) -> None:
    """Weights do; optimizer states have another form, so each strategy resumes its own checkpoints."""
    run("auto", tmp_path / "colocated", max_steps=2, data=prompt_data())
    saved = torch.load(tmp_path / "colocated" / "step=2.ckpt", weights_only=True)
    module = scheduled()
    module.configure_model()
    module.load_state_dict(saved["state_dict"])
    _, _ = run(DisaggregatedStrategy(engine="inline"), tmp_path / "disaggregated", max_steps=2, data=prompt_data())
    other = torch.load(tmp_path / "disaggregated" / "step=2.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == other["state_dict"].keys()


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_resume_at_the_border_of_a_shortened_epoch_is_exact(tmp_path: Path, strategy: str) -> None:
    def steps(folder: Path, **settings: Any) -> list[list[str]]:
        recorder = StepRecorder()
        saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        fit(
            "auto" if strategy == "auto" else DisaggregatedStrategy(engine="inline"),
            module=scheduled(),
            data=toy_data(prompts_per_step=1),
            callbacks=[saving, recorder],
            enable_checkpointing=True,
            limit_train_batches=2,
            max_steps=6,
            **settings,
        )
        return recorder.prompts

    whole = steps(tmp_path)
    for stopped_after in (1, 2, 4):
        resumed = steps(tmp_path / "resumed", ckpt_path=str(tmp_path / f"step={stopped_after}.ckpt"))
        assert resumed == whole[stopped_after:]


def test_a_learning_rate_changed_on_resume_is_used(tmp_path: Path) -> None:
    def plain(lr: float) -> FlowGRPO:
        return FlowGRPO(ToyPolicy(), level_reward, group_size=4, num_steps=4, lr=lr, clip_range=1e-2)

    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    fit(DisaggregatedStrategy(engine="inline"), module=plain(1e-3), callbacks=[checkpoints], enable_checkpointing=True)
    checkpoint = str(tmp_path / "step=1.ckpt")
    for lr in (1e-3, 5e-2):
        recorder = StepRecorder()
        settings: dict[str, Any] = {"ckpt_path": checkpoint, "max_steps": 2, "callbacks": [recorder]}
        fit(DisaggregatedStrategy(engine="inline"), module=plain(lr), **settings)
        assert recorder.lrs == [lr]


def test_a_learning_rate_changed_under_a_scheduler_is_refused(tmp_path: Path) -> None:
    run(DisaggregatedStrategy(engine="inline"), tmp_path, max_steps=1, data=prompt_data())
    with pytest.raises(ValueError, match="`(lr|initial_lr)` of the optimizer was changed, but the checkpoint's LR"):
        fit(
            DisaggregatedStrategy(engine="inline"),
            module=scheduled(lr=5e-2),
            data=prompt_data(),
            ckpt_path=str(tmp_path / "step=1.ckpt"),
            max_steps=2,
        )


def test_seed_given_to_the_module_must_be_the_checkpoints(tmp_path: Path) -> None:
    run(DisaggregatedStrategy(engine="inline"), tmp_path, max_steps=1, data=prompt_data())
    with pytest.raises(ValueError, match="`seed` is 5, but the checkpoint was made with"):
        fit(
            DisaggregatedStrategy(engine="inline"),
            module=scheduled(seed=5),
            data=prompt_data(),
            ckpt_path=str(tmp_path / "step=1.ckpt"),
            max_steps=2,
        )
