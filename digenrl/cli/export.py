"""`digenrl export`: from a checkpoint to what others load."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from digenrl.cli.arguments import Arguments, read_arguments
from digenrl.cli.check import check_policy
from digenrl.cli.classes import accepted_names
from digenrl.cli.devices import read_device
from digenrl.cli.errors import SettingError, UsageError, one_line, show, suggest
from digenrl.cli.input_errors import INPUT_ERRORS, say_input_error
from digenrl.cli.lightning_cli import ConstructorError, instantiate
from digenrl.cli.merge import merge
from digenrl.cli.model_card import Recipe, write_card
from digenrl.cli.quiet import own_log
from digenrl.cli.resume import find_checkpoint
from digenrl.cli.settings import take_flags
from digenrl.cli.sources import CLASS_KEYS, ConfigFile, Source, explain, read_config
from digenrl.cli.trained_weights import TrainedWeights, load_weights
from digenrl.policies import DiffusionPolicy, PipelinePolicy
from digenrl.policies.export import Exported, ExportError, adapted_parts, export_lora, export_pipeline, export_state
from digenrl.policies.stored_weights import load_stored_weights

_SWITCHES = ("--merge", "--ema")
_FLAGS = ("checkpoint", "output", "dtype", "device", "base_model")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RUNS = "runs"  # the Trainer's default for `default_root_dir`
_CONFIG = "config.yaml"  # what a run writes into its folder

# The comparison is in float32, and nothing is left in the run's cache.
_EXPORT_SETTINGS = {"dtype": "float32", "text_encoders": "free", "embedding_cache": None}

HELP = """\
usage: digenrl export --checkpoint FILE --output DIR [--merge] [--ema] [--model.policy.SETTING VALUE]...

Write what a run has trained as others load it, read it again, and compare: an adapter in diffusers' format, or a whole
pipeline. Nothing is left in DIR if they differ.

  digenrl export --checkpoint runs/version_0/checkpoints/step=500.ckpt --output my-lora
  digenrl export --checkpoint last --output my-model --merge --dtype bfloat16
  digenrl export --checkpoint last --output my-lora --ema --model.policy.path /models/FLUX.1-dev

options:
  --checkpoint FILE             of the run; `last` is the newest in `runs`
  --output DIR                  where to write; must be empty or not there
  --merge                       write a whole pipeline with the adapter merged into its weights
  --ema                         write the average that `ema_decay` kept, and not the weights themselves
  --dtype float32|bfloat16      of a whole pipeline's trained weights (default: float32)
  --base_model ID               id on the hub of the model that was trained, for the model card
  --device NAME                 where to compare (default: cpu)
  -c, --config FILE             the run's configuration (default: `config.yaml` of the checkpoint's run folder)
  --model.policy.SETTING VALUE  change a setting of the policy: `path` where the base model has moved, a smaller
                                `height`, `width` or `num_frames` where comparing takes long
  -h, --help                    show this
"""


@dataclass(frozen=True)
class Request:
    """What the command was asked for."""

    checkpoint: Path
    output: Path
    merge: bool
    ema: bool
    dtype: str | None
    device: torch.device
    base_model: str | None


def run(words: Sequence[str]) -> int:
    """Export a checkpoint; returns the exit code: 1 where what was written is not what was trained.

    Raises:
        UsageError: wrong input.
    """
    if not words or "--help" in words or "-h" in words:
        print(HELP, end="")
        return 0
    switches = {word for word in words if word in _SWITCHES}
    arguments = read_arguments([word for word in words if word not in _SWITCHES])
    flags = take_flags(arguments, _FLAGS, "export")
    request = _read_request(flags, switches)
    with own_log(), _quiet_libraries():
        try:
            _export(request, arguments)
        except ExportError as error:
            if os.environ.get("DIGENRL_TRACEBACK"):
                traceback.print_exc()
            print(f"error: {one_line(error)} Nothing was kept.", file=sys.stderr)
            return 1
    return 0


def _export(request: Request, arguments: Arguments) -> None:
    weights = TrainedWeights.read(request.checkpoint)
    sources = _sources(request.checkpoint, arguments)
    with _explained(sources):
        config = merge(sources, accepted_names)
        policy = _make_policy(config, sources)
    _check_kind(policy, request)
    try:
        with torch.random.fork_rng():
            policy.build()
        load_stored_weights(policy, request.device)
    except INPUT_ERRORS as error:
        raise UsageError(say_input_error(error, config, sources)) from error
    policy.to(request.device)
    load_weights(policy, weights, is_averaged=request.ema)
    is_adapter = isinstance(policy, PipelinePolicy) and bool(adapted_parts(policy))
    _check_form(request, is_adapter=is_adapter)
    with _new_folder(request.output) as folder:
        exported = _write(policy, folder, request)
        write_card(folder, policy, exported, _recipe(request, config, weights), title=request.output.resolve().name)
    print(_report(policy, request, exported))


def _read_request(flags: Mapping[str, Any], switches: set[str]) -> Request:
    for name in ("checkpoint", "output"):
        if name not in flags:
            raise UsageError(f"`--{name}` is missing; `digenrl export --help` shows how it is used.")
    dtype = flags.get("dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"`--dtype` must be float32 or bfloat16, got {show(dtype)}{suggest(str(dtype), _DTYPES)}")
    try:
        checkpoint = find_checkpoint(flags["checkpoint"], _RUNS)
    except SettingError as error:
        raise UsageError(f"`--checkpoint` {error.problem}") from error
    output = Path(flags["output"])
    if not output.name:  # it is made under another name, and renamed once all is well
        raise UsageError(f"`--output` must be a folder with a name, got {show(flags['output'])}.")
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UsageError(f"`--output` must be an empty folder, or none yet, and `{output}` has something in it.")
    return Request(
        checkpoint=Path(str(checkpoint)),
        output=output,
        merge="--merge" in switches,
        ema="--ema" in switches,
        dtype=dtype,
        device=read_device(flags.get("device", "cpu")),
        base_model=flags.get("base_model"),
    )


def _sources(checkpoint: Path, arguments: Arguments) -> list[Source]:
    """Give the run's configuration, and what changes its policy."""
    for option in arguments.options:
        if option.name in _SWITCHES:
            raise UsageError(f"`{option.name}` takes no value, got {show(option.value)}.")
        place = [key for key in option.keys if key not in CLASS_KEYS]
        if place[:2] != ["model", "policy"]:
            names = [*_SWITCHES, *(f"--{flag}" for flag in _FLAGS), "--config", "--model.policy.path"]
            raise UsageError(f"`{option.name}` is not an option of `digenrl export`{suggest(option.name, names)}")
        if place[2:] and place[2] in _EXPORT_SETTINGS:
            raise UsageError(f"`{option.name}` cannot be chosen: what was written is compared in float32, uncached.")
    return [*(arguments.files or [_config_of(checkpoint)]), *arguments.options]


def _config_of(checkpoint: Path) -> ConfigFile:
    folder = checkpoint.absolute().parent
    for place in (folder, folder.parent):  # run folders keep checkpoints in a folder of their own
        if (place / _CONFIG).is_file():
            return read_config(os.path.relpath(place / _CONFIG))
    raise UsageError(
        f"there is no {_CONFIG} beside `{checkpoint}`, or in the folder above, to say what its policy is: give "
        "`--config FILE` with the run's `model`."
    )


def _make_policy(config: Mapping[str, Any], sources: Sequence[Source]) -> DiffusionPolicy:
    """Make the policy of a run's configuration, without the run."""
    model = config.get("model")
    settings = model.get("init_args", model) if isinstance(model, dict) else None
    if not isinstance(settings, dict) or settings.get("policy") is None:
        raise SettingError(("model", "policy"), "is missing in the configuration: which policy was trained.")
    checked = check_policy(settings["policy"])
    known = accepted_names(checked["class_path"]) or ()
    changes = {name: value for name, value in _EXPORT_SETTINGS.items() if name in known}
    checked = {**checked, "init_args": {**(checked.get("init_args") or {}), **changes}}
    try:
        policy: DiffusionPolicy = instantiate(DiffusionPolicy, checked)
    except ConstructorError as error:
        if not isinstance(error.error, INPUT_ERRORS):
            raise error.error from None
        raise UsageError(say_input_error(error.error, config, sources, name=error.name)) from error
    return policy


def _check_kind(policy: DiffusionPolicy, request: Request) -> None:
    if isinstance(policy, PipelinePolicy):
        return
    given = "--merge" if request.merge else "--dtype" if request.dtype is not None else None
    if given is not None:
        raise UsageError(
            f"`{given}` is for policies of diffusers' pipelines, which `{type(policy).__name__}` is not: leave it out."
        )


def _check_form(request: Request, *, is_adapter: bool) -> None:
    if request.merge and not is_adapter:
        raise UsageError("`--merge` is for a LoRA, and this policy was trained whole: leave it out.")
    if request.dtype is not None and is_adapter and not request.merge:
        raise UsageError("`--dtype` is for a whole pipeline, and an adapter is float32: leave it out or add `--merge`.")


def _write(policy: DiffusionPolicy, folder: Path, request: Request) -> Exported:
    if not isinstance(policy, PipelinePolicy):
        return export_state(policy, folder)
    if adapted_parts(policy) and not request.merge:
        return export_lora(policy, folder)
    return export_pipeline(policy, folder, dtype=_DTYPES[request.dtype or "float32"])


def _recipe(request: Request, config: Mapping[str, Any], weights: TrainedWeights) -> Recipe:
    return Recipe.of(
        config["model"],
        hyper_parameters=weights.hyper_parameters,
        num_steps=weights.num_steps,
        is_averaged=request.ema,
        is_merged=request.merge,
        base_model=request.base_model,
    )


def _report(policy: DiffusionPolicy, request: Request, exported: Exported) -> str:
    """Say what was written and how it was checked."""
    what = {
        "lora": "a LoRA in diffusers' format",
        "pipeline": "a whole pipeline",
        "state": f"the state of `{type(policy).__name__}`, which is no pipeline that others know",
    }[exported.form]
    lines = [f"{request.output}: {what}, {', '.join(exported.weights.values())} and README.md"]
    if exported.form == "state":
        lines.append("read again: equal bit by bit")
    else:
        lines.append(f"read again: velocities differ by {exported.deviation:.1e} of their size")
    if exported.rounding is not None:
        lines.append(f"rounding to {request.dtype} alone changes them by {exported.rounding:.1e}")
    return "\n".join(lines)


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Lend a folder that becomes the output once all is well in it, and is removed otherwise."""
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"`{partial}` is there, from an export that was cut off: remove it.") from None
    except OSError as error:
        raise UsageError(f"`--output` cannot be made, `{output}`: {error.strerror}.") from error
    try:
        yield partial
        partial.replace(output)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):  # no space, or a part of the pipeline that cannot be read
            raise UsageError(f"nothing was written to `{output}`: {one_line(error)}") from error
        raise


@contextmanager
def _explained(sources: Sequence[Source]) -> Iterator[None]:
    try:
        yield
    except SettingError as error:
        raise UsageError(explain(error, sources)) from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Leave out what diffusers and transformers say about parts that are not loaded, and are not meant to be."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
