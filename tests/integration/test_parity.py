"""Each fit begins with a comparison of generators and trainers, which leaves no other trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from digenrl import Condition, DisaggregatedStrategy, Trainer
from digenrl.algorithms import DGPO, FlowGRPO
from digenrl.module import DiffusionRLModule
from digenrl.strategies.parity import ParityError
from digenrl.strategies.workers import Worker
from digenrl.types import PromptBatch, TimestepBatch, Trajectory
from tests.integration.toy_runs import QUIET, fit, largest_difference, toy_data
from tests.toy import ToyPolicy, level_reward, toy_module

SETTINGS: dict[str, Any] = {"group_size": 4, "num_steps": 5, "clip_range": 1e-2, "seed": 0, "lr": 1e-3}


class ShiftedPolicy(ToyPolicy):
    shift = 0.0

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        return super().velocity(latents, sigma, condition) * (1 + self.shift)  # type: ignore[arg-type]


def built_by(module: DiffusionRLModule) -> Worker:
    worker = module._place_policy.__self__  # type: ignore[attr-defined]
    assert isinstance(worker, Worker)
    return worker


class Shifted(FlowGRPO):
    """Computes something else on the last trainer."""

    def configure_model(self) -> None:
        worker = built_by(self)
        if worker._trains and worker._rank == worker._num_ranks - 1:
            self.policy.shift = 1e-3
        super().configure_model()


class ShiftedDGPO(DGPO, Shifted):
    """The same, of an algorithm without log-probs."""


class NotFinite(FlowGRPO):
    def rollout(self, prompts: PromptBatch) -> Trajectory:
        trajectory = super().rollout(prompts)
        latents = trajectory.final_latents.clone()
        latents[0, 0, 0] = math.nan
        return replace(trajectory, final_latents=latents)


class Careless(FlowGRPO):
    """Draws from the global random state, and tracks what it draws."""

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        self.track("drawn", torch.rand(len(prompts)), reduction="max")
        return super().rollout(prompts)

    def timestep_loss(self, batch: TimestepBatch) -> Any:
        return super().timestep_loss(batch) * (1 + 0.1 * torch.rand(()))


class ChangeWeight(Callback):
    """Changes a generator's weight after it was loaded."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        generator = trainer.strategy.pool.engine._workers["generator-1"]
        with torch.no_grad():
            generator._module.policy.output.bias[3] += 1e-3


def inline(**settings: Any) -> DisaggregatedStrategy:
    return DisaggregatedStrategy(**{"engine": "inline", "trainer_assist": "off", **settings})


def found(trainer: Any) -> dict[str, float]:
    return {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("parity/")}


def shifted() -> Shifted:
    return Shifted(ShiftedPolicy(), level_reward, **SETTINGS)


def test_a_velocity_that_differs_on_trainers_ends_the_run_before_its_first_step() -> None:
    with pytest.raises(ParityError, match="generator-0: the velocity .* by trainer-0, parts by 0.001, tolerance 1e-05"):
        fit(inline(), module=shifted())


def test_algorithms_without_log_probs_are_compared_too() -> None:
    with pytest.raises(ParityError, match="the velocity at its initial noise, recomputed by trainer-0, parts by 0.001"):
        fit(inline(), module=ShiftedDGPO(ShiftedPolicy(), level_reward, group_size=4, num_steps=5, seed=0))


def test_a_rollout_with_numbers_that_are_not_finite_ends_the_run() -> None:
    with pytest.raises(ParityError, match="generator-0: `final_latents` of its rollout has 1 of 16 numbers"):
        fit(inline(), module=NotFinite(ToyPolicy(), level_reward, **SETTINGS))


def test_a_weight_that_was_changed_after_its_load_is_found_by_digest() -> None:
    with pytest.raises(ParityError, match="^parity check of generator-1: what generator-1 holds of .* is not what was"):
        fit(inline(generators=2), callbacks=[ChangeWeight()])


def test_a_warning_lets_the_run_go_on(caplog: pytest.LogCaptureFixture) -> None:
    trainer, _, _ = fit(inline(parity_check="warn"), module=shifted(), max_steps=2)
    assert trainer.global_step == 2
    assert caplog.text.count("parity check of generator-0") == 1
    assert found(trainer)["parity/velocity_max_dev"] == pytest.approx(1e-3, rel=1e-3)
    assert found(trainer)["parity/ratio_max_abs_dev"] > 1e-6


def test_off_makes_no_samples(caplog: pytest.LogCaptureFixture) -> None:
    trainer, _, _ = fit(inline(parity_check="off"), module=shifted())
    assert trainer.global_step == 1
    assert "parity" not in caplog.text
    assert found(trainer) == {}


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="`parity_check` must be one of raise, warn, off, got 'on'"):
        DisaggregatedStrategy(parity_check="on")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [toy_module, lambda: Careless(ToyPolicy(), level_reward, **SETTINGS)])
def test_a_run_is_the_same_with_and_without(make: Callable[[], FlowGRPO]) -> None:
    runs = []
    for mode in ("raise", "off"):
        torch.manual_seed(0)
        runs.append(fit(inline(parity_check=mode), module=make(), max_steps=3))
    (gated, _, ours), (ungated, _, theirs) = runs
    assert largest_difference(ours, theirs) == 0
    assert found(gated) == {"parity/ratio_max_abs_dev": 0.0, "parity/velocity_max_dev": 0.0}
    expected = {name: value.item() for name, value in ungated.callback_metrics.items()}
    for name in expected.keys() - {name for name in expected if name.split("/")[0] in ("time", "util", "throughput")}:
        assert gated.callback_metrics[name].item() == expected[name], name


def test_every_fit_begins_with_it_and_leaves_nothing_in_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    check = Worker.check_parity
    monkeypatch.setattr(Worker, "check_parity", lambda self, refs: (calls.append("check"), check(self, refs))[1])
    strategy, module = inline(generators=2), toy_module(updates_per_rollout=2)
    trainer = Trainer(strategy=strategy, **QUIET, max_steps=1)
    trainer.fit(module, toy_data())
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, toy_data())
    assert trainer.global_step == 3
    assert calls == ["check"] * 4  # of two generators, in two fits
    assert all(not store._objects for store in strategy.pool.engine._stores.values())  # type: ignore[attr-defined]
    strategy.shutdown()


def test_a_resumed_run_is_compared_with_the_weights_it_has_loaded(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    _, _, whole = fit(inline(), max_steps=4, enable_checkpointing=True, callbacks=[saving])
    checkpoint = str(tmp_path / "epoch=1-step=2.ckpt")
    trainer, _, resumed = fit(inline(), max_steps=4, ckpt_path=checkpoint)
    assert found(trainer)["parity/ratio_max_abs_dev"] == 0
    assert largest_difference(resumed, whole) == 0


def test_sharded_trainers_recompute_together(caplog: pytest.LogCaptureFixture) -> None:
    strategy = DisaggregatedStrategy(trainers=2, sharding="fsdp", parity_check="warn")
    trainer, _, _ = fit(strategy, module=shifted())
    assert trainer.global_step == 1
    (message,) = [record.getMessage() for record in caplog.records if "parity" in record.getMessage()]
    assert "recomputed by trainer-1, parts by 0.001" in message, "the first rank computes as the generator does"
