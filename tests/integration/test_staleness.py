"""Samples made ahead with the weights before: bounded, counted, and never at the price of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.types import PromptBatch
from tests.integration.test_assist import Paced, paced
from tests.integration.toy_runs import fit, largest_difference, toy_data
from tests.toy import WORDS, toy_module


class Ledger(Callback):
    """Which prompts each step trained, how much of it was stale, and what validations saw."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.stale: list[float] = []
        self.ratios: list[float] = []
        self.validations: list[tuple[int, int, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.prompts.append([prompt.uid for prompt in batch])
        self.stale.append(trainer.callback_metrics["staleness/frac"].item())
        self.ratios.append(trainer.callback_metrics["ratio/max_abs_dev"].item())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            reward = trainer.callback_metrics["val/reward/mean"].item()
            self.validations.append((trainer.global_step, trainer.strategy.policy_version, reward))


def strategy(staleness: float, mode: Any = "cap", **settings: Any) -> DisaggregatedStrategy:
    return DisaggregatedStrategy(trainer_assist="off", staleness=staleness, staleness_mode=mode, **settings)


def slow_trainer() -> Paced:
    """Generators end long before the trainer, so there is time to make samples ahead."""
    module = paced()
    module.generate_s, module.update_s = 0.01, 0.06
    return module


def run(chosen: DisaggregatedStrategy, **settings: Any) -> tuple[Ledger, dict[str, torch.Tensor]]:
    ledger = Ledger()
    callbacks = [ledger, *settings.pop("callbacks", [])]
    _, _, weights = fit(chosen, module=slow_trainer(), callbacks=callbacks, **{"max_steps": 5, **settings})
    return ledger, weights


@pytest.mark.parametrize(("staleness", "expected"), [(0.25, 0.25), (0.5, 0.5), (0.7, 0.5)])
def test_as_much_is_stale_as_the_bound_and_the_micro_batches_allow(staleness: float, expected: float) -> None:
    ledger, _ = run(strategy(staleness))
    assert ledger.stale == [0.0, *[expected] * 4]


def test_no_staleness_is_the_on_policy_run_bit_by_bit() -> None:
    _, plain = run(DisaggregatedStrategy(trainer_assist="off"))
    ledger, weights = run(strategy(0.0))
    assert ledger.stale == [0.0] * 5
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_the_same_samples_are_stale_in_every_exact_run() -> None:
    first, weights = run(strategy(0.5, "exact"))
    second, again = run(strategy(0.5, "exact", generators=1))
    assert first.stale == second.stale == [0.0, 0.5, 0.5, 0.5, 0.5]
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert largest_difference(weights, run(strategy(0.0))[1]) > 1e-6


def test_stale_samples_have_the_ratio_of_the_weights_that_made_them() -> None:
    ledger, _ = run(strategy(0.5, "exact"))
    assert ledger.ratios[0] <= 1e-6
    assert min(ledger.ratios[1:]) > 1e-6, "one optimizer step lies between making and training them"


@pytest.mark.parametrize("mode", ["cap", "exact"])
def test_every_prompt_is_trained_in_its_turn_across_epochs(mode: Any) -> None:
    data = toy_data(prompts_per_step=3, validation_prompts=WORDS)
    loader = data.train_dataloader()
    expected = [[prompt.uid for prompt in batch] for epoch in range(4) for batch in loader.batches(epoch)]
    ledger, _ = run(strategy(0.5, mode), data=data, max_steps=7, val_check_interval=2)
    assert ledger.prompts == expected[:7]


@pytest.mark.parametrize("mode", ["cap", "exact"])
def test_a_validation_sees_the_weights_of_its_step(mode: Any) -> None:
    data = toy_data(validation_prompts=WORDS, validation_samples_per_prompt=4)
    ledger, _ = run(strategy(0.5, mode), data=data, val_check_interval=1)
    assert [(step, version) for step, version, _ in ledger.validations] == [(step, step) for step in range(1, 6)]
    assert len({reward for _, _, reward in ledger.validations}) == 5


@pytest.mark.parametrize("limits", [{"limit_train_batches": 1, "max_epochs": 3}, {"max_epochs": 2}])
def test_runs_that_end_by_epochs_train_what_they_should(limits: dict[str, int]) -> None:
    data = PromptData(WORDS * 2, prompts_per_step=4, seed=0)
    ledger, _ = run(strategy(0.5), data=data, max_steps=-1, **limits)
    loader = PromptData(WORDS * 2, prompts_per_step=4, seed=0).train_dataloader()
    per_epoch = limits.get("limit_train_batches", 2)
    expected = [
        [prompt.uid for prompt in batch]
        for epoch in range(limits["max_epochs"])
        for batch in list(loader.batches(epoch))[:per_epoch]
    ]
    assert ledger.prompts == expected


def test_a_checkpoint_with_work_ahead_resumes_without_losing_a_prompt(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    whole, _ = run(strategy(0.5), callbacks=[saving], enable_checkpointing=True)
    resumed, _ = run(strategy(0.5), ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert resumed.prompts == whole.prompts[2:]
    assert resumed.stale[0] == 0.0, "what was made ahead is made anew, with the resumed weights"


def test_rewards_have_workers_of_their_own() -> None:
    _, _, plain = fit(DisaggregatedStrategy(trainer_assist="off"), max_steps=3)
    chosen = DisaggregatedStrategy(trainer_assist="off", reward_workers=2)
    seen: list[set[str]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append({entry.worker for entry in trainer.strategy.last_step_spans if entry.task == "score"})

    _, _, weights = fit(chosen, max_steps=3, callbacks=[Look()])
    assert all(workers <= {"reward-worker-0", "reward-worker-1"} for workers in seen)
    assert largest_difference(weights, plain) <= 1e-5


def test_staleness_and_accumulated_windows_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="`staleness` must be 0 with `accumulate_grad_batches` 2"):
        fit(strategy(0.5), module=toy_module(), accumulate_grad_batches=2)


def test_a_sample_sheet_in_the_middle_of_a_run_sees_the_newest_weights() -> None:
    taken: list[torch.Tensor] = []
    wanted: list[dict[str, torch.Tensor]] = []

    class Take(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            prompts = PromptBatch.for_validation(toy_data().prompts, seed=0)
            taken.append(module.sample(prompts))
            wanted.append(module.state_dict())

    run(strategy(0.5), callbacks=[Take()], max_steps=3)
    module = slow_trainer()
    module.configure_model()
    prompts = PromptBatch.for_validation(toy_data().prompts, seed=0)
    for media, weights in zip(taken, wanted, strict=True):
        module.load_state_dict(weights)
        torch.testing.assert_close(media, module.sample(prompts), rtol=0, atol=1e-6)
