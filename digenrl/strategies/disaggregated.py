"""The Lightning strategy that splits a run's devices into generators and trainers."""

from __future__ import annotations

import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import cloudpickle
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from digenrl.data import PromptData
from digenrl.engines import Engine, InlineEngine, LocalEngine
from digenrl.module import (
    VALIDATION_MEAN,
    DiffusionRLModule,
    accumulated_batches,
    as_prompts,
    check_data,
    check_dropping,
)
from digenrl.rewards import RewardTraits, check_picklable
from digenrl.scheduling import Scheduler, SchedulingPolicy, cut_step
from digenrl.scheduling.profile import Profile
from digenrl.strategies import skeleton
from digenrl.strategies.checks import (
    check_algorithm,
    check_blocks,
    check_cluster,
    check_ranks,
    check_trainer,
    check_weight_plane,
    check_window,
    micro_batch_groups,
)
from digenrl.strategies.devices import visible_devices
from digenrl.strategies.driver import StepDriver
from digenrl.strategies.lookahead import LookaheadLoader
from digenrl.strategies.optimizers import OptimizerSpec, changed_settings, hyper_parameters
from digenrl.strategies.parity import NUM_SAMPLES, ParityCheck
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.single_process import SingleProcessStrategy
from digenrl.strategies.snapshots import StepCall, check_restarts
from digenrl.strategies.step_book import StepPlan, StepResult, WorkerSpan
from digenrl.strategies.step_window import StepWindow
from digenrl.strategies.weight_planes import WeightPlaneName
from digenrl.strategies.workers import GradientSync, Sharding, Span, StepReport, WorkerSettings
from digenrl.types import PromptBatch

log = logging.getLogger(__name__)

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

_FREE_WITHIN_S = 10.0  # of an error; a trainer that is not keeps its state

EngineName = Literal["auto", "local", "ray", "inline"]


class DisaggregatedStrategy(SingleProcessStrategy):
    """Run generation and training on separate workers, pipelined along the generation axis (arXiv:2606.24369).

    Lightning's loops run unchanged in this process, the driver, which holds no weights: the module's parameters
    are on the meta device here, and `state_dict` fetches them. One batch is one policy version is one
    `global_step`, so callbacks, LR schedulers, gradient clipping, checkpoints and loggers work as in any script.
    `Strategy.training_step` runs a whole RL step on the workers, `optimizer.step` is a call to the trainers.

    Workers outlive `fit`, so that `validate`, `state_dict` and `save_checkpoint` afterwards see the trained
    weights; `shutdown`, an error, another module or the end of the process ends them.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=DisaggregatedStrategy(generators=2, trainers=1), max_steps=100)
    """

    strategy_name = "disaggregated"

    def __init__(
        self,
        generators: int = 1,
        trainers: int = 1,
        *,
        devices_per_generator: int = 1,
        reward_workers: int = 0,
        workers_per_device: int = 1,
        engine: EngineName = "auto",
        groups_per_micro_batch: int | Literal["all"] = 1,
        generation_batch_size: int | None = None,
        timestep_batch_size: int | Literal["all", "auto"] = "all",
        trainer_assist: str = "optimal",
        assist_switch: Literal["none", "offload"] = "none",
        staleness: float = 0.0,
        staleness_mode: Literal["cap", "exact"] = "cap",
        sharding: Sharding = "none",
        grad_sync: GradientSync = "step",
        weight_plane: WeightPlaneName = "auto",
        max_restarts: int = 0,
        snapshot: str = "every_step",
        gradient_checkpointing: bool = False,
        compile_blocks: bool = False,
        attention_backend: str | None = None,
        offload_optimizer: bool = False,
        generator_resources: Mapping[str, float] | None = None,
        trainer_resources: Mapping[str, float] | None = None,
        reward_worker_resources: Mapping[str, float] | None = None,
        ray_address: str | None = None,
        ray_runtime_env: Mapping[str, Any] | None = None,
        task_timeout_s: float = 3600.0,
        parity_check: ParityCheck = "raise",
    ) -> None:
        """Describe the workers and the pipeline; nothing is started.

        Args:
            generators: workers that make and score samples.
            trainers: data-parallel workers that train.
            devices_per_generator: devices that make a generator's samples together, each with a share of the policy's
                blocks, for a policy that one device cannot hold.
            reward_workers: workers that only score; 0 lets the maker of a sample score it.
            workers_per_device: workers that share a GPU, for small policies; trainers that are several, and the devices
                of one generator, cannot.
            engine: `"local"` runs each worker in a process of this host, `"ray"` on the hosts of a Ray cluster,
                `"inline"` all in this process, for debugging. `"auto"` is `"ray"` if there is a `ray_address`, the
                environment has `RAY_ADDRESS` or the Trainer's `num_nodes` is above 1, and else `"local"`.
            groups_per_micro_batch: prompt groups that are generated, scored and trained as a unit; `"all"` waits
                for the whole step before training begins.
            generation_batch_size: most samples that a generator makes at a time; None sets no bound.
            timestep_batch_size: timesteps trained in one forward and backward (timestep parallelism); `"auto"` takes
                as many as fit into memory.
            trainer_assist: whether trainers generate where that ends the step earlier: `"off"`, `"static:K"` (K
                micro-batches a step), `"search"` (at bubbles) or `"optimal"`.
            assist_switch: `"offload"` moves gradients and optimizer state to host memory while a trainer generates.
            staleness: largest fraction of a step's samples that may be made with the weights before its own, while
                those are still being trained, in [0, 1); 0 is strictly on-policy.
            staleness_mode: `"cap"` makes them early as timing allows, `"exact"` the same ones in every run.
            sharding: how trainers hold the policy's blocks: `"none"`, each all of them; `"fsdp"`, each a share
                (FSDP2); `"hybrid"`, each a share of what its host holds, all hosts alike.
            grad_sync: when sharded trainers sum up their gradients: once a `"step"`, for which each holds a whole
                gradient, or with each `"micro_batch"`, for which it holds a share.
            weight_plane: how weights travel: `"shared_memory"` of one host, `"object_store"` of the engine, or
                `"collective"` (gloo, NCCL); `"auto"` takes shared memory where all workers are on one host, and else
                the object store.
            max_restarts: how many times in a run workers that die are started again; 0 ends the run with the first.
            snapshot: how often trainers keep their state for that: `"every_step"`, `"every_N"` steps, N a number, or
                `"off"`, with which the death of a trainer ends the run.
            gradient_checkpointing: compute the activations of the policy's blocks again in the backward.
            compile_blocks: run the policy's blocks through `torch.compile`.
            attention_backend: of diffusers' attention dispatcher, such as `"flash"`; None leaves the policy as it is.
            offload_optimizer: keep the optimizer's state in host memory between its steps.
            generator_resources: what each of a generator's devices needs of a Ray cluster beside a GPU, such as
                `{"accelerator_type:H100": 1}`.
            trainer_resources: the same for each trainer.
            reward_worker_resources: the same for each reward worker.
            ray_address: of a Ray cluster, as `ray.init` takes it; None is that of the environment, or starts one here.
            ray_runtime_env: what `ray.init` is to ship to workers in place of the working directory.
            task_timeout_s: seconds after which a worker's task is given up; the error names both.
            parity_check: what is done where generators and trainers do not compute the same: each fit begins with two
                samples of each generator, which are compared and then dropped (shapes, finite numbers, weights by
                digest, the velocity and the ratio that trainers recompute). `"raise"` ends the run with a
                `ParityError`, `"warn"` says it and goes on, `"off"` makes no samples.

        Raises:
            ValueError: a setting outside its bounds.
        """
        for name, value in {
            "generators": generators,
            "trainers": trainers,
            "devices_per_generator": devices_per_generator,
            "workers_per_device": workers_per_device,
            "generation_batch_size": generation_batch_size,
            "groups_per_micro_batch": None if groups_per_micro_batch == "all" else groups_per_micro_batch,
            "timestep_batch_size": None if timestep_batch_size in ("all", "auto") else timestep_batch_size,
        }.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` is a count and must be at least 1, got {value!r}.")
        for name, value in {"reward_workers": reward_workers, "max_restarts": max_restarts}.items():
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"`{name}` is a count and must be at least 0, got {value!r}.")
        for name, choice, choices in (
            ("assist_switch", assist_switch, ("none", "offload")),
            ("engine", engine, get_args(EngineName)),
            ("sharding", sharding, get_args(Sharding)),
            ("grad_sync", grad_sync, get_args(GradientSync)),
            ("weight_plane", weight_plane, get_args(WeightPlaneName)),
            ("parity_check", parity_check, get_args(ParityCheck)),
        ):
            if choice not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {choice!r}.")
        if task_timeout_s <= 0:
            raise ValueError(f"`task_timeout_s` must be above 0, got {task_timeout_s}.")
        check_ranks(
            engine=engine,
            trainers=trainers,
            devices_per_generator=devices_per_generator,
            sharding=sharding,
            grad_sync=grad_sync,
            workers_per_device=workers_per_device,
        )
        check_restarts(engine=engine, max_restarts=max_restarts, snapshot=snapshot)
        super().__init__()
        self.generators = generators
        self.trainers = trainers
        self.engine = engine
        self.groups_per_micro_batch = groups_per_micro_batch
        self.generation_batch_size = generation_batch_size
        self.timestep_batch_size = timestep_batch_size
        self.scheduling_policy = SchedulingPolicy(trainer_assist, staleness, staleness_mode)
        self.assist_switch = assist_switch
        self.reward_workers = reward_workers
        self.devices_per_generator = devices_per_generator
        self.workers_per_device = workers_per_device
        self.sharding: Sharding = sharding
        self.grad_sync: GradientSync = grad_sync
        self.weight_plane: WeightPlaneName = weight_plane
        self.max_restarts = max_restarts
        self.snapshot = snapshot
        self.gradient_checkpointing = gradient_checkpointing
        self.compile_blocks = compile_blocks
        self.attention_backend = attention_backend
        self.offload_optimizer = offload_optimizer
        self.resources = {
            "generator": dict(generator_resources or {}),
            "trainer": dict(trainer_resources or {}),
            "reward_worker": dict(reward_worker_resources or {}),
        }
        self.ray_address = ray_address
        self.ray_runtime_env = ray_runtime_env
        self.task_timeout_s = task_timeout_s
        self.parity_check: ParityCheck = parity_check
        self.policy_version = 0
        """Optimizer steps that the trainers' weights have seen."""
        self.last_step_spans: tuple[WorkerSpan, ...] = ()
        """What each worker did in the last step, and when."""
        self._pool: WorkerPool | None = None
        self._driver: StepDriver | None = None
        self._loaders: list[LookaheadLoader] = []
        self._loaders_epoch = -1  # in which they were given
        self._transfer_hook: str | None = None  # of the user, which may change batches behind the loader
        self._module_blob: bytes | None = None
        self._built_module: DiffusionRLModule | None = None
        self._has_failed = False
        self._free_by_s: float | None = None
        """When the trainers must be free to hand over their state, once the run was interrupted."""
        self._num_groups = 0
        self._unlogged: StepResult | None = None
        self._is_parity_due = False
        self._parity_metrics: dict[str, float] = {}
        self._scales = (1.0, 1.0)  # of the policy's gradient, and of all of it
        self._round_origin: int | None = None  # the step at which the sampler's count of steps was 0
        self._window = StepWindow()
        self._fitting_timesteps: int | None = None  # at a time, of a batch size that is chosen by memory
        self._step_metrics: dict[str, float] = {}
        self._configured_settings: list[dict[str, Any]] = []

    # ---- set-up, in Lightning's order ----------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        """Take over the module; its `configure_model` runs on workers, and here a skeleton is installed."""
        if not isinstance(model, DiffusionRLModule):
            raise TypeError(
                f"`DisaggregatedStrategy` trains a `DiffusionRLModule`, got {type(model).__name__}: "
                "subclass it, or use another strategy."
            )
        if self._built_module is not model:
            self.shutdown()
        super().connect(model)
        self._has_failed, self._free_by_s = False, None
        model.configure_model = self._configure_model  # type: ignore[method-assign]

    def setup_environment(self) -> None:
        """Check what the user gave, then start the workers."""
        trainer = self._trainer
        self._check(trainer)
        if self._pool is None:
            self._pool = WorkerPool(
                self._make_engine(),
                self._worker_settings(),
                num_generators=self.generators,
                num_trainers=self.trainers,
                num_reward_workers=self.reward_workers,
                devices_per_generator=self.devices_per_generator,
                resources=self.resources,
                weight_plane=self.weight_plane,
                max_restarts=self.max_restarts,
                snapshot=self.snapshot,
                devices=visible_devices([device.index or 0 for device in self.parallel_devices or []], os.environ),
                workers_per_device=self.workers_per_device,
            )
            weakref.finalize(self, self._pool.shutdown)
            self._pool.reserve(trains=trainer.state.fn == TrainerFn.FITTING)
            self._pool.start_generators()
        if trainer.state.fn == TrainerFn.FITTING and not self._pool.trainers:
            self._pool.reserve(trains=True)  # a validation before has reserved nothing for them
            self._pool.start_trainers()

    def _make_engine(self) -> Engine:
        if self._engine_name == "inline":
            return InlineEngine(self.task_timeout_s)
        if self._engine_name == "ray":
            from digenrl.engines.ray import RayEngine

            return RayEngine(
                self.task_timeout_s,
                address=self.ray_address,
                runtime_env=self.ray_runtime_env,
                num_hosts=self.num_nodes,
                log_folder=Path(self._trainer.log_dir or self._trainer.default_root_dir) / "logs",
            )
        return LocalEngine(self.task_timeout_s)

    @property
    def _engine_name(self) -> str:
        """The engine that was chosen, or that `"auto"` stands for."""
        if self.engine != "auto":
            return self.engine
        is_cluster = self.ray_address is not None or "RAY_ADDRESS" in os.environ or self.num_nodes > 1
        return "ray" if is_cluster else "local"

    @property
    def _device(self) -> str:
        """Kind of the workers' devices: the driver of a cluster may be on a host that has none of them."""
        asks_for_gpus = any(resources.get("GPU") for resources in self.resources.values())
        return "cuda" if asks_for_gpus and self._engine_name == "ray" else self._worker_device

    def _worker_settings(self) -> WorkerSettings:
        return WorkerSettings(
            device=self._device,
            precision="bf16-mixed" if self.precision_plugin.precision == "bf16-mixed" else "32-true",
            sharding=self.sharding,
            grad_sync=self.grad_sync,
            offloads_to_assist=self.assist_switch == "offload",
            offloads_optimizer=self.offload_optimizer,
            gradient_checkpointing=self.gradient_checkpointing,
            compiles_blocks=self.compile_blocks,
            attention_backend=self.attention_backend,
            num_workers=self._num_workers,
        )

    def setup(self, trainer: Trainer) -> None:
        """Connect trainers with generators and make the optimizer.

        Lightning's own set-up would convert the module and move it to a device.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._loaders, self._loaders_epoch = [], -1
        if self._driver is None:
            self.pool.connect_trainers(self.policy_version)
        self.setup_optimizers(trainer)
        self._driver = self._make_driver()
        self._is_parity_due = self.parity_check != "off"
        self._transfer_hook = _overridden_transfer_hook(self.module, trainer.datamodule)  # type: ignore[attr-defined]
        if self._transfer_hook is not None:
            log.warning(
                "`%s` is overridden, so no step is begun before Lightning asks for its batch: change prompts in the "
                "data loader instead.",
                self._transfer_hook,
            )

    def _make_driver(self) -> StepDriver:
        num_timesteps = None if self.timestep_batch_size == "all" else self.timestep_batch_size
        return StepDriver(
            self.pool, self._make_scheduler(), self.module, timestep_batch_size=num_timesteps, poll=self._poll
        )

    def _make_scheduler(self) -> Scheduler:
        self._round_origin = None
        return Scheduler(
            self.pool.generators,
            reward_workers=self.pool.reward_workers,
            policy=self.scheduling_policy,
            policy_version=self.policy_version,
        )

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Run the user's `configure_optimizers` on the skeleton and rebuild the optimizer on the trainers."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(f"`configure_optimizers` must give one optimizer, got {len(self.optimizers)}.")
        self._configured_settings = hyper_parameters(self.optimizers[0])
        self.pool.configure_optimizer(OptimizerSpec.of(self.optimizers[0], self.module))

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wrap the training data, so that a resume repeats exactly the batches that no optimizer step has seen."""
        if self._trainer.state.fn == TrainerFn.FITTING and self._trainer.training:
            if self._loaders_epoch != self._trainer.current_epoch:  # Lightning may give new ones in a later epoch
                self._loaders, self._loaders_epoch = [], self._trainer.current_epoch
            loader = LookaheadLoader(dataloader, limit=self._trainer.limit_train_batches)
            self._loaders.append(loader)
            return loader
        return dataloader

    def _check(self, trainer: Trainer) -> None:
        """Find what cannot work before a worker starts."""
        check_cluster(
            self._engine_name,
            num_nodes=self.num_nodes,
            options={
                "ray_address": self.ray_address,
                "ray_runtime_env": self.ray_runtime_env,
                **{f"{role}_resources": resources for role, resources in self.resources.items()},
            },
        )
        check_weight_plane(self.weight_plane, engine=self._engine_name, num_nodes=self.num_nodes)
        check_trainer(
            trainer,
            precision=str(self.precision_plugin.precision),
            device=self._device,
            num_workers=self._num_workers,
            # A cluster is asked for its devices when they are reserved.
            num_devices=self._num_workers if self._engine_name == "ray" else len(self.parallel_devices or []),
            workers_per_device=self.workers_per_device,
        )
        num_accumulated = accumulated_batches(trainer)
        check_window(self.scheduling_policy.staleness, num_accumulated)
        check_algorithm(
            self.module,
            groups_per_micro_batch=self.groups_per_micro_batch,
            staleness=self.scheduling_policy.staleness,
            accumulate_grad_batches=num_accumulated,
            generation_batch_size=self.generation_batch_size,
            makers_split_groups=self.devices_per_generator > 1 and self.reward_workers == 0,
        )
        check_blocks(
            self.module.policy,
            gradient_checkpointing=self.gradient_checkpointing,
            compile_blocks=self.compile_blocks,
            sharding=self.sharding != "none",
            devices_per_generator=self.devices_per_generator > 1,
            attention_backend=self.attention_backend,
        )
        check_data(self.module, trainer.datamodule)  # type: ignore[attr-defined]
        check_dropping(self.module.reward_errors, trainer)
        if isinstance(trainer.datamodule, PromptData):  # type: ignore[attr-defined]
            self._micro_batch_groups(trainer.datamodule.prompts_per_step)  # type: ignore[attr-defined]
        self.module.policy.prepare()

    def _micro_batch_groups(self, num_groups: int) -> int:
        return micro_batch_groups(
            self.groups_per_micro_batch,
            num_groups=num_groups,
            group_size=self.module.num_trained_samples,
            num_trainers=self.trainers,
        )

    def _configure_model(self) -> None:
        """Build the module on the workers that are new, and its skeleton here."""
        module = self.module
        if self._module_blob is None:
            del module.configure_model  # the workers' copy keeps its own
            self._module_blob = self._pickled(module)
            module.configure_model = self._configure_model  # type: ignore[method-assign]
        if self._built_module is None or (self.pool.trainers and self._driver is None):
            outlines = self.pool.build(self._module_blob)
            if self._built_module is None:
                skeleton.install(module, outlines)
                module._remote = _RemoteModule(self)
                self._built_module = module
            if not any(parameter.requires_grad for parameter in module.parameters()):
                raise ValueError("the policy has no parameter that requires a gradient: there is nothing to train.")

    @staticmethod
    def _pickled(module: DiffusionRLModule) -> bytes:
        try:
            blob: bytes = cloudpickle.dumps(module)
        except Exception:
            check_picklable(module.reward)  # most often it is the reward, and this says so
            raise
        return blob

    # ---- steps ---------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run one RL step on the workers, up to the accumulated gradient; returns its loss, for logging."""
        assert self._driver is not None, "`setup` makes the driver"
        module, trainer = self.module, self._trainer
        self._check_parity(batch)
        self._window.begin()
        step = module.next_step
        if not self._driver.has_step(step):
            self._driver.add_step(self._plan(batch, step))
        # Workers begin before the next step's work is prepared; after the first step they have begun already.
        prompts = self._driver.start_step(step)
        self._look_ahead()
        if prompts != module.prompt_batch(batch, step=step):
            raise RuntimeError(
                f"the batch of step {step} is not the one that the data loader gave: change batches in the loader or "
                "in `on_before_batch_transfer`, not in other hooks, and leave no epoch in `on_train_batch_start`."
            )
        result = self._driver.finish_step(step)
        loss = result.loss * trainer.accumulate_grad_batches
        # Where an optimizer step follows, this process logs when workers are busy with the step after it.
        self._unlogged = result
        self._scales = result.gradient_scale, result.row_scale
        module.note_dropped_groups(result.num_dropped_groups, len(result.prompts) // module.group_size)
        if trainer.accumulate_grad_batches > 1:
            self._log_result()
        module.next_step += 1
        self._window.add(len(prompts))
        return torch.tensor(loss)

    def _check_parity(self, batch: Any) -> None:
        """Before a fit's first step, see that generators and trainers compute the same, with its first samples."""
        if not self._is_parity_due:
            return
        assert self._driver is not None, "`setup` makes the driver"
        self._is_parity_due = False
        prompts = self.module.prompt_batch(batch, step=self.module.next_step)
        report = self._driver.check_parity(prompts.select(slice(NUM_SAMPLES)))
        report.settle(self.parity_check, getattr(self.module, "clip_range", None))
        self._parity_metrics = report.metrics

    def _log_result(self) -> None:
        """Log what is known of the newest step, once."""
        result, self._unlogged = self._unlogged, None
        if result is None:
            return
        self._note_timestep_batch_size(result)
        loss = result.loss * self._trainer.accumulate_grad_batches
        self.module.log_step(result.prompts, result.rewards, result.advantages, loss, result.metrics)
        self.module.log_dict(
            {
                "staleness/frac": result.num_stale_samples / len(result.prompts),
                "assist/micro_batches": float(result.num_assisted),
                **self._parity_metrics,
            }
        )
        self._parity_metrics = {}

    def _note_timestep_batch_size(self, result: StepResult) -> None:
        """Say what `timestep_batch_size="auto"` has come to, where it is new."""
        metric = result.metrics.get("timestep_batch_size")
        if metric is None or round(metric.value) == self._fitting_timesteps:
            return
        self._fitting_timesteps = round(metric.value)
        log.info(
            "`timestep_batch_size` auto trains %d of %d timesteps at a time from step %d on, which fit into memory.",
            self._fitting_timesteps,
            self.module.num_trained_timesteps,
            result.prompts.step,
        )

    def _plan(self, batch: Any, step: int) -> StepPlan:
        """Cut a batch of prompts to a step's work."""
        module = self.module
        prompts = module.prompt_batch(batch, step=step)
        num_groups = self._num_groups = len(prompts) // module.group_size
        micro_batches = cut_step(
            step,
            num_groups=num_groups,
            group_size=module.group_size,
            groups_per_micro_batch=self._micro_batch_groups(num_groups),
            num_generators=self.generators,
            generation_batch_size=self.generation_batch_size,
            keeps_groups_whole=RewardTraits.of(module.reward).groupwise,
        )
        return StepPlan(
            prompts,
            micro_batches,
            policy_version=self.policy_version + step - module.next_step,
            # Lightning divides the loss of a batch by the batches of the window.
            num_rows=module.num_rows(prompts) * self._trainer.accumulate_grad_batches,
            shares_rollout=self._place_in_round(step) > 0,
        )

    def _place_in_round(self, step: int) -> int:
        """Say which of the `updates_per_rollout` steps of its round a step is, from 0, by the count of the weights."""
        num_updates = self.module.updates_per_rollout
        if num_updates == 1:
            return 0
        if self._round_origin is None:
            self._round_origin = self.module.next_step - self.pool.sampler_steps()
        return (step - self._round_origin) % num_updates

    def _look_ahead(self) -> None:
        """Make the next step's work known: it can begin as soon as its weights exist, or before, where it may."""
        assert self._driver is not None
        next_step = self.module.next_step + 1
        obstacle = self._look_ahead_obstacle()
        if obstacle is not None and self.scheduling_policy.staleness > 0:
            raise ValueError(f"`staleness` must be 0 with {obstacle}: the next step's prompts cannot be known ahead.")
        if obstacle is not None or self._trainer.accumulate_grad_batches > 1 or self._is_last_step():
            return
        for batch in self._loaders[0].peek(1):
            if not self._driver.has_step(next_step):
                self._driver.add_step(self._plan(batch, next_step))

    def _look_ahead_obstacle(self) -> str | None:
        """Say why the batch that Lightning will give next cannot be known, if it cannot."""
        if len(self._loaders) != 1:
            return f"{len(self._loaders)} data loaders, of which Lightning makes one batch in a way of its own"
        if not self._loaders[0].has_length:
            return "a data loader without a length, which Lightning reads ahead of itself"
        return None if self._transfer_hook is None else f"an overridden `{self._transfer_hook}`"

    def _is_last_step(self) -> bool:
        """Whether Lightning will not ask for the batch that the loader would give next."""
        trainer = self._trainer
        if trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps:
            return True
        if not trainer.is_last_batch:
            return False
        if trainer.reload_dataloaders_every_n_epochs > 0:  # type: ignore[attr-defined]
            return True
        is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        # `limit_train_batches` leaves an epoch before the loader does.
        return is_last_epoch or trainer.num_training_batches != len(self._loaders[0])

    def profile(self) -> Profile | None:
        """Give the durations this run has measured; None before its first step is over."""
        measured = self._driver.durations.as_dict() if self._driver is not None else {}
        if not {"generate", "score", "update", "load", "optimizer", "publish"} <= measured.keys():
            return None
        return Profile(
            generate_s=measured["generate"],
            score_s=measured["score"],
            update_s=measured["update"],
            assist_s=measured.get("assist"),
            load_s=measured["load"],
            optimizer_s=measured["optimizer"],
            publish_s=measured["publish"],
            switch_s=measured.get("switch", 0.0),
            num_groups=self._num_groups,
            group_size=self.module.group_size,
            generators=self.generators,
            trainers=self.trainers,
            timestep_batch_size=self._fitting_timesteps
            if self.timestep_batch_size == "auto"
            else self.timestep_batch_size,
        )

    def validation_step(self, batch: Any, *args: Any) -> None:
        """Run the module's `validation_step` on the generators and log what it logs."""
        self._evaluate("validation_step", batch, *args)

    def test_step(self, batch: Any, *args: Any) -> None:
        """Run the module's `test_step` on the generators and log what it logs."""
        self._evaluate("test_step", batch, *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there is no such step yet."""
        raise RuntimeError("`predict` is not available under `DisaggregatedStrategy`; use `module.sample(prompts)`.")

    def _evaluate(self, hook: str, batch: Any, *args: Any) -> None:
        self._pause()
        units = None
        if RewardTraits.of(self.module.reward).groupwise:
            uids = [prompt.uid for prompt in as_prompts(batch)]
            units = [row for row in range(len(uids) + 1) if row in (0, len(uids)) or uids[row] != uids[row - 1]]
        # Scoring is the reward workers', unless the user's own hook mixes it with the rest.
        is_ours = type(self.module).validation_step is DiffusionRLModule.validation_step
        if hook == "validation_step" and is_ours and self.reward_workers:
            shares = self.pool.validate(batch, *args, units=units)
        else:
            shares = self.pool.evaluate(hook, batch, *args, units=units)
        for calls in shares:
            for num_samples, call in calls:
                self.module.log(call.name, call.value, **{"batch_size": num_samples, **call.kwargs})
            if hook == "validation_step" and is_ours:
                self.module.note_validation(scored=any(call.name == VALIDATION_MEAN for _, call in calls))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure and Lightning's hooks, then step the trainers.

        The driver's own optimizer steps in between, over parameters that have no gradients: it only lets its LR
        scheduler see the step.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._step_trainers(optimizer)
        return result

    def _step_trainers(self, optimizer: Optimizer) -> None:
        assert self._driver is not None
        settings = hyper_parameters(optimizer)
        call = StepCall(settings, *self.precision_plugin.take_clipping(), *self._scales)
        reports = self.pool.end_window(call)
        self.policy_version += 1
        norm = next(iter(reports.values())).gradient_norm if reports else 0.0
        stepped_s = time.monotonic()
        self.pool.publish(self.policy_version, must_change=norm > 0 and any(group["lr"] > 0 for group in settings))
        sync = Span(stepped_s, time.monotonic())
        self._driver.durations.observe("publish", sync.seconds)
        if reports:
            self._driver.durations.observe("optimizer", max(report.span.seconds for report in reports.values()))
        self._driver.announce_weights(self.policy_version)
        for loader in self._loaders:
            loader.commit(self._window.num_batches)
        if self._driver.has_step(self.module.next_step):
            # Workers do not wait until this process has logged and Lightning has gone round its loop.
            self._driver.start_step(self.module.next_step)
        self._log_result()
        self._close_window(reports, norm, sync)

    def _close_window(self, reports: Mapping[str, StepReport], gradient_norm: float, sync: Span) -> None:
        """Sum up what the workers did since the window's first batch."""
        assert self._driver is not None
        detail = f"version {self.policy_version}"
        for worker, report in reports.items():
            self._driver.note_span(worker, "optimizer", detail, report.span)
        self.last_step_spans = (
            *self._driver.take_spans(),
            *(WorkerSpan(worker, "sync", detail, sync) for worker in self.pool.trainers),
        )
        self._step_metrics = {
            "grad_norm": gradient_norm,
            "policy_version": float(self.policy_version),
            "time/sync_s": sync.seconds,
            **({"restarts": float(self.pool.recovery.num_restarts)} if self.max_restarts else {}),
            **self._window.metrics(
                self.last_step_spans,
                num_generators=self.generators,
                num_trainers=self.trainers,
                num_workers=self._num_workers,
            ),
        }
        self._window = StepWindow()

    @property
    def _num_workers(self) -> int:
        return self.generators * self.devices_per_generator + self.trainers + self.reward_workers

    def _pause(self) -> None:
        """Bring the generators up to date and keep them free."""
        if self._driver is not None:
            self._driver.pause()

    def _poll(self) -> None:
        # Lightning looks for SIGTERM between batches only, and a step may take minutes.
        if self._trainer.received_sigterm:
            raise SIGTERMException

    # ---- checkpoints ---------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The optimizer on the trainers must exist first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Fetch the weights from the trainers.

        Raises:
            WorkerTimeout: the run was interrupted, and a trainer is at a long task.
        """
        self._await_state()
        return self.pool.fetch_state_dict()

    def _await_state(self) -> None:
        """After an error give the trainers a few seconds, all callbacks together, to finish what they are at."""
        if self._trainer.interrupted:
            now_s = time.monotonic()
            if self._free_by_s is None:
                self._free_by_s = now_s + _FREE_WITHIN_S
            self.pool.await_state(max(self._free_by_s - now_s, 0.0))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; no code in it is run."""
        accepted = inspect.signature(self.checkpoint_io.load_checkpoint).parameters
        # By a function, which is the default, quantized state of optimizers cannot be placed.
        options: dict[str, Any] = {"map_location": "cpu"}
        if "weights_only" in accepted:  # Lightning 2.5 has no such option
            options["weights_only"] = True
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Send a checkpoint's weights to all workers."""
        self.policy_version = checkpoint.get("global_step", 0)
        self.pool.push_state_dict(checkpoint["state_dict"], strict)
        if self._driver is not None:
            # Generators have the weights already, under the same version.
            self.pool.publish(self.policy_version, must_change=False)
        self.pool.resume(self.policy_version, self.module.seed)
        if self._driver is not None:
            self._driver.begin_anew(self._make_scheduler())

    def _replace_weights(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Send weights to all workers in the middle of a run; a step that was begun ahead begins anew with them."""
        if self._driver is not None:
            self._driver.close()
        self.pool.push_state_dict(state_dict, strict)
        if self._driver is not None:
            # Generators have the weights already, under the same version.
            self.pool.publish(self.policy_version, must_change=False)
            self._driver.begin_anew(self._make_scheduler())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Give the optimizer's settings, and its state fetched from the trainers."""
        self._await_state()
        return {
            "settings": hyper_parameters(self.optimizers[0]),
            "configured": self._configured_settings,
            "state": self.pool.fetch_optimizer_state(),
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer's settings here and its state on the trainers.

        A setting that was configured otherwise than in the checkpoint's run keeps its new value.
        """
        saved = checkpoint["optimizer_states"][0]
        groups = zip(
            self.optimizers[0].param_groups,
            saved["settings"],
            changed_settings(saved["configured"], self._configured_settings),
            strict=True,
        )
        for group, settings, changed in groups:
            if changed and self.lr_scheduler_configs:
                raise ValueError(
                    f"`{next(iter(changed))}` of the optimizer was changed, but the checkpoint's LR scheduler goes on "
                    "from its old value: keep it, or start without the checkpoint."
                )
            group.update({**settings, **changed})
            for name, value in changed.items():
                log.debug("`%s` of the optimizer is %s now, and was %s in the checkpoint", name, value, settings[name])
        self.pool.push_optimizer_state(saved["state"])

    # ---- the end -------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Remember that steps were interrupted: the workers cannot be used again."""
        self._has_failed = True

    def teardown(self) -> None:
        """Give the module its own `configure_model` back; end the workers only after an error."""
        if isinstance(self._lightning_module, DiffusionRLModule):
            vars(self._lightning_module).pop("configure_model", None)
        self.precision_plugin.inner.teardown()
        self.checkpoint_io.teardown()
        if self._has_failed:
            self.shutdown()
        elif self._driver is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._driver.close()  # later validations see the final weights

    def shutdown(self) -> None:
        """End all workers; the module is left without weights, as before `fit`. Safe to call twice."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._built_module is not None:
            self._built_module._remote = None
            skeleton.remove(self._built_module)
        self._pool = self._driver = self._module_blob = self._built_module = None
        self.policy_version = 0

    @property
    def pool(self) -> WorkerPool:
        """The workers of the current run."""
        if self._pool is None:
            raise RuntimeError("the strategy has no workers: `fit` or `validate` starts them, an error ends them.")
        return self._pool

    @property
    def module(self) -> DiffusionRLModule:
        """The module being trained."""
        assert isinstance(self._lightning_module, DiffusionRLModule), "`connect` checks the type"
        return self._lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self.module.trainer


def _overridden_transfer_hook(module: LightningModule, datamodule: LightningDataModule | None) -> str | None:
    """Find a hook of the user that may change batches on their way from the loader."""
    harmless = [
        getattr(owner, hook) for owner in (LightningModule, DiffusionRLModule, PromptData) for hook in _TRANSFER_HOOKS
    ]
    for owner in (module, datamodule):
        for hook in _TRANSFER_HOOKS:
            method = getattr(owner, hook, None)
            if method is not None and getattr(method, "__func__", method) not in harmless:
                return hook
    return None


class _RemoteModule:
    """What `DiffusionRLModule` asks when its weights are on workers."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy

    def fetch_state_dict(self) -> dict[str, Any]:
        return self._strategy.lightning_module_state_dict()

    def push_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        self._strategy._replace_weights(state_dict, strict)

    def sample(self, prompts: PromptBatch) -> Tensor:
        self._strategy._pause()
        return self._strategy.pool.sample(prompts)

    def step_metrics(self) -> dict[str, float]:
        return self._strategy._step_metrics

    def serve(self) -> None:
        if self._strategy._driver is not None:
            self._strategy._driver.serve()


if DisaggregatedStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        DisaggregatedStrategy.strategy_name,
        DisaggregatedStrategy,
        description="generation and training on separate workers",
    )
