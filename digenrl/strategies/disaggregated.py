"""The Lightning strategy that splits a run's devices into generators and trainers."""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from digenrl.module import DiffusionRLModule
from digenrl.scheduling import SchedulingPolicy
from digenrl.scheduling.profile import Profile
from digenrl.strategies import skeleton
from digenrl.strategies.checks import check_choice, check_count, check_ranks, micro_batch_groups
from digenrl.strategies.driver import StepDriver
from digenrl.strategies.evaluation import evaluate
from digenrl.strategies.optimizers import OptimizerSpec, changed_settings, hyper_parameters
from digenrl.strategies.parity import ParityCheck
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.remote_module import RemoteModule, pickle_module
from digenrl.strategies.single_process import SingleProcessStrategy
from digenrl.strategies.snapshots import check_restarts
from digenrl.strategies.startup import check_run, engine_name, make_pool
from digenrl.strategies.step_book import WorkerSpan
from digenrl.strategies.training_data import TrainingData
from digenrl.strategies.training_steps import TrainingSteps
from digenrl.strategies.weight_planes import WeightPlaneName
from digenrl.strategies.workers import GradientSync, Sharding

log = logging.getLogger(__name__)

_FREE_WITHIN_S = 10.0  # of an error; a trainer that is not keeps its state

AssistSwitch = Literal["none", "offload"]
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
        assist_switch: AssistSwitch = "none",
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
        super().__init__()
        self.generators = check_count("generators", generators)
        self.trainers = check_count("trainers", trainers)
        self.devices_per_generator = check_count("devices_per_generator", devices_per_generator)
        self.workers_per_device = check_count("workers_per_device", workers_per_device)
        self.generation_batch_size = check_count("generation_batch_size", generation_batch_size, unless=(None,))
        self.groups_per_micro_batch = check_count("groups_per_micro_batch", groups_per_micro_batch, unless=("all",))
        self.timestep_batch_size = check_count("timestep_batch_size", timestep_batch_size, unless=("all", "auto"))
        self.reward_workers = check_count("reward_workers", reward_workers, least=0)
        self.max_restarts = check_count("max_restarts", max_restarts, least=0)
        self.assist_switch = check_choice("assist_switch", assist_switch, get_args(AssistSwitch))
        self.engine = check_choice("engine", engine, get_args(EngineName))
        self.sharding = check_choice("sharding", sharding, get_args(Sharding))
        self.grad_sync = check_choice("grad_sync", grad_sync, get_args(GradientSync))
        self.weight_plane = check_choice("weight_plane", weight_plane, get_args(WeightPlaneName))
        self.parity_check = check_choice("parity_check", parity_check, get_args(ParityCheck))
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
        self.scheduling_policy = SchedulingPolicy(trainer_assist, staleness, staleness_mode)
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
        self.policy_version = 0
        """Optimizer steps that the trainers' weights have seen."""
        self.last_step_spans: tuple[WorkerSpan, ...] = ()
        """What each worker did in the last step, and when."""
        self._pool: WorkerPool | None = None
        self._data = TrainingData()
        self.steps: TrainingSteps | None = None
        """Of the newest fit; None before one."""
        self._module_blob: bytes | None = None
        self._built_module: DiffusionRLModule | None = None
        self._has_failed = False
        self._free_by_s: float | None = None
        """When the trainers must be free to hand over their state, once the run was interrupted."""
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
        self.check(trainer)
        if self._pool is None:
            self._pool = make_pool(self, trainer, engine=self._engine_name, device=self._device)
            weakref.finalize(self, self._pool.shutdown)
            self._pool.reserve(trains=trainer.state.fn == TrainerFn.FITTING)
            self._pool.start_generators()
        if trainer.state.fn == TrainerFn.FITTING and not self._pool.trainers:
            self._pool.reserve(trains=True)  # a validation before has reserved nothing for them
            self._pool.start_trainers()

    @property
    def _engine_name(self) -> str:
        """The engine that was chosen, or that `"auto"` stands for."""
        return engine_name(self)

    @property
    def _device(self) -> str:
        """Kind of the workers' devices: the driver of a cluster may be on a host that has none of them."""
        asks_for_gpus = any(resources.get("GPU") for resources in self.resources.values())
        return "cuda" if asks_for_gpus and self._engine_name == "ray" else self._worker_device

    def setup(self, trainer: Trainer) -> None:
        """Connect trainers with generators and make the optimizer.

        Lightning's own set-up would convert the module and move it to a device.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._data.begin(self.module, trainer.datamodule)  # type: ignore[attr-defined]
        if self._driver is None:
            self.pool.connect_trainers(self.policy_version)
        self.setup_optimizers(trainer)
        self.steps = TrainingSteps(self, self._data)

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
            return self._data.wrap(dataloader, self._trainer)
        return dataloader

    def check(self, trainer: Trainer) -> None:
        """Find what cannot work before a worker starts.

        Raises:
            ValueError: a setting, or several together, that cannot be carried out.
        """
        check_run(self, trainer, engine=self._engine_name, device=self._device)

    def micro_batch_groups(self, num_groups: int) -> int:
        """Give the groups of a micro-batch in a step of `num_groups`.

        Raises:
            ValueError: micro-batches do not divide the step, or cannot be split over the trainers.
        """
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
            self._module_blob = pickle_module(module)
            module.configure_model = self._configure_model  # type: ignore[method-assign]
        if self._built_module is None or (self.pool.trainers and self._driver is None):
            outlines = self.pool.build(self._module_blob)
            if self._built_module is None:
                skeleton.install(module, outlines)
                module._remote = RemoteModule(self)
                self._built_module = module
            if not any(parameter.requires_grad for parameter in module.parameters()):
                raise ValueError("the policy has no parameter that requires a gradient: there is nothing to train.")

    # ---- steps ---------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run one RL step on the workers, up to the accumulated gradient; returns its loss, for logging."""
        assert self.steps is not None, "`setup` makes them"
        return torch.tensor(self.steps.train(batch))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure and Lightning's hooks, then step the trainers.

        The driver's own optimizer steps in between, over parameters that have no gradients: it only lets its LR
        scheduler see the step.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.steps is not None, "`setup` makes them"
        self.last_step_spans = self.steps.finish(optimizer)
        return result

    def profile(self) -> Profile | None:
        """Give the durations this run has measured; None before its first step is over."""
        return None if self.steps is None else self.steps.profile()

    def validation_step(self, batch: Any, *args: Any) -> None:
        """Run the module's `validation_step` on the generators and log what it logs."""
        self.pause()
        evaluate(self.pool, self.module, "validation_step", batch, *args)

    def test_step(self, batch: Any, *args: Any) -> None:
        """Run the module's `test_step` on the generators and log what it logs."""
        self.pause()
        evaluate(self.pool, self.module, "test_step", batch, *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there is no such step yet."""
        raise RuntimeError("`predict` is not available under `DisaggregatedStrategy`; use `module.sample(prompts)`.")

    def pause(self) -> None:
        """Bring the generators up to date and keep them free until the next step."""
        if self._driver is not None:
            self._driver.pause()

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
        return self.pool.state.fetch_weights()

    def _await_state(self) -> None:
        """After an error give the trainers a few seconds, all callbacks together, to finish what they are at."""
        if self._trainer.interrupted:
            now_s = time.monotonic()
            if self._free_by_s is None:
                self._free_by_s = now_s + _FREE_WITHIN_S
            self.pool.state.await_free(max(self._free_by_s - now_s, 0.0))

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
        self._push_weights(checkpoint["state_dict"], strict)
        self.pool.resume(self.policy_version, self.module.seed)
        self._begin_anew()

    def replace_weights(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Send weights to all workers in the middle of a run; a step that was begun ahead begins anew with them."""
        if self._driver is not None:
            self._driver.close()
        self._push_weights(state_dict, strict)
        self._begin_anew()

    def _push_weights(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        self.pool.state.push_weights(state_dict, strict)
        if self._driver is not None:
            # Generators have the weights already, under the same version.
            self.pool.publish(self.policy_version, must_change=False)

    def _begin_anew(self) -> None:
        """Let steps begin with the weights that were pushed."""
        if self.steps is not None:
            self.steps.begin_anew()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Give the optimizer's settings, and its state fetched from the trainers."""
        self._await_state()
        return {
            "settings": hyper_parameters(self.optimizers[0]),
            "configured": self._configured_settings,
            "state": self.pool.state.fetch_optimizer_state(),
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
        self.pool.state.push_optimizer_state(saved["state"])

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
        self._pool = self.steps = self._module_blob = self._built_module = None
        self.policy_version = 0

    @property
    def num_workers(self) -> int:
        """Workers of a training run that need a device each, the devices of a generator counted apart."""
        return self.generators * self.devices_per_generator + self.trainers + self.reward_workers

    @property
    def _driver(self) -> StepDriver | None:
        return None if self.steps is None else self.steps.driver

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


if DisaggregatedStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        DisaggregatedStrategy.strategy_name,
        DisaggregatedStrategy,
        description="generation and training on separate workers",
    )
