"""Steps that begin before Lightning asks for their batch give the same run as those that do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from digenrl import DisaggregatedStrategy, Prompt, PromptData
from digenrl.algorithms import FlowGRPO
from digenrl.strategies.driver import StepDriver
from tests.algorithms.cases import make
from tests.integration.toy_runs import fit, largest_difference, toy_data
from tests.toy import WORDS, ToyPolicy, level_reward


def inline(**settings: Any) -> DisaggregatedStrategy:
    return DisaggregatedStrategy(engine="inline", **{"trainer_assist": "off", **settings})


def count_begun_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the list that will hold each step that was made known to a driver."""
    begun: list[int] = []
    add_step = StepDriver.add_step

    def add_and_note(driver: StepDriver, plan: Any) -> None:
        begun.append(plan.prompts.step)
        add_step(driver, plan)

    monkeypatch.setattr(StepDriver, "add_step", add_and_note)
    return begun


@pytest.mark.parametrize("limit", [None, 1])
def test_loaders_that_are_given_anew_every_epoch_are_read_as_without_lookahead(limit: int | None) -> None:
    settings: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    settings["limit_train_batches"] = limit
    trainer, _, ours = fit(inline(), data=toy_data(prompts_per_step=2), **settings)
    _, _, stock = fit("auto", data=toy_data(prompts_per_step=2), **settings)
    assert trainer.global_step == 3 * (limit or 2)
    assert largest_difference(ours, stock) < 1e-5


def test_no_step_begins_that_loaders_to_come_will_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(PromptData):
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            words = WORDS[2:] if self.trainer.current_epoch else WORDS[:2]
            return PromptData(words, prompts_per_step=1, seed=0).train_dataloader()

    begun = count_begun_steps(monkeypatch)
    data = Changing(WORDS, prompts_per_step=1)
    fit(inline(), data=data, max_steps=-1, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert begun == [0, 1, 2, 3]


class Reversing(FlowGRPO):
    """Changes a batch after the loader has given it."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return list(reversed(batch))


def reversing() -> Reversing:
    settings: dict[str, Any] = {"group_size": 4, "num_steps": 5, "timestep_fraction": 0.8, "clip_range": 1e-2}
    return Reversing(ToyPolicy(), level_reward, seed=0, lr=1e-2, **settings)


class ReversingData(PromptData):
    on_before_batch_transfer = Reversing.on_before_batch_transfer


@pytest.mark.parametrize("owner", ["module", "datamodule"])
def test_a_hook_of_the_user_that_changes_batches_is_heeded(owner: str, caplog: pytest.LogCaptureFixture) -> None:
    def run(strategy: str | DisaggregatedStrategy) -> dict[str, torch.Tensor]:
        module, data = (reversing(), toy_data()) if owner == "module" else (None, None)
        return fit(strategy, module=module, data=data or ReversingData(WORDS, prompts_per_step=4), max_steps=3)[2]

    with caplog.at_level(logging.WARNING):
        ours = run(inline())
    assert "`on_before_batch_transfer` is overridden" in caplog.text
    assert largest_difference(ours, run("auto")) < 1e-5


def test_a_batch_that_is_changed_elsewhere_is_an_error_that_says_where_to_change_it() -> None:
    class Sneaky(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
            batch.reverse()

    with pytest.raises(RuntimeError, match=r"batch of step 1 .* change batches in the loader"):
        fit(inline(), max_steps=3, callbacks=[Sneaky()])


class Stream(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(WORDS * 2)


class Bare:
    """Batches without a length."""

    def __iter__(self) -> Iterator[list[str]]:
        return iter([WORDS, WORDS[::-1]])


def stream() -> Any:
    return DataLoader(Stream(), batch_size=4, collate_fn=list)


@pytest.mark.parametrize("make_data", [stream, Bare])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_steps": 3},
        {"max_epochs": 3, "max_steps": -1},
        {"max_epochs": 3, "max_steps": -1, "limit_train_batches": 1},
    ],
)
def test_a_loader_without_a_length_trains_as_without_lookahead(make_data: Any, limits: dict[str, Any]) -> None:
    trainer, _, ours = fit(inline(), module=make("FlowGRPO", lr=1e-2), data=make_data(), **limits)
    stock_trainer, _, stock = fit("auto", module=make("FlowGRPO", lr=1e-2), data=make_data(), **limits)
    assert trainer.global_step == stock_trainer.global_step
    assert largest_difference(ours, stock) < 1e-5


def test_a_schedule_of_accumulated_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="`GradientAccumulationScheduler` must keep one value"):
        fit(inline(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


def test_a_schedule_of_one_value_accumulates_as_many_batches() -> None:
    def run(strategy: str | DisaggregatedStrategy) -> dict[str, torch.Tensor]:
        schedule = GradientAccumulationScheduler({0: 2})
        return fit(strategy, data=toy_data(prompts_per_step=2), max_steps=2, callbacks=[schedule])[2]

    assert largest_difference(run(inline()), run("auto")) < 1e-5


def test_a_schedule_of_one_value_is_checked_against_the_algorithm() -> None:
    with pytest.raises(ValueError, match="`staleness` must be 0 with `accumulate_grad_batches` 2"):
        fit(inline(staleness=0.5), callbacks=[GradientAccumulationScheduler({0: 2})])


class Push(Callback):
    """Multiplies the policy's weights after the first step, in one of Lightning's hooks."""

    def __init__(self, hook: str = "on_train_batch_end") -> None:
        self._num_steps = 0
        setattr(self, hook, self._push)

    def _push(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 1 and self._num_steps == 0:
            self._num_steps += 1
            module.load_state_dict(
                {
                    name: value * 1.5 if name.startswith("policy.") and "frozen" not in name else value
                    for name, value in module.state_dict().items()
                }
            )


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start", "on_before_optimizer_step"])
@pytest.mark.parametrize("case", ["FlowGRPO", "FlowGRPO-2-updates"])
def test_weights_given_in_the_middle_of_a_run_make_the_samples_of_the_step_after(case: str, hook: str) -> None:
    def run(strategy: str | DisaggregatedStrategy) -> dict[str, torch.Tensor]:
        return fit(strategy, module=make(case, lr=1e-2), max_steps=4, callbacks=[Push(hook)])[2]

    assert largest_difference(run(inline()), run("auto")) < 1e-5


@pytest.mark.parametrize("settings", [{"staleness": 0.5}, {"reward_workers": 1, "staleness": 0.5}])
def test_samples_made_early_are_thrown_away_where_other_weights_are_given(settings: dict[str, Any]) -> None:
    class Fractions(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.seen.append(float(trainer.callback_metrics["staleness/frac"]))

    fractions = Fractions()
    strategy = inline(staleness_mode="exact", generation_batch_size=4, groups_per_micro_batch=1, **settings)
    fit(strategy, module=make("FlowGRPO", lr=1e-2), max_steps=4, callbacks=[fractions, Push()])
    assert fractions.seen == [0, 0, 0.5, 0.5]


class Return(Callback):
    """Gives the weights of the run's start again after an odd number of steps, in the middle of a round of two."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._first = {name: value.clone() for name, value in module.state_dict().items()}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 1:
            module.load_state_dict(self._first)


def test_weights_given_in_the_middle_of_a_round_bring_their_own_place_in_it() -> None:
    def run(strategy: str | DisaggregatedStrategy) -> dict[str, torch.Tensor]:
        return fit(strategy, module=make("FlowGRPO-2-updates", lr=1e-2), max_steps=4, callbacks=[Return()])[2]

    assert largest_difference(run(inline()), run("auto")) < 1e-5


def test_staleness_is_refused_where_the_next_batch_cannot_be_known() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter([WORDS] * 4)

    strategy = DisaggregatedStrategy(engine="inline", staleness=0.25)
    with pytest.raises(ValueError, match="`staleness` must be 0 with a data loader without a length"):
        fit(strategy, data=Stream(), max_steps=3)


def test_prompts_from_a_plain_loader_are_trained_under_a_stock_strategy() -> None:
    prompts = [Prompt(word, uid) for uid, word in enumerate(WORDS)]
    loader = DataLoader(prompts, batch_size=4, collate_fn=list)  # type: ignore[arg-type]
    _, _, ours = fit("auto", data=loader, max_steps=1)
    _, _, theirs = fit(DisaggregatedStrategy(engine="inline"), data=loader, max_steps=1)
    assert largest_difference(ours, theirs) <= 1e-5
