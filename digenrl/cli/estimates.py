"""What a dry run says of memory and time: from the settings of a run and a traced forward to figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from digenrl.algorithms.forward_process import ForwardProcessModule
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.policies.forward_costs import ForwardCosts
from digenrl.rewards import RewardTraits
from digenrl.scheduling import MicroBatch, cut_step
from digenrl.scheduling.simulate import Cluster, Workload
from digenrl.strategies import DisaggregatedStrategy
from digenrl.strategies.memory_estimate import (
    MemoryPart,
    TrainerPlan,
    WeightBytes,
    generator_memory,
    total_bytes,
    trainer_memory,
)
from digenrl.types import Prompt, PromptBatch

GIB = 1024**3
UTILIZATION = 0.4
"""Share of a device's peak that a forward or backward is taken to reach."""
_BYTES_PER_S = 20e9
"""At which weights are taken to travel from trainers to generators."""
_RANKS_PER_HOST = 8
_MARGIN = 0.8  # of the free memory that activations may take, as on workers
_AVERAGES = ("ema", "rollout")
"""Copies that losses do not ask."""


@dataclass(frozen=True)
class Device:
    """A kind of accelerator."""

    name: str
    memory_bytes: float
    bf16_flops: float
    """Peak operations per second of dense products of matrices."""
    fp32_flops: float


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 80 * GIB, 312e12, 19.5e12),
        Device("h100", 80 * GIB, 989e12, 67e12),
        Device("h200", 141e9, 989e12, 67e12),
        Device("b200", 180e9, 2250e12, 80e12),
        Device("l40s", 48 * GIB, 362e12, 91.6e12),
        Device("mi300x", 192 * GIB, 1307e12, 163e12),
    )
}
"""By name; figures are the makers', without sparsity."""


@dataclass(frozen=True)
class StepShape:
    """How the work of a step is cut."""

    micro_batches: tuple[MicroBatch, ...]
    num_groups: int
    group_size: int
    num_trained_samples: int
    """Of a group."""
    num_timesteps: int
    """That a sample is trained at."""
    num_recorded: int
    """Denoising steps that a rollout keeps."""
    timesteps_at_once: int
    trainers: int
    devices_per_generator: int
    is_auto: bool

    @property
    def trainer_samples(self) -> int:
        """Samples of a micro-batch that the trainer with the most of them gets."""
        num_groups = len(self.micro_batches[0]) // self.group_size
        return math.ceil(num_groups * self.num_trained_samples / self.trainers)

    @property
    def generated_samples(self) -> int:
        """Samples that a generator's device makes at a time, at most."""
        return max(
            math.ceil(len(part) / self.devices_per_generator) for batch in self.micro_batches for part in batch.slices
        )

    @classmethod
    def of(cls, module: DiffusionRLModule, strategy: DisaggregatedStrategy, num_groups: int) -> StepShape:
        """Cut a step as a run does.

        Raises:
            ValueError: micro-batches do not divide it.
        """
        prompts = PromptBatch.for_step([Prompt("", 0)], step=0, group_size=module.group_size, seed=module.seed)
        num_timesteps = module.select_timesteps(prompts).shape[1]
        size = strategy.timestep_batch_size
        micro_batches = cut_step(
            0,
            num_groups=num_groups,
            group_size=module.group_size,
            groups_per_micro_batch=strategy.micro_batch_groups(num_groups),
            num_generators=strategy.generators,
            generation_batch_size=strategy.generation_batch_size,
            keeps_groups_whole=RewardTraits.of(module.reward).groupwise,
        )
        return cls(
            micro_batches,
            num_groups,
            module.group_size,
            module.num_trained_samples,
            num_timesteps,
            0 if isinstance(module, ForwardProcessModule) else len(module.recorded_steps(0)) + 1,
            num_timesteps if size == "all" else 1 if size == "auto" else min(int(size), num_timesteps),
            strategy.trainers,
            strategy.devices_per_generator,
            size == "auto",
        )


@dataclass(frozen=True)
class PolicyCalls:
    """How often the policy is asked for a sample."""

    rollout_rows: int
    """Rows of a denoising step for a sample: two with classifier-free guidance."""
    trained_rows: int
    reference_rows: int
    """Rows without gradient for a trained row's sample."""
    num_steps: int

    @classmethod
    def of(cls, module: DiffusionRLModule) -> PolicyCalls:
        """Count them; a loss is taken to train with the guidance of rollouts, but on the forward process."""
        guided = 1 if module.guidance_scale == 1 else 2
        is_forward = isinstance(module, ForwardProcessModule)
        reference_guided = 2 if getattr(module, "reference_guidance_scale", 1.0) != 1 else 1
        references = [name for name in module._schedules if name not in _AVERAGES]
        trained_rows = 1 if is_forward or not module.train_guidance else guided
        return cls(
            # Where the policy is trained without the guidance of rollouts, these score their steps without it, too.
            rollout_rows=guided if is_forward or module.train_guidance or guided == 1 else guided + 1,
            trained_rows=trained_rows,
            reference_rows=sum(
                (reference_guided if name == "reference" else 1) if is_forward else trained_rows for name in references
            ),
            num_steps=module.num_steps,
        )


def weigh(policy: DiffusionPolicy) -> WeightBytes:
    """Weigh a policy that is built; blocks are those that ranks may share."""
    blocks = list(policy.blocks())
    shared = {id(parameter) for block in blocks for parameter in block.parameters() if parameter.ndim > 0}
    sums = {(is_block, is_trained): [0, 0] for is_block in (True, False) for is_trained in (True, False)}
    for tensor in (*policy.parameters(), *policy.buffers()):
        entry = sums[id(tensor) in shared, tensor.requires_grad]
        entry[0] += tensor.nbytes
        entry[1] += tensor.numel()
    return WeightBytes(
        frozen_blocks=sums[True, False][0],
        frozen_rest=sums[False, False][0],
        trained_blocks=sums[True, True][0],
        trained_rest=sums[False, True][0],
        trained_blocks_count=sums[True, True][1],
        trained_rest_count=sums[False, True][1],
        largest_block=max((sum(entry.nbytes for entry in block.parameters()) for block in blocks), default=0),
    )


def shares_of(strategy: DisaggregatedStrategy) -> int:
    """Give the ranks that share a trainer's blocks; hosts are taken to have eight trainers with `hybrid`."""
    return {
        "none": 1,
        "fsdp": strategy.trainers,
        "hybrid": min(strategy.trainers, _RANKS_PER_HOST),
    }[strategy.sharding]


def estimate_trainer(
    module: DiffusionRLModule,
    strategy: DisaggregatedStrategy,
    weights: WeightBytes,
    costs: ForwardCosts | None,
    shape: StepShape,
) -> tuple[MemoryPart, ...]:
    """Estimate the memory of a trainer's device; without activations if no forward was traced."""
    waits_for_std = module.advantage_settings.need_batch_std and len(shape.micro_batches) > 1
    plan = TrainerPlan(
        shares=shares_of(strategy),
        grad_sync=strategy.grad_sync,
        num_gradients=2 if waits_for_std and getattr(module, "kl_beta", 0.0) > 0 else 1,
        num_copies=len(module._schedules),
        offloads_optimizer=strategy.offload_optimizer,
    )
    rows = shape.trainer_samples * shape.timesteps_at_once * PolicyCalls.of(module).trained_rows
    kept = 0.0 if costs is None else costs.kept_bytes(rows, checkpointing=strategy.gradient_checkpointing)
    return trainer_memory(weights, plan, kept)


def estimate_generator(
    module: DiffusionRLModule,
    strategy: DisaggregatedStrategy,
    weights: WeightBytes,
    costs: ForwardCosts | None,
    shape: StepShape,
) -> tuple[MemoryPart, ...]:
    """Estimate the memory of a generator's device; see `estimate_trainer`."""
    samples = shape.generated_samples
    rows = samples * PolicyCalls.of(module).rollout_rows
    latent_bytes = 4 * math.prod(module.policy.latent_shape)
    return generator_memory(
        weights,
        shares=strategy.devices_per_generator,
        # Workers build all copies alike; what only a loss needs is there as well.
        num_copies=len(module._schedules),
        activation_bytes=0.0 if costs is None else costs.largest_block_bytes(rows),
        recorded_bytes=samples * latent_bytes * (shape.num_recorded + 1),
    )


def fit_timesteps(
    shape: StepShape, module: DiffusionRLModule, strategy: DisaggregatedStrategy, weights: WeightBytes,
    costs: ForwardCosts, device: Device,
) -> StepShape:  # fmt: skip
    """Take as many timesteps at a time as fit into a device's memory, as `timestep_batch_size` auto does."""
    best = replace(shape, timesteps_at_once=1)
    for size in range(1, shape.num_timesteps + 1):
        candidate = replace(shape, timesteps_at_once=size)
        parts = estimate_trainer(module, strategy, weights, costs, candidate)
        held = total_bytes(tuple(part for part in parts if part.name != "activations"))
        if total_bytes(parts) - held > _MARGIN * (device.memory_bytes - held):
            break
        best = candidate
    return best


def estimate_workload(
    module: DiffusionRLModule,
    strategy: DisaggregatedStrategy,
    weights: WeightBytes,
    costs: ForwardCosts,
    shape: StepShape,
    flops_per_s: float,
) -> Workload:
    """Estimate a step's costs, on one worker, from operations per second.

    A forward of one row takes F operations; its backward F where only an adapter is trained and 2 F otherwise, and F
    more with gradient checkpointing. Rewards, text encoders, the VAE and the optimizer's step count nothing.
    """
    calls = PolicyCalls.of(module)
    forward_s = costs.flops.of(1) / flops_per_s
    backward = 1 if weights.frozen_blocks + weights.frozen_rest > weights.trained_blocks + weights.trained_rest else 2
    per_row = 1 + backward + strategy.gradient_checkpointing
    trained_s = shape.num_timesteps * (calls.trained_rows * per_row + calls.reference_rows) * forward_s
    published = weights.held_trained(1) + len(module._published) * weights.copy(1)
    return Workload(
        num_groups=shape.num_groups,
        group_size=shape.group_size,
        generate_s=calls.num_steps * calls.rollout_rows * forward_s / strategy.devices_per_generator,
        update_s=trained_s * shape.num_trained_samples / shape.group_size,
        assist_s=calls.num_steps * calls.rollout_rows * forward_s,
        groups_per_micro_batch=len(shape.micro_batches[0]) // shape.group_size,
        generation_batch_size=strategy.generation_batch_size,
        publish_s=published / _BYTES_PER_S,
        load_s=published / _BYTES_PER_S,
    )


def cluster_of(strategy: DisaggregatedStrategy) -> Cluster:
    """Give the workers of a run."""
    return Cluster(strategy.generators, strategy.trainers, strategy.reward_workers)


def count_by_part(policy: nn.Module) -> list[tuple[str, int, int, str]]:
    """Count numbers in each part of a policy, two levels deep: its name, all, those that are trained, and dtypes.

    What is numbered, as blocks are, is one part.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in policy.named_parameters():
        owners = [part for part in name.split(".")[:-1] if not part.isdigit()]
        parts.setdefault(".".join(owners[:2]) or name, []).append(parameter)
    return [(name, *_counts(tensors)) for name, tensors in parts.items()]


def _counts(tensors: Sequence[torch.Tensor]) -> tuple[int, int, str]:
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    trained = sum(tensor.numel() for tensor in tensors if tensor.requires_grad)
    return sum(tensor.numel() for tensor in tensors), trained, " and ".join(dtypes)
