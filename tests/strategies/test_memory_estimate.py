from __future__ import annotations

import copy

import pytest
import torch

from digenrl.cli.estimates import weigh
from digenrl.strategies.memory_estimate import (
    TrainerPlan,
    WeightBytes,
    generator_memory,
    total_bytes,
    trainer_memory,
)
from tests.toy import ToyPolicy

WEIGHTS = WeightBytes(
    frozen_blocks=4000,
    frozen_rest=100,
    trained_blocks=800,
    trained_rest=40,
    trained_blocks_count=200,
    trained_rest_count=10,
    largest_block=600,
)


def toy() -> ToyPolicy:
    policy = ToyPolicy()
    policy.build()
    return policy


def parts(plan: TrainerPlan) -> dict[str, float]:
    return {part.name: part.num_bytes for part in trainer_memory(WEIGHTS, plan, 5000.0)}


def test_a_trainer_alone_holds_everything() -> None:
    assert parts(TrainerPlan(num_copies=2)) == {
        "weights": 4940,
        "gradients": 840,
        "optimizer state": 1680,
        "weight copies": 2 * 840,
        "activations": 5000,
    }


def test_sharding_shares_blocks_and_gathers_two() -> None:
    assert parts(TrainerPlan(shares=4, num_copies=1)) == {
        "weights": 4800 / 4 + 140,
        "gathered blocks": 1200,
        "gradients": 840,  # whole until the step's end
        "optimizer state": 2 * (800 / 4 + 40),
        "weight copies": 4 * (200 / 4 + 10),
        "activations": 5000,
    }
    assert parts(TrainerPlan(shares=4, grad_sync="micro_batch"))["gradients"] == 800 / 4 + 40


def test_what_is_kept_apart_or_away_counts_so() -> None:
    found = parts(TrainerPlan(num_gradients=2, offloads_optimizer=True))
    assert found["gradients"] == 2 * 840
    assert "optimizer state" not in found


def test_generators_hold_no_gradients() -> None:
    found = generator_memory(WEIGHTS, shares=2, num_copies=1, activation_bytes=70, recorded_bytes=30)
    assert [part.name for part in found] == [
        "weights", "gathered blocks", "weight copies", "activations", "recorded steps",
    ]  # fmt: skip
    assert total_bytes(found) == 4800 / 2 + 140 + 1200 + 4 * (200 / 2 + 10) + 70 + 30


def test_weights_are_weighed_as_they_are() -> None:
    policy = toy()
    weights = weigh(policy)
    blocks = sum(parameter.numel() for parameter in policy.blocks().parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert (weights.trained_blocks, weights.trained_blocks_count) == (4 * blocks, blocks)
    assert (weights.trained_rest, weights.frozen_rest, weights.frozen_blocks) == (4 * (trained - blocks), 4 * 64, 0)
    assert weights.largest_block == 4 * (32 * 32 + 32)


def test_gradients_and_optimizer_state_are_those_of_a_step() -> None:
    policy = toy()
    found = {part.name: part.num_bytes for part in trainer_memory(weigh(policy), TrainerPlan(), 0.0)}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    sum(parameter.sum() for parameter in trained).backward()
    optimizer.step()
    assert found["gradients"] == sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    state = copy.copy(optimizer.state_dict()["state"])
    moments = sum(entry[name].nbytes for entry in state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert found["optimizer state"] == pytest.approx(moments)
