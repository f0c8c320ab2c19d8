"""What a strategy does before its first worker runs: it checks what it was given, and makes the pool of workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from digenrl.data import PromptData
from digenrl.engines import Engine, InlineEngine, LocalEngine
from digenrl.module import accumulated_batches, check_data, check_dropping
from digenrl.strategies.checks import (
    check_algorithm,
    check_blocks,
    check_cluster,
    check_trainer,
    check_weight_plane,
    check_window,
)
from digenrl.strategies.devices import visible_devices
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.workers import WorkerSettings

if TYPE_CHECKING:
    from digenrl.strategies.disaggregated import DisaggregatedStrategy


def check_run(strategy: DisaggregatedStrategy, trainer: Trainer, *, engine: str, device: str) -> None:
    """Find what cannot work before a worker starts.

    Args:
        strategy: with its module and its options.
        trainer: that will run it.
        engine: that will be used.
        device: kind of the workers' devices.

    Raises:
        ValueError: a setting, or several together, that cannot be carried out.
    """
    check_cluster(
        engine,
        num_nodes=strategy.num_nodes,
        options={
            "ray_address": strategy.ray_address,
            "ray_runtime_env": strategy.ray_runtime_env,
            **{f"{role}_resources": resources for role, resources in strategy.resources.items()},
        },
    )
    check_weight_plane(strategy.weight_plane, engine=engine, num_nodes=strategy.num_nodes)
    check_trainer(
        trainer,
        precision=str(strategy.precision_plugin.precision),
        device=device,
        num_workers=strategy.num_workers,
        # A cluster is asked for its devices when they are reserved.
        num_devices=strategy.num_workers if engine == "ray" else len(strategy.parallel_devices or []),
        workers_per_device=strategy.workers_per_device,
    )
    num_accumulated, staleness = accumulated_batches(trainer), strategy.scheduling_policy.staleness
    check_window(staleness, num_accumulated)
    check_algorithm(
        strategy.module,
        groups_per_micro_batch=strategy.groups_per_micro_batch,
        staleness=staleness,
        accumulate_grad_batches=num_accumulated,
        generation_batch_size=strategy.generation_batch_size,
        makers_split_groups=strategy.devices_per_generator > 1 and strategy.reward_workers == 0,
    )
    check_blocks(
        strategy.module.policy,
        gradient_checkpointing=strategy.gradient_checkpointing,
        compile_blocks=strategy.compile_blocks,
        sharding=strategy.sharding != "none",
        devices_per_generator=strategy.devices_per_generator > 1,
        attention_backend=strategy.attention_backend,
    )
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    check_data(strategy.module, datamodule)
    check_dropping(strategy.module.reward_errors, trainer)
    if isinstance(datamodule, PromptData):
        strategy.micro_batch_groups(datamodule.prompts_per_step)
    strategy.module.policy.prepare()


def engine_name(strategy: DisaggregatedStrategy) -> str:
    """Give the engine that was chosen, or that `"auto"` stands for."""
    if strategy.engine != "auto":
        return strategy.engine
    is_cluster = strategy.ray_address is not None or "RAY_ADDRESS" in os.environ or strategy.num_nodes > 1
    return "ray" if is_cluster else "local"


def make_pool(strategy: DisaggregatedStrategy, trainer: Trainer, *, engine: str, device: str) -> WorkerPool:
    """Describe the workers of a run that `check_run` has found possible; none is started."""
    settings = WorkerSettings(
        device=device,
        precision="bf16-mixed" if strategy.precision_plugin.precision == "bf16-mixed" else "32-true",
        sharding=strategy.sharding,
        grad_sync=strategy.grad_sync,
        offloads_to_assist=strategy.assist_switch == "offload",
        offloads_optimizer=strategy.offload_optimizer,
        gradient_checkpointing=strategy.gradient_checkpointing,
        compiles_blocks=strategy.compile_blocks,
        attention_backend=strategy.attention_backend,
        num_workers=strategy.num_workers,
    )
    indices = [device.index or 0 for device in strategy.parallel_devices or []]
    return WorkerPool(
        _make_engine(strategy, trainer, engine),
        settings,
        num_generators=strategy.generators,
        num_trainers=strategy.trainers,
        num_reward_workers=strategy.reward_workers,
        devices_per_generator=strategy.devices_per_generator,
        resources=strategy.resources,
        weight_plane=strategy.weight_plane,
        max_restarts=strategy.max_restarts,
        snapshot=strategy.snapshot,
        devices=visible_devices(indices, os.environ),
        workers_per_device=strategy.workers_per_device,
    )


def _make_engine(strategy: DisaggregatedStrategy, trainer: Trainer, name: str) -> Engine:
    if name == "inline":
        return InlineEngine(strategy.task_timeout_s)
    if name == "ray":
        from digenrl.engines.ray import RayEngine

        return RayEngine(
            strategy.task_timeout_s,
            address=strategy.ray_address,
            runtime_env=strategy.ray_runtime_env,
            num_hosts=strategy.num_nodes,
            log_folder=Path(trainer.log_dir or trainer.default_root_dir) / "logs",
        )
    return LocalEngine(strategy.task_timeout_s)
