"""Rows of stored losses on the forward process, as `timestep_loss` gets them, and the policies behind the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from digenrl import Condition, DiffusionPolicy, Prompt, PromptBatch
from digenrl.algorithms import ForwardProcessModule
from digenrl.diffusion import Euler, flow_match_sigmas
from digenrl.types import TimestepBatch
from tests.algorithms.toy_rows import total_loss
from tests.functional.golden import assert_gradient, tensors
from tests.toy import level_reward


@dataclass(frozen=True)
class StoredCondition(Condition):
    value: Tensor  # [N, 8] of `StoredLinear`, or the row [N] in the velocities of `StoredVelocities`


class StoredPolicy(DiffusionPolicy):
    """A policy with given weights."""

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        self.stored = weights

    def build(self) -> None:
        for name, weight in self.stored.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def encode(self, prompts: Sequence[str]) -> Condition:
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def sigmas(self, num_steps: int) -> Tensor:
        return flow_match_sigmas(num_steps)


class StoredLinear(StoredPolicy):
    """v = x W' + b + 0.2 c + 0.1 sigma, for x and c of 8 numbers a token."""

    def unconditional(self, condition: Condition) -> Condition:
        assert isinstance(condition, StoredCondition)
        return StoredCondition(torch.zeros_like(condition.value))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: StoredCondition) -> Tensor:
        return latents @ self.weight.T + self.bias + 0.2 * condition.value[:, None] + 0.1 * sigma[:, None, None]


class StoredVelocities(StoredPolicy):
    """The velocities are the weights."""

    def velocity(self, latents: Tensor, sigma: Tensor, condition: StoredCondition) -> Tensor:
        return self.velocities[condition.value]


def stored_module(cls: type[ForwardProcessModule], policy: StoredPolicy, noise: Tensor, **settings: Any) -> Any:
    """Build an algorithm that takes the stored noise [N, ...] instead of drawing its own."""
    own = type(cls.__name__, (cls,), {"training_noise": lambda self, batch, *, shared: noise})
    module = own(policy, level_reward, **{"num_steps": 10, "num_trained_timesteps": 1, "seed": 0, **settings})
    module.configure_model()
    return module


def set_copy(module: Any, name: str, **weights: Tensor) -> None:
    """Give a copy of the weights the stored values."""
    buffers = dict(module.policy_copy(name).weights.named_buffers())
    assert buffers.keys() == weights.keys()
    for key, weight in weights.items():
        buffers[key].copy_(weight)


def linear_weights(golden: Any, weight: str, bias: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(zip(("weight", "bias"), tensors(golden, weight, bias, dtype=dtype), strict=True))


def stored_batch(
    final_latents: Tensor, sigma: Tensor, advantages: Tensor, group_index: Tensor, condition: Tensor
) -> TimestepBatch:
    num_rows = len(final_latents)
    prompts = PromptBatch(
        (Prompt("low", 0),) * num_rows, tuple(group_index.tolist()), tuple(range(num_rows)), (0,) * num_rows, step=0
    )
    return TimestepBatch(
        prompts=prompts,
        latents=None,
        next_latents=None,
        final_latents=final_latents,
        sigma=sigma,
        next_sigma=torch.zeros_like(sigma),
        sigma_max=torch.ones_like(sigma),
        timestep_index=torch.zeros(num_rows, dtype=torch.int64),
        old_log_probs=None,
        advantages=advantages,
        group_index=group_index,
        condition=StoredCondition(condition),
        kernel=Euler(),
        policy_version=0,
    )


def two_timesteps(golden: Any, order: Any, dtype: torch.dtype) -> tuple[TimestepBatch, Tensor]:
    """Flow-Factory's 8 samples at 2 timesteps as one batch, each timestep one group, with the noise."""
    x0, embeds, advantages = (x[order] for x in tensors(golden, "x0", "embeds", "adv", dtype=dtype))
    x0, embeds, advantages = (torch.cat([x, x]) for x in (x0, embeds, advantages))
    timesteps, noise = (x.flatten(0, 1) for x in tensors(golden, "timesteps", "noise", dtype=dtype))
    group_index = torch.arange(2).repeat_interleave(8)
    return stored_batch(x0, timesteps / 1000, advantages, group_index, embeds), noise


def mean_loss(module: Any, batch: TimestepBatch) -> Tensor:
    """The loss of a step that has these rows only, after its backward pass."""
    loss = total_loss(module.timestep_loss(batch)) / len(batch)
    loss.backward()
    return loss.detach()


def assert_linear_gradients(module: Any, golden: Any, bound: float) -> None:
    assert_gradient(module.policy.weight.grad, golden["gradW0"], bound)
    assert_gradient(module.policy.bias.grad, golden["gradb0"], bound)
