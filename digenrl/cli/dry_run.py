"""`digenrl fit --dry_run`: what a configuration would run, on devices that need not be there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from digenrl.cli.arguments import DryRunFlags
from digenrl.cli.classes import find
from digenrl.cli.dry_run_report import report
from digenrl.cli.errors import UsageError, one_line, suggest
from digenrl.cli.estimates import (
    DEVICES,
    UTILIZATION,
    Device,
    StepShape,
    cluster_of,
    count_by_part,
    estimate_generator,
    estimate_trainer,
    estimate_workload,
    fit_timesteps,
    weigh,
)
from digenrl.cli.input_errors import INPUT_ERRORS
from digenrl.cli.published_models import (
    PUBLISHED,
    copy_configurations,
    fetch_configurations,
    write_published,
)
from digenrl.data import PromptData
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.policies.forward_costs import ForwardCosts, trace_forward
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.policies.pipeline_files import PipelineFiles
from digenrl.policies.transformer_inputs import call_transformer, find_transformer
from digenrl.scheduling.profile import Profile
from digenrl.scheduling.simulate import SimulationResult, Workload, simulate
from digenrl.strategies import DisaggregatedStrategy
from digenrl.strategies.memory_estimate import MemoryPart

DEFAULT_DEVICE = "h100"
_NUM_STEPS = 4  # simulated; the first has no work made ahead and measures assistance


@dataclass(frozen=True)
class DryRunOptions:
    """What a dry run is told beside the configuration."""

    device: Device
    profile: Profile | None = None

    @classmethod
    def of(cls, flags: DryRunFlags) -> DryRunOptions:
        """Check the flags.

        Raises:
            UsageError: an unknown device, or no profile.
        """
        name = flags.device or DEFAULT_DEVICE
        if name not in DEVICES:
            raise UsageError(f"`--dry_run_device` is `{name}`, which is not known{suggest(name, DEVICES)}")
        try:
            profile = None if flags.profile is None else Profile.read(flags.profile)
        except ValueError as error:
            raise UsageError(f"`--dry_run_profile`: {error}") from error
        return cls(DEVICES[name], profile)


@dataclass
class DryRun:
    """What was found."""

    module: DiffusionRLModule
    strategy: DisaggregatedStrategy
    device: Device
    shape: StepShape
    parts: list[tuple[str, int, int, str]]
    generator: tuple[MemoryPart, ...]
    trainer: tuple[MemoryPart, ...]
    costs: ForwardCosts | None
    workload: Workload | None
    result: SimulationResult | None
    notes: list[str] = field(default_factory=list)


@contextmanager
def with_published_model(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Let a policy of a pipeline that is not here be made from configurations alone, without a model's weights.

    Yields:
        The configuration, in which the policy's `path` leads to these, and what to say of that.

    Raises:
        UsageError: a pipeline of the hub that digenrl does not know, and the hub cannot be asked.
        FileNotFoundError: `path` is neither a pipeline's folder nor an id of the hub.
    """
    settings = _policy_settings(config)
    path, revision = settings.get("path"), settings.get("revision")
    if not isinstance(path, str) or not _is_of_pipeline(config) or Path(path).is_dir():
        yield config, []
        return
    with TemporaryDirectory(prefix="digenrl-dry-run-") as folder:
        downloaded = _downloaded_folder(path, revision)
        if downloaded is not None:  # in part, it may be: to build the policy as it is would fetch the rest
            copy_configurations(downloaded, Path(folder))
            note = f"Sizes of `{path}` are those that were downloaded before; nothing was downloaded."
        elif path in PUBLISHED:
            write_published(path, Path(folder))
            note = f"Sizes of `{path}` are those that digenrl knows of it; nothing was downloaded."
        else:
            fetch_configurations(path, revision, Path(folder))
            note = f"Of `{path}` the configurations alone were asked of the hub."
        changed = deepcopy(config)
        _policy_settings(changed)["path"] = folder
        _policy_settings(changed).pop("revision", None)
        yield changed, [note]


def run_dry(
    trainer: Trainer,
    module: DiffusionRLModule,
    data: LightningDataModule,
    options: DryRunOptions,
    notes: list[str],
) -> None:
    """Check a run as `fit` does before it starts workers, then say what it would be.

    Raises:
        UsageError: a strategy or policy that this cannot be said of.
        ValueError: settings that do not go together.
    """
    report(examine(trainer, module, data, options, notes))


def examine(
    trainer: Trainer,
    module: DiffusionRLModule,
    data: LightningDataModule,
    options: DryRunOptions,
    notes: list[str],
) -> DryRun:
    """Find what a run would be; see `run_dry`."""
    strategy = trainer.strategy
    if not isinstance(strategy, DisaggregatedStrategy):
        name = type(strategy).__name__
        raise UsageError(f"`--dry_run` describes runs with `DisaggregatedStrategy`, and `trainer.strategy` is {name}.")
    _check(trainer, strategy, module, data)
    shape = StepShape.of(module, strategy, _num_groups(data))
    policy = module.policy
    build_on_meta(policy)
    weights = weigh(policy)
    notes = list(notes)
    costs, bf16 = None, strategy.precision_plugin.precision == "bf16-mixed"
    try:
        costs = trace_policy(policy, _texts(data), bf16=bf16)
    except Exception as error:  # whatever a policy does on tensors without memory
        reason = f"{type(error).__name__}: {one_line(error)}"[:200]
        notes.append(
            f"A forward of `{type(policy).__name__}` could not be traced, so activations are left out: {reason}"
        )
    if costs is not None and shape.is_auto:
        shape = fit_timesteps(shape, module, strategy, weights, costs, options.device)
    workload = _workload(module, strategy, weights, costs, shape, options, bf16=bf16)
    result = None
    if workload is not None:
        cluster = cluster_of(strategy)
        result = simulate(cluster, workload, strategy.scheduling_policy, num_steps=_NUM_STEPS)
    return DryRun(
        module,
        strategy,
        options.device,
        shape,
        count_by_part(policy),
        estimate_generator(module, strategy, weights, costs, shape),
        estimate_trainer(module, strategy, weights, costs, shape),
        costs,
        workload,
        result,
        [*notes, *_time_notes(options, bf16=bf16, is_known=result is not None)],
    )


def build_on_meta(policy: DiffusionPolicy) -> None:
    """Build a policy whose weights have shapes and no memory.

    Raises:
        UsageError: it cannot be built so.
    """
    try:
        with warnings.catch_warnings(), torch.device("meta"), _EverythingOnMeta():
            warnings.simplefilter("ignore")  # values that are copied to where there is no memory
            policy.build()
    except INPUT_ERRORS:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"`{type(policy).__name__}` cannot be built without memory, as `--dry_run` does: {one_line(error)}"
        ) from error


def trace_policy(policy: DiffusionPolicy, texts: list[str], *, bf16: bool) -> ForwardCosts:
    """Trace a forward: of the transformer where it is one that inputs are known for, and else of the whole policy.

    A policy that defines `example_condition` is traced whole with that.
    """
    has_example = type(policy).example_condition is not DiffusionPolicy.example_condition
    transformer = None if has_example else find_transformer(policy)

    def call(num_rows: int) -> Tensor:
        if transformer is not None:
            return call_transformer(transformer, policy, num_rows)
        condition = policy.example_condition([texts[row % len(texts)] for row in range(num_rows)])
        latents = torch.zeros(num_rows, *policy.latent_shape)
        velocity: Tensor = policy(latents, torch.full((num_rows,), 0.5), condition)
        return velocity

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace_forward(policy, call, bf16=bf16)


class _EverythingOnMeta(TorchFunctionMode):
    """Sends to the meta device what is made on a device of its own choice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _downloaded_folder(path: str, revision: str | None) -> Path | None:
    """Give the folder of a repository that was downloaded before; None if it was not.

    Raises:
        FileNotFoundError: `path` is no id of the hub; or it is not here, digenrl does not know its sizes, and the hub
            is not to be asked.
    """
    try:
        files = PipelineFiles(path, revision)
    except FileNotFoundError:
        if path in PUBLISHED:
            return None
        raise
    return files.folder if files.are_here else None


def _policy_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = _policy_node(config).get("init_args")
    return settings if isinstance(settings, dict) else {}


def _policy_node(config: Mapping[str, Any]) -> dict[str, Any]:
    model = config.get("model")
    node = (model.get("init_args") or {}).get("policy") if isinstance(model, Mapping) else None
    return node if isinstance(node, dict) else {}


def _is_of_pipeline(config: Mapping[str, Any]) -> bool:
    found = find(str(_policy_node(config).get("class_path")), {}, ("model", "policy"))
    return isinstance(found, type) and issubclass(found, PipelinePolicy)


def _check(
    trainer: Trainer, strategy: DisaggregatedStrategy, module: DiffusionRLModule, data: LightningDataModule
) -> None:
    """Do what `Trainer.fit` does before workers start."""
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=data)
    strategy.check(trainer)


def _num_groups(data: LightningDataModule) -> int:
    """Give the prompts of a step: those of the first batch."""
    if isinstance(data, PromptData):
        return data.prompts_per_step
    return len(next(iter(data.train_dataloader())))


def _texts(data: LightningDataModule) -> list[str]:
    if isinstance(data, PromptData):
        return [prompt.text for prompt in data.prompts[:8]]
    return ["a photo"]


def _workload(
    module: DiffusionRLModule,
    strategy: DisaggregatedStrategy,
    weights: Any,
    costs: ForwardCosts | None,
    shape: StepShape,
    options: DryRunOptions,
    *,
    bf16: bool,
) -> Workload | None:
    if options.profile is not None:
        return replace(
            options.profile.workload(),
            num_groups=shape.num_groups,
            group_size=shape.group_size,
            groups_per_micro_batch=len(shape.micro_batches[0]) // shape.group_size,
            generation_batch_size=strategy.generation_batch_size,
        )
    if costs is None:
        return None
    peak = options.device.bf16_flops if bf16 else options.device.fp32_flops
    return estimate_workload(module, strategy, weights, costs, shape, UTILIZATION * peak)


def _time_notes(options: DryRunOptions, *, bf16: bool, is_known: bool) -> list[str]:
    if not is_known:
        return ["No times: give `--dry_run_profile FILE`, what a run has measured."]
    if options.profile is not None:
        return ["Times are those of the profile: of the samples, model and devices that it was measured with."]
    precision, peak = ("bf16", options.device.bf16_flops) if bf16 else ("fp32", options.device.fp32_flops)
    return [
        f"Times are an estimate, from counted operations at {UTILIZATION:.0%} of the {precision} peak of a "
        f"{options.device.name}, {peak / 1e12:.4g} TFLOP/s. Rewards, text encoders, VAE and the optimizer's step count "
        "nothing. `--dry_run_profile FILE` takes what a run has measured."
    ]
