"""Several devices that are one generator make the samples that one device would have made."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptBatch
from digenrl.algorithms import FlowGRPO
from tests.integration.test_equivalence import gradient, reference_gradient
from tests.integration.toy_runs import fit, largest_difference, relative_difference, toy_data
from tests.toy import WORDS, ToyPolicy, level_reward


@pytest.mark.parametrize("generation_batch_size", [None, 1])  # with 1, one of the devices has nothing to make
@pytest.mark.parametrize("trainer_assist", ["off", "static:1"])
def test_the_gradient_is_the_reference(generation_batch_size: Any, trainer_assist: str) -> None:
    strategy = DisaggregatedStrategy(
        devices_per_generator=2, generation_batch_size=generation_batch_size, trainer_assist=trainer_assist
    )
    assert relative_difference(gradient(strategy), reference_gradient()) <= 1e-6


def test_with_two_sharded_trainers_and_reward_workers_the_gradient_is_the_reference() -> None:
    strategy = DisaggregatedStrategy(
        trainers=2, devices_per_generator=2, reward_workers=1, sharding="fsdp", trainer_assist="static:1"
    )
    assert relative_difference(gradient(strategy), reference_gradient()) <= 1e-6


def test_validation_and_samples_are_those_of_one_device() -> None:
    results = []
    for devices in (1, 2):
        strategy = DisaggregatedStrategy(devices_per_generator=devices)
        trainer, module, weights = fit(
            strategy, max_steps=3, val_check_interval=1, data=toy_data(validation_prompts=WORDS)
        )
        results.append((trainer.callback_metrics["val/reward/mean"], weights))
    (reward, weights), (reward_of_two, weights_of_two) = results
    assert abs(reward - reward_of_two) <= 1e-6
    assert largest_difference(weights_of_two, weights) <= 1e-6


def test_a_groupwise_reward_needs_a_worker_of_its_own() -> None:
    class Ranks:
        groupwise = True

        def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
            return level_reward(media, prompts).argsort().argsort().float()

    module = FlowGRPO(ToyPolicy(), Ranks(), group_size=4, num_steps=5)
    with pytest.raises(ValueError, match="`reward_workers` must be at least 1 with `devices_per_generator`"):
        fit(DisaggregatedStrategy(devices_per_generator=2), module=module)
