"""Lightning's own parts work with remote weights as in any script."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

import digenrl
from digenrl import DisaggregatedStrategy, Prompt, PromptBatch
from digenrl.algorithms import FlowGRPO
from digenrl.rewards import RewardError
from tests.integration.test_resume import scheduled
from tests.integration.toy_runs import QUIET, fit, largest_difference, toy_data
from tests.toy import WORDS, ToyPolicy, level_reward, toy_module


def inline(**settings: Any) -> DisaggregatedStrategy:
    return DisaggregatedStrategy(engine="inline", **settings)


@pytest.mark.parametrize("trainer_class", [pl.Trainer, digenrl.Trainer])
def test_stock_and_own_trainer_run_with_the_usual_callbacks(tmp_path: Path, trainer_class: Any) -> None:
    checkpoints = ModelCheckpoint(tmp_path, monitor="val/reward/mean", mode="max", filename="best")
    trainer, module, weights = fit(
        inline(generators=2),
        module=scheduled(lr=1e-2),
        data=toy_data(validation_prompts=WORDS, validation_samples_per_prompt=3, validation_batch_size=5),
        trainer_class=trainer_class,
        callbacks=[
            checkpoints,
            EarlyStopping("val/reward/mean", mode="max", patience=50),
            LearningRateMonitor("step"),
            RichProgressBar(),
            ModelSummary(max_depth=2),
        ],
        logger=CSVLogger(tmp_path, name="", version="run"),
        enable_progress_bar=True,
        enable_checkpointing=True,
        max_steps=6,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
    )
    assert trainer.global_step == 6
    best = torch.load(checkpoints.best_model_path, weights_only=True)
    assert best["state_dict"].keys() == weights.keys()
    assert not best["state_dict"]["policy.output.weight"].is_meta
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    rewards = [row["reward/mean"] for row in rows if row["reward/mean"]]
    assert len(rewards) == 6
    rates = [float(row["lr-AdamW"]) for row in rows if row.get("lr-AdamW")]
    assert rates == pytest.approx([1e-2 / (1 + step) for step in range(6)])


def test_early_stopping_ends_the_run() -> None:
    stopping = EarlyStopping("val/reward/mean", mode="max", patience=1, min_delta=100.0)
    trainer, _, _ = fit(
        inline(), data=toy_data(validation_prompts=WORDS), callbacks=[stopping], max_steps=50, val_check_interval=1
    )
    assert trainer.global_step == 2


def test_metrics_of_every_step_are_in_the_run_folder(tmp_path: Path) -> None:
    fit(inline(), logger=True, default_root_dir=str(tmp_path), max_steps=3, data=toy_data(validation_prompts=WORDS))
    rows = list(csv.DictReader((tmp_path / "version_0" / "metrics.csv").open()))
    steps = [row for row in rows if row["reward/mean"]]
    assert [row["step"] for row in steps] == ["0", "1", "2"]
    names = [
        "reward/level_reward",
        "reward/zero_std_group_frac",
        "advantage/abs_mean",
        "loss",
        "ratio/max_abs_dev",
        "ratio/clip_frac",
        "grad_norm",
        "policy_version",
        "time/step_s",
        "time/generate_s",
        "time/score_s",
        "time/update_s",
        "time/sync_s",
        "util/generators",
        "util/trainers",
        "throughput/samples_per_s",
        "throughput/samples_per_device_s",
    ]
    for name in names:
        assert all(row[name] for row in steps), name
    assert [float(row["policy_version"]) for row in steps] == [1, 2, 3]


def test_gradient_norm_is_that_of_the_colocated_run() -> None:
    colocated, _, _ = fit("auto", max_steps=2)
    disaggregated, _, _ = fit(inline(), max_steps=2)
    expected = colocated.callback_metrics["grad_norm"]
    torch.testing.assert_close(disaggregated.callback_metrics["grad_norm"], expected, rtol=1e-5, atol=0)


def test_validation_is_the_same_on_any_number_of_generators() -> None:
    data = toy_data(validation_prompts=WORDS, validation_samples_per_prompt=5, validation_batch_size=7)
    values = []
    for strategy in ("auto", inline(), inline(generators=3)):
        trainer = digenrl.Trainer(strategy=strategy, **QUIET)
        values.append(trainer.validate(toy_module(), data, verbose=False)[0]["val/reward/mean"])
    assert values[1] == pytest.approx(values[0], abs=1e-6)
    assert values[2] == pytest.approx(values[0], abs=1e-6)


def test_validate_after_fit_sees_the_trained_weights() -> None:
    strategy = inline()
    module, data = toy_module(lr=3e-2), toy_data(validation_prompts=WORDS, validation_samples_per_prompt=8)
    trainer = digenrl.Trainer(strategy=strategy, max_steps=8, val_check_interval=8, **QUIET)
    before = trainer.validate(module, data, verbose=False)[0]["val/reward/mean"]
    trainer.fit(module, data)
    in_fit = trainer.callback_metrics["val/reward/mean"].item()
    after = trainer.validate(module, data, verbose=False)[0]["val/reward/mean"]
    assert after == pytest.approx(in_fit, abs=1e-6)
    assert abs(after - before) > 1e-4
    strategy.shutdown()


def test_weights_loaded_from_a_checkpoint_reach_the_generators(tmp_path: Path) -> None:
    data = toy_data(validation_prompts=WORDS, validation_samples_per_prompt=8)
    strategy = inline()
    trainer = digenrl.Trainer(strategy=strategy, max_steps=5, **{**QUIET, "default_root_dir": str(tmp_path)})
    trainer.fit(toy_module(lr=3e-2), data)
    trained = trainer.validate(trainer.lightning_module, data, verbose=False)[0]["val/reward/mean"]
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    strategy.shutdown()
    fresh = digenrl.Trainer(strategy=inline(generators=2), **QUIET)
    loaded = fresh.validate(toy_module(), data, ckpt_path=str(tmp_path / "trained.ckpt"), verbose=False)
    assert loaded[0]["val/reward/mean"] == pytest.approx(trained, abs=1e-6)


def test_a_second_fit_goes_on_with_the_trained_weights() -> None:
    strategy, module, data = inline(), toy_module(), toy_data()
    trainer = digenrl.Trainer(strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(module, data)
    first = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, data)
    second = module.state_dict()
    assert trainer.global_step == 4
    # two more steps of AdamW at this rate cannot move a weight further
    assert 0 < largest_difference(second, first) < 2.5e-3
    strategy.shutdown()


def test_samples_for_people_are_the_same_remote_and_colocated() -> None:
    prompts = PromptBatch.for_validation([Prompt(word, uid) for uid, word in enumerate(WORDS)], seed=0)
    module = toy_module()
    module.configure_model()
    expected = module.sample(prompts)
    taken: list[torch.Tensor] = []

    class Take(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            taken.append(module.sample(prompts))

    fit(inline(generators=3), callbacks=[Take()])
    torch.testing.assert_close(taken[0], expected, rtol=0, atol=1e-6)


def test_values_logged_on_workers_are_not_lost() -> None:
    class Chatty(FlowGRPO):
        def timestep_loss(self, batch: Any) -> torch.Tensor:
            self.log("rows/sigma", batch.sigma.mean())
            return super().timestep_loss(batch)

        def rollout(self, prompts: PromptBatch) -> Any:
            self.track("rollout/seed_parity", torch.tensor([seed % 2 for seed in prompts.seeds]).float())
            return super().rollout(prompts)

    module = Chatty(ToyPolicy(), level_reward, group_size=4, num_steps=5, timestep_fraction=0.8)
    trainer, _, _ = fit(DisaggregatedStrategy(2, timestep_batch_size=2), module=module)
    sigmas = ToyPolicy().sigmas(5)[:4]
    assert trainer.callback_metrics["rows/sigma"].item() == pytest.approx(sigmas.mean().item(), abs=1e-6)
    module.next_step = 0
    prompts = module.prompt_batch(next(iter(toy_data().train_dataloader())))
    parity = sum(seed % 2 for seed in prompts.seeds) / len(prompts)
    assert trainer.callback_metrics["rollout/seed_parity"].item() == pytest.approx(parity)


def test_weight_averaging_of_the_driver_is_refused() -> None:
    with pytest.raises(ValueError, match="callback `StochasticWeightAveraging` averages the weights of this process"):
        fit(inline(), callbacks=[StochasticWeightAveraging(1e-3)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups_per_micro_batch": 3}, "must divide the 4 prompts of a step, got 3; the nearest that does is 2 or 4"),
        ({"groups_per_micro_batch": 8}, "the nearest that does is 4"),
    ],
)
def test_indivisible_steps_are_refused_before_a_worker_starts(settings: dict[str, Any], message: str) -> None:
    strategy = DisaggregatedStrategy(**settings)
    with pytest.raises(ValueError, match=message):
        fit(strategy)
    assert strategy._pool is None


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"generators": 0}, "generators"),
        ({"trainers": -1}, "trainers"),
        ({"engine": "rya"}, "engine"),
        ({"engine": "inline", "trainers": 2}, "trainers"),
        ({"groups_per_micro_batch": 0}, "groups_per_micro_batch"),
        ({"timestep_batch_size": 0}, "timestep_batch_size"),
        ({"trainer_assist": "optimum"}, "trainer_assist"),
        ({"trainer_assist": "static:-1"}, "trainer_assist"),
        ({"assist_switch": "unload"}, "assist_switch"),
        ({"staleness": 1.0}, "staleness"),
        ({"staleness_mode": "capped"}, "staleness_mode"),
        ({"reward_workers": -1}, "reward_workers"),
        ({"task_timeout_s": 0.0}, "task_timeout_s"),
    ],
)
def test_settings_out_of_bounds_are_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        DisaggregatedStrategy(**settings)


def test_other_precisions_and_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="`precision` must be one of 32-true, bf16-mixed"):
        fit(inline(), precision="bf16-true")
    with pytest.raises(TypeError, match="trains a `DiffusionRLModule`, got LightningModule"):
        fit(inline(), module=pl.LightningModule())  # type: ignore[arg-type]


def test_a_failed_reward_is_an_error_that_names_it() -> None:
    def broken_reward(media: torch.Tensor, prompts: PromptBatch) -> torch.Tensor:
        return torch.full((len(prompts),), float("nan"))

    module = FlowGRPO(ToyPolicy(), broken_reward, group_size=4, num_steps=3)
    with pytest.raises(RewardError, match="reward `broken_reward` returned nan"):
        fit(DisaggregatedStrategy(), module=module)


def test_a_non_finite_gradient_stops_the_run_before_the_weights_change() -> None:
    class Poisoned(FlowGRPO):
        def timestep_loss(self, batch: Any) -> torch.Tensor:
            return super().timestep_loss(batch) * float("inf")

    module = Poisoned(ToyPolicy(), level_reward, group_size=4, num_steps=3)
    with pytest.raises(RuntimeError, match="the gradient of step 0 is nan in .* the weights are unchanged"):
        fit(inline(), module=module)


def test_an_optimizer_that_moves_nothing_is_an_error() -> None:
    class Stuck(FlowGRPO):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.policy.output.bias], lr=1e-30)

    module = Stuck(ToyPolicy(), level_reward, group_size=4, num_steps=3)
    with pytest.raises(RuntimeError, match="version 1 has the very weights of version 0"):
        fit(inline(), module=module)


def test_a_loss_of_the_wrong_shape_is_named() -> None:
    class Reduced(FlowGRPO):
        def timestep_loss(self, batch: Any) -> torch.Tensor:
            return super().timestep_loss(batch).mean()

    module = Reduced(ToyPolicy(), level_reward, group_size=4, num_steps=3)
    with pytest.raises(ValueError, match=r"`timestep_loss` must return one loss per row, shape \[\d+\], got \[\]"):
        fit(inline(), module=module)
