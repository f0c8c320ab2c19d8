"""Where and how a step runs may change its time, never its gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from digenrl.types import ScoredBatch
from tests.integration.toy_runs import fit, largest_difference, relative_difference, toy_data
from tests.toy import ToyPolicy, level_reward

STEP_SIZE = 1e4  # so large that the moved weights are the gradient, to float32's own precision


class Descent(FlowGRPO):
    """Plain gradient descent: the difference of the weights is the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=STEP_SIZE)


def descent() -> Descent:
    return Descent(ToyPolicy(), level_reward, group_size=4, num_steps=5, timestep_fraction=0.8, clip_range=1e-2, seed=0)


def gradient(strategy: Any, **settings: Any) -> dict[str, Tensor]:
    """The gradient of the first step, with its own starting weights taken off."""
    _, _, after = fit(strategy, module=descent(), **settings)
    before = initial_weights()
    return {name: (before[name] - after[name]) / STEP_SIZE for name in before}


@cache
def initial_weights() -> dict[str, Tensor]:
    module = descent()
    module.configure_model()
    return {name: value.clone() for name, value in module.state_dict().items()}


@cache
def reference_gradient() -> dict[str, Tensor]:
    """One backward per timestep over all samples, written out by hand, without Lightning."""
    module = descent()
    module.configure_model()
    prompts = module.prompt_batch(next(iter(toy_data().train_dataloader())))
    with torch.no_grad():
        trajectory = module.rollout(prompts)
        rewards = module.score(trajectory)
    scored = ScoredBatch.of_groups(trajectory, rewards, module.advantages(rewards, torch.tensor(prompts.group_ids)))
    timesteps = module.select_timesteps(prompts)
    for column in range(timesteps.shape[1]):
        losses = module.timestep_loss(scored.timestep_batch(timesteps[:, column : column + 1]))
        (losses.sum() / timesteps.numel()).backward()
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in module.named_parameters()
    }


def test_colocated_step_has_the_reference_gradient() -> None:
    assert relative_difference(gradient("auto"), reference_gradient()) <= 1e-6


@pytest.mark.parametrize("groups_per_micro_batch", [1, 2, "all"])
@pytest.mark.parametrize("timestep_batch_size", [1, 3, "all"])
@pytest.mark.parametrize("generators", [1, 2])
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_disaggregated_step_has_the_reference_gradient(
    groups_per_micro_batch: Any, timestep_batch_size: Any, generators: int, engine: Any
) -> None:
    strategy = DisaggregatedStrategy(
        generators,
        engine=engine,
        groups_per_micro_batch=groups_per_micro_batch,
        timestep_batch_size=timestep_batch_size,
    )
    assert relative_difference(gradient(strategy), reference_gradient()) <= 1e-6


def test_two_trainer_ranks_have_the_reference_gradient() -> None:
    strategy = DisaggregatedStrategy(2, 2, groups_per_micro_batch=2, timestep_batch_size=3)
    assert relative_difference(gradient(strategy), reference_gradient()) <= 1e-6


def test_accumulated_batches_have_the_colocated_gradient() -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "data": toy_data(prompts_per_step=2)}
    disaggregated = gradient(DisaggregatedStrategy(engine="inline"), **settings)
    assert relative_difference(disaggregated, gradient("auto", **settings)) <= 1e-6


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.01}])
@pytest.mark.parametrize("workers", [(1, 1), (2, 1), (2, 2)])
def test_weights_after_ten_steps_equal_the_colocated_run(settings: dict[str, Any], workers: tuple[int, int]) -> None:
    _, _, colocated = fit("auto", max_steps=10, **settings)
    trainer, _, disaggregated = fit(DisaggregatedStrategy(*workers), max_steps=10, **settings)
    assert trainer.global_step == 10
    assert largest_difference(disaggregated, colocated) <= 1e-5
    start = initial_weights()
    assert largest_difference(colocated, start) > 1e-3, "the run must have moved the weights"


def test_recomputed_ratio_at_the_first_update_is_one() -> None:
    trainer, _, _ = fit(DisaggregatedStrategy(2, generation_batch_size=1))
    assert trainer.callback_metrics["ratio/max_abs_dev"] <= 1e-6


def test_ratio_leaves_one_when_the_trainers_weights_are_not_the_generators() -> None:
    """The metric must be able to fail: here the module scores the steps with other weights than made them."""

    class Shifted(FlowGRPO):
        def timestep_loss(self, batch: Any) -> Tensor:
            with torch.no_grad():
                for parameter in self.policy.parameters():
                    parameter.mul_(1.001)
            return super().timestep_loss(batch)

    module = Shifted(ToyPolicy(), level_reward, group_size=4, num_steps=5, clip_range=1e-2, seed=0)
    trainer, _, _ = fit(DisaggregatedStrategy(engine="inline"), module=module)
    assert trainer.callback_metrics["ratio/max_abs_dev"] > 1e-5


def test_mixed_precision_reaches_the_workers() -> None:
    mixed = gradient(DisaggregatedStrategy(), precision="bf16-mixed")
    resolution = 2**-8  # of bfloat16; rounding depends on how samples are batched
    assert relative_difference(mixed, gradient("auto", precision="bf16-mixed")) <= 2 * resolution
    assert 1e-4 < relative_difference(mixed, reference_gradient()) <= 4 * resolution
