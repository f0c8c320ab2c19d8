"""Trainers that help to generate change the time of a step, not its result."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from digenrl.types import PromptBatch, TimestepBatch, Trajectory
from tests.integration.test_equivalence import gradient, reference_gradient
from tests.integration.toy_runs import fit, largest_difference, relative_difference, toy_data
from tests.toy import ToyPolicy, level_reward, toy_module


class Paced(FlowGRPO):
    """The toy with tasks of known durations."""

    generate_s, update_s = 0.08, 0.01

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        time.sleep(self.generate_s)
        return super().rollout(prompts)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        time.sleep(self.update_s)
        return super().timestep_loss(batch)


class Assisted(Callback):
    """How many micro-batches trainers made in each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.tasks: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.counts.append(int(trainer.callback_metrics["assist/micro_batches"]))
        self.tasks.append({f"{entry.worker}:{entry.task}" for entry in trainer.strategy.last_step_spans})


def paced() -> Paced:
    return Paced(ToyPolicy(), level_reward, group_size=4, num_steps=4, clip_range=1e-2, lr=1e-3, seed=0)


@pytest.mark.parametrize("switch", ["none", "offload"])
@pytest.mark.parametrize("workers", [(1, 1), (2, 2)])
def test_an_assisted_step_has_the_reference_gradient(switch: Any, workers: tuple[int, int]) -> None:
    seen = Assisted()
    strategy = DisaggregatedStrategy(*workers, trainer_assist="static:2", assist_switch=switch)
    assert relative_difference(gradient(strategy, callbacks=[seen]), reference_gradient()) <= 1e-6
    assert seen.counts[0] in (1, 2), "generators may take what the second would have been"
    assert {"trainer-0:assist", "trainer-0:update", "generator-0:generate"} <= seen.tasks[0]


@pytest.mark.parametrize("assist", ["search", "optimal", "static:3"])
def test_weights_with_assistance_equal_those_without(assist: str) -> None:
    _, _, plain = fit(DisaggregatedStrategy(trainer_assist="off"), max_steps=6)
    _, _, assisted = fit(DisaggregatedStrategy(trainer_assist=assist, assist_switch="offload"), max_steps=6)
    assert largest_difference(assisted, plain) <= 1e-5


@pytest.mark.parametrize("assist", ["search", "optimal"])
def test_a_trainer_that_waits_for_generators_helps_them(assist: str) -> None:
    seen = Assisted()
    fit(DisaggregatedStrategy(trainer_assist=assist), module=paced(), callbacks=[seen], max_steps=4)
    assert min(seen.counts) >= 1
    assert max(seen.counts) < 4


def test_a_trainer_that_is_the_bottleneck_hardly_helps() -> None:
    module = paced()
    module.generate_s, module.update_s = 0.01, 0.1
    seen = Assisted()
    fit(DisaggregatedStrategy(trainer_assist="optimal"), module=module, callbacks=[seen], max_steps=4)
    # At most the one that it can make while it waits for the first that is generated.
    assert max(seen.counts) <= 1


def test_offloading_gives_gradients_and_optimizer_state_back_bit_by_bit() -> None:
    weights = []
    for switch in ("none", "offload"):
        # One order of sums: the trainers make the same micro-batches before any update.
        strategy = DisaggregatedStrategy(engine="inline", trainer_assist="static:2", assist_switch=switch)
        weights.append(fit(strategy, max_steps=5)[2])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_ratio_of_assisted_samples_is_one() -> None:
    trainer, _, _ = fit(DisaggregatedStrategy(trainer_assist="static:2"), module=toy_module(), data=toy_data())
    assert trainer.callback_metrics["ratio/max_abs_dev"] <= 1e-6
