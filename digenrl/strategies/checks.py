"""What cannot work together, found before a worker starts and said in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import JoinedReward, RewardTraits
from digenrl.strategies.blocks import check_attention_backend

PRECISIONS = ("32-true", "bf16-mixed")
"""What workers can compute in."""

DEVICES = ("cpu", "cuda")
"""What workers can compute on."""

T = TypeVar("T")

_WEIGHT_AVERAGING = ("WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging")


def check_count(name: str, value: T, *, least: int = 1, unless: Sequence[object] = ()) -> T:
    """Give back an option that is a count, or one of the other values that it may have.

    Raises:
        ValueError: it is neither.
    """
    if value not in unless and (not isinstance(value, int) or value < least):
        raise ValueError(f"`{name}` is a count and must be at least {least}, got {value!r}.")
    return value


def check_choice(name: str, choice: T, choices: Sequence[str]) -> T:
    """Give back an option that is one of some words.

    Raises:
        ValueError: it is none of them.
    """
    if choice not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {choice!r}.")
    return choice


def check_trainer(
    trainer: Trainer, *, precision: str, device: str, num_workers: int, num_devices: int, workers_per_device: int = 1
) -> None:
    """Check what the Trainer was given against what workers can do.

    Args:
        trainer: with its callbacks.
        precision: of its precision plugin.
        device: kind of the workers' devices.
        num_workers: workers that need a device each.
        num_devices: devices that the Trainer has.
        workers_per_device: workers that share one.

    Raises:
        ValueError: a setting that this strategy cannot carry out.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"`precision` must be one of {', '.join(PRECISIONS)} with this strategy, got {precision}.")
    if device not in DEVICES:
        raise ValueError(f"`accelerator` must be one of {', '.join(DEVICES)} with this strategy, got {device}.")
    if device != "cuda" and workers_per_device > 1:
        raise ValueError(f"`workers_per_device` shares GPUs, but `accelerator` is {device}: leave it at 1.")
    num_needed = -(-num_workers // workers_per_device)
    if device == "cuda" and num_needed > num_devices:
        raise ValueError(
            f"the workers need {num_needed} devices, {num_workers} workers in all, but the Trainer has {num_devices}: "
            "ask for fewer `generators`, `trainers` or `reward_workers`, or let them share with `workers_per_device`."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback).__name__ in _WEIGHT_AVERAGING:
            raise ValueError(
                f"callback `{type(callback).__name__}` averages the weights of this process, which has none "
                "under this strategy; remove it."
            )
        if isinstance(callback, GradientAccumulationScheduler) and len(set(callback.scheduling.values())) > 1:
            raise ValueError(
                "callback `GradientAccumulationScheduler` must keep one value with this strategy, got "
                f"{callback.scheduling}: use `accumulate_grad_batches` of the Trainer instead."
            )


def check_ranks(
    *,
    engine: str,
    trainers: int,
    devices_per_generator: int,
    sharding: str,
    grad_sync: str,
    workers_per_device: int = 1,
) -> None:
    """Check what several processes that compute together need.

    Raises:
        ValueError: a setting that needs more processes, or other ones.
    """
    for name, value in {"trainers": trainers, "devices_per_generator": devices_per_generator}.items():
        if engine == "inline" and value > 1:
            raise ValueError(
                f"`{name}` must be 1 with engine `inline`, got {value}: ranks need processes of their own."
            )
        if workers_per_device > 1 and value > 1:
            raise ValueError(
                f"`{name}` must be 1 with `workers_per_device` {workers_per_device}, got {value}: ranks that compute "
                "together need a GPU each (NCCL)."
            )
    if sharding != "none" and trainers == 1:
        raise ValueError(
            f"`sharding` {sharding} shares the policy among trainers, but `trainers` is 1: raise it, or leave "
            "`sharding` at none."
        )
    if grad_sync == "micro_batch" and sharding == "none":
        raise ValueError(
            "`grad_sync` micro_batch saves memory with `sharding` fsdp or hybrid only: without, each trainer holds a "
            "whole gradient anyway."
        )


def check_cluster(engine: str, *, num_nodes: int, options: Mapping[str, object]) -> None:
    """Check what only a Ray cluster can carry out.

    Args:
        engine: that will be used.
        num_nodes: of the Trainer.
        options: by name, of a cluster; None or empty where not given.

    Raises:
        ValueError: another engine was asked for.
    """
    if engine == "ray":
        return
    if num_nodes != 1:
        raise ValueError(f"`num_nodes` must be 1 with engine `{engine}`, got {num_nodes}: several hosts need `ray`.")
    for name, value in options.items():
        if value:
            raise ValueError(f"`{name}` needs engine `ray`, got {value!r} with engine `{engine}`.")


def check_weight_plane(weight_plane: str, *, engine: str, num_nodes: int) -> None:
    """Check that weights can travel as asked; whether hosts really share memory shows when they are known.

    Raises:
        ValueError: the plane needs processes of their own, or one host.
    """
    if weight_plane == "collective" and engine == "inline":
        raise ValueError(
            "`weight_plane` must not be collective with engine `inline`: workers need processes of their own to send "
            "messages to each other."
        )
    if weight_plane == "shared_memory" and num_nodes > 1:
        raise ValueError(
            f"`weight_plane` shared_memory needs all workers on one host, but `num_nodes` is {num_nodes}: use "
            "object_store, collective or auto."
        )


def check_blocks(policy: DiffusionPolicy, *, attention_backend: str | None, **options: bool) -> None:
    """Check what the policy's blocks were given, as far as a policy that is not built shows it.

    Raises:
        ValueError: an option that applies to blocks is on and the policy's class defines none, or diffusers does not
            know the attention backend.
    """
    for name, is_on in options.items():
        if is_on and type(policy).blocks is DiffusionPolicy.blocks:
            raise ValueError(
                f"`{name}` applies to the policy's blocks: let `{type(policy).__name__}.blocks()` give them, or leave "
                "it off."
            )
    if attention_backend is not None:
        check_attention_backend(attention_backend)


def check_window(staleness: float, accumulate_grad_batches: int) -> None:
    """Check that a step's samples can be stale at all.

    Raises:
        ValueError: batches of one window have the same weights.
    """
    if staleness > 0 and accumulate_grad_batches != 1:
        raise ValueError(
            f"`staleness` must be 0 with `accumulate_grad_batches` {accumulate_grad_batches}: the batches of a window "
            "have the same weights, so none of them can be stale."
        )


def check_algorithm(
    module: DiffusionRLModule,
    *,
    groups_per_micro_batch: int | Literal["all"],
    staleness: float,
    accumulate_grad_batches: int,
    generation_batch_size: int | None,
    makers_split_groups: bool,
) -> None:
    """Check what the algorithm was given against how the step is cut and overlapped.

    Raises:
        ValueError: the combination would not give the gradient that the algorithm defines.
    """
    if module.updates_per_rollout > 1 and (staleness > 0 or accumulate_grad_batches > 1):
        name, value = (
            ("staleness", staleness) if staleness > 0 else ("accumulate_grad_batches", accumulate_grad_batches)
        )
        raise ValueError(
            f"`updates_per_rollout` must be 1 with `{name}` {value}, got {module.updates_per_rollout}: its later steps "
            "overlap with the rollout already."
        )
    if RewardTraits.of(module.reward).groupwise and (generation_batch_size or module.group_size) < module.group_size:
        raise ValueError(
            f"`generation_batch_size` must be at least the `group_size` {module.group_size}, got "
            f"{generation_batch_size}: the reward compares the samples of a group, so one worker makes all of them."
        )
    if RewardTraits.of(module.reward).groupwise and makers_split_groups:
        raise ValueError(
            "`reward_workers` must be at least 1 with `devices_per_generator` above 1 and a reward that compares the "
            "samples of a group: the devices of a generator make and score parts of it."
        )
    if not module.advantage_settings.need_batch_std or groups_per_micro_batch == "all":
        return
    if not module.advantages_scale_gradient:
        raise ValueError(
            f"`advantage_scope` batch needs `groups_per_micro_batch: all` with {type(module).__name__}: its gradient "
            "is not proportional to the advantages, so training cannot begin before the step's std is known."
        )
    if type(module).advantages is not DiffusionRLModule.advantages:
        raise ValueError(
            f"`advantage_scope` batch needs `groups_per_micro_batch: all` with {type(module).__name__}: it defines "
            "`advantages`, which training on centered rewards, before the step's std is known, would leave out."
        )
    if isinstance(module.reward, JoinedReward) and not module.reward.sums_raw_rewards:
        raise ValueError(
            "`advantage_scope` batch needs `groups_per_micro_batch: all` with several rewards: each has a std of its "
            "own, so training cannot begin before they are known."
        )
    if accumulate_grad_batches > 1:
        raise ValueError(
            f"`advantage_scope` batch needs `groups_per_micro_batch: all` with `accumulate_grad_batches` "
            f"{accumulate_grad_batches}: gradients of batches with different stds are added up."
        )


def micro_batch_groups(
    groups_per_micro_batch: int | Literal["all"], *, num_groups: int, group_size: int, num_trainers: int
) -> int:
    """Give the groups of a micro-batch in a step of `num_groups`.

    Raises:
        ValueError: micro-batches do not divide the step, or cannot be split over the trainers.
    """
    size = num_groups if groups_per_micro_batch == "all" else groups_per_micro_batch
    if num_groups % size != 0:
        divisors = [value for value in range(1, num_groups + 1) if num_groups % value == 0]
        below = max(value for value in divisors if value < size)
        above = [value for value in divisors if value > size][:1]
        nearest = " or ".join(str(value) for value in (below, *above))
        raise ValueError(
            f"`groups_per_micro_batch` must divide the {num_groups} prompts of a step, got {size}; "
            f"the nearest that does is {nearest}."
        )
    if size * group_size < num_trainers:
        raise ValueError(
            f"`groups_per_micro_batch` {size} gives micro-batches of {size * group_size} samples, too few for "
            f"{num_trainers} trainers: raise it."
        )
    return size
