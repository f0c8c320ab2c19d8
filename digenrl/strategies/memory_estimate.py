"""How much device memory a worker of a run needs, by arithmetic: nothing here touches a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_FLOAT32 = 4
_GATHERED_BLOCKS = 2  # the one that computes and the one that is fetched meanwhile


@dataclass(frozen=True)
class WeightBytes:
    """A policy's weights by whether ranks share them and whether they are trained, in bytes."""

    frozen_blocks: int
    frozen_rest: int
    trained_blocks: int
    trained_rest: int
    trained_blocks_count: int
    """Trained numbers in blocks, which copies and averages hold in float32."""
    trained_rest_count: int
    largest_block: int

    def held(self, shares: int) -> float:
        """Give the weights that one of `shares` ranks holds: its share of the blocks and all that is outside."""
        return (self.frozen_blocks + self.trained_blocks) / shares + self.frozen_rest + self.trained_rest

    def held_trained(self, shares: int) -> float:
        """Give what of these is trained."""
        return self.trained_blocks / shares + self.trained_rest

    def copy(self, shares: int) -> float:
        """Give a second set of the trained weights in float32."""
        return _FLOAT32 * (self.trained_blocks_count / shares + self.trained_rest_count)


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer is to hold beside its activations."""

    shares: int = 1
    """Ranks that share the blocks; 1 is without sharding."""
    grad_sync: Literal["step", "micro_batch"] = "step"
    num_gradients: int = 1
    """Sets of gradients: 2 where a regularizer's are kept apart."""
    num_copies: int = 0
    """References, old policies and averages."""
    offloads_optimizer: bool = False


@dataclass(frozen=True)
class MemoryPart:
    """A line of an estimate."""

    name: str
    num_bytes: float


def trainer_memory(weights: WeightBytes, plan: TrainerPlan, activation_bytes: float) -> tuple[MemoryPart, ...]:
    """Estimate a trainer's memory with AdamW, without what libraries and the allocator's fragments take.

    With W bytes of weights in blocks and R outside, trained ones of them w and r, S ranks, and copies in float32:

        weights        W / S + R, and two gathered blocks if S > 1
        gradients      w + r, with `grad_sync` micro_batch w / S + r
        optimizer      2 (w / S + r)
        copies         each 4 bytes per trained number, shared as the weights are
        activations    see `ForwardCosts.kept_bytes`

    Args:
        weights: of the policy.
        plan: the trainer's settings.
        activation_bytes: that autograd keeps of the largest forward.
    """
    shares = plan.shares
    gradients = weights.held_trained(shares if plan.grad_sync == "micro_batch" else 1)
    optimizer = 0.0 if plan.offloads_optimizer else 2 * weights.held_trained(shares)
    return _present(
        ("weights", weights.held(shares)),
        ("gathered blocks", _GATHERED_BLOCKS * weights.largest_block if shares > 1 else 0),
        ("gradients", plan.num_gradients * gradients),
        ("optimizer state", optimizer),
        ("weight copies", plan.num_copies * weights.copy(shares)),
        ("activations", activation_bytes),
    )


def generator_memory(
    weights: WeightBytes, *, shares: int, num_copies: int, activation_bytes: float, recorded_bytes: float
) -> tuple[MemoryPart, ...]:
    """Estimate a generator's memory without text encoders, VAE and reward.

    Args:
        weights: of the policy.
        shares: devices of a generator.
        num_copies: copies that rollouts or validation need.
        activation_bytes: that a forward without gradient holds at a time.
        recorded_bytes: of the samples that it makes at a time.
    """
    return _present(
        ("weights", weights.held(shares)),
        ("gathered blocks", _GATHERED_BLOCKS * weights.largest_block if shares > 1 else 0),
        ("weight copies", num_copies * weights.copy(shares)),
        ("activations", activation_bytes),
        ("recorded steps", recorded_bytes),
    )


def total_bytes(parts: tuple[MemoryPart, ...]) -> float:
    """Add up an estimate."""
    return sum(part.num_bytes for part in parts)


def _present(*parts: tuple[str, float]) -> tuple[MemoryPart, ...]:
    return tuple(MemoryPart(name, num_bytes) for name, num_bytes in parts if num_bytes > 0)
