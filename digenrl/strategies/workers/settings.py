"""How workers are to compute, as the user has chosen it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Precision = Literal["32-true", "bf16-mixed"]

Sharding = Literal["none", "fsdp", "hybrid"]
"""How the trainers hold the policy's blocks: each all of them, each a share, or each a share of its host's."""

GradientSync = Literal["step", "micro_batch"]
"""When the ranks' gradients are summed up."""

TimestepBatchSize: TypeAlias = int | Literal["auto"] | None
"""Timesteps that are trained at a time: a number, what fits into memory, or None for all."""


@dataclass(frozen=True)
class WorkerSettings:
    """What all workers of a run are told before they build the module."""

    device: str = "cpu"
    """Kind of device, cpu or cuda; each worker sees its own only."""
    precision: Precision = "32-true"
    sharding: Sharding = "none"
    grad_sync: GradientSync = "step"
    offloads_to_assist: bool = False
    """Whether a trainer's gradients and optimizer state go to host memory while it generates."""
    offloads_optimizer: bool = False
    """Whether the optimizer's state is kept in host memory between its steps."""
    gradient_checkpointing: bool = False
    compiles_blocks: bool = False
    attention_backend: str | None = None
    """Of diffusers' attention dispatcher; None leaves it at what the policy has."""
    num_workers: int = 1
    """Of the run, at most so many share the memory of a host."""


@dataclass(frozen=True)
class RankGroup:
    """The processes that compute together as one worker, or as the trainers, and this one's place among them."""

    address: str
    """Of the host of the rendezvous."""
    port: int
    name: str
    """Unique among the groups of a run, those of restarted workers included."""
    rank: int
    hosts: tuple[str, ...]
    """Of each rank; equal names are the same host."""
    timeout_s: float

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)
