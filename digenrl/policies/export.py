"""Writing a trained policy as others load it, and reading it back to see that it is the same."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.policies.components import Pipeline, quiet_loading
from digenrl.policies.lora import ADAPTER
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.policies.pipeline_files import INDEX
from digenrl.policies.policy import DiffusionPolicy

TOLERANCE = 1e-6
"""Between velocities of the policy and of what was written and read again, relative to their size."""

STATE_FILE = "policy.safetensors"

Form = Literal["lora", "pipeline", "state"]


class ExportError(RuntimeError):
    """What was written does not compute what the policy does."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how closely it was found to be the policy."""

    form: Form
    """An adapter, a whole pipeline, or a state of a policy that is no pipeline."""
    weights: Mapping[str, str]
    """By the part of the pipeline, the file or folder in the output that has its trained weights."""
    deviation: float
    """Norm of the difference of the velocities over the norm of the policy's."""
    rounding: float | None = None
    """The same, of what rounding to the written dtype alone changes; None where nothing was rounded."""


def export_lora(policy: PipelinePolicy, folder: Path) -> Exported:
    """Write the adapter in diffusers' format, with the note of its form that gives it its scale, and compare.

    A pipeline's `load_lora_weights` reads it. A second transformer has a file of its own, as `load_into_transformer_2`
    asks for.

    Args:
        policy: built, with its weights, in float32 and not sharded; its transformers are those that were read again
            when this returns.
        folder: is there and empty.

    Raises:
        ExportError: the base with the written adapter gives other velocities.
        ValueError: the policy has no adapter, or is not in float32.
    """
    _check_dtype(policy)
    parts = adapted_parts(policy)
    if not parts:
        raise ValueError(f"`{type(policy).__name__}` was trained whole: there is no adapter to write.")
    expected = probe(policy)
    weights = {part: _lora_file(part) for part in parts}
    for part, file in weights.items():
        _save_lora(policy, part, folder, file)
    device = _drop_transformers(policy)
    pipeline = _load_transformers(policy, policy.files.folder)
    for part, file in weights.items():
        others = {"load_into_transformer_2": True} if part == "transformer_2" else {}
        pipeline.load_lora_weights(str(folder), weight_name=file, **others)
    _take_transformers(policy, pipeline, device)
    return Exported("lora", weights, _check(expected, probe(policy), TOLERANCE))


def export_pipeline(policy: PipelinePolicy, folder: Path, *, dtype: torch.dtype = torch.float32) -> Exported:
    """Write a whole pipeline, an adapter merged into its weights, and compare.

    All but the trained transformers is copied, file by file, from the pipeline that training started from.

    Args:
        policy: as for `export_lora`.
        folder: is there and empty.
        dtype: of the trained transformers' weights, but of those that the model wants in float32.

    Raises:
        ExportError: the pipeline gives other velocities.
        ValueError: the policy is not in float32.
    """
    _check_dtype(policy)
    trained, exact = _trained_parts(policy), probe(policy)
    for part in adapted_parts(policy):
        transformer: Any = policy.get_submodule(part)
        transformer.fuse_lora()
        transformer.unload_lora()  # else names of layers are those of a model with an adapter, and nothing loads them
    _copy_rest(policy, folder, trained)
    for part in trained:
        _save_transformer(policy.get_submodule(part), folder / part, dtype)
    expected = exact if dtype == torch.float32 else probe(policy)
    device = _drop_transformers(policy)
    _take_transformers(policy, _load_transformers(policy, folder), device)
    found = probe(policy)
    if dtype == torch.float32:
        return Exported("pipeline", {part: part for part in trained}, _check(expected, found, TOLERANCE))
    deviation = _check(expected, found, TOLERANCE)
    return Exported("pipeline", {part: part for part in trained}, deviation, rounding=difference(exact, found))


def export_state(policy: DiffusionPolicy, folder: Path) -> Exported:
    """Write the state of a policy that is no pipeline to `policy.safetensors`, and read it again.

    Raises:
        ExportError: what was read is not what was written.
    """
    from safetensors.torch import load_file, save_file

    # Clones: a file of safetensors has no tensors that share memory.
    state = {name: value.detach().cpu().clone().contiguous() for name, value in policy.state_dict().items()}
    save_file(state, folder / STATE_FILE)
    again = load_file(folder / STATE_FILE)
    different = [name for name, value in state.items() if not torch.equal(again[name], value)]
    if different:
        raise ExportError(f"`{STATE_FILE}` was read again and differs in {', '.join(different[:3])}.")
    policy.load_state_dict(again)
    return Exported("state", {"policy": STATE_FILE}, 0.0)


def adapted_parts(policy: PipelinePolicy) -> list[str]:
    """Give the names of the transformers that have an adapter."""
    return [part for part in policy.transformers if getattr(policy.get_submodule(part), "peft_config", None)]


@torch.no_grad()
def probe(policy: DiffusionPolicy) -> Tensor:
    """Give the policy's velocities for two prompts, at much noise and at little, which may be two transformers'."""
    device = next(policy.parameters()).device
    latents = policy.initial_latents([0, 1]).to(device)
    condition = policy.encode(["a photo of a red cat", "two dogs"])
    velocity: Tensor = policy(latents, torch.tensor([0.95, 0.3], device=device), condition)
    return velocity.float().cpu()


def difference(expected: Tensor, found: Tensor) -> float:
    """Give the norm of a difference over that of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _check(expected: Tensor, found: Tensor, limit: float) -> float:
    deviation = difference(expected, found)
    if not deviation <= limit:
        raise ExportError(
            f"what was written and read again computes other velocities than the policy: they differ by "
            f"{deviation:.2e} of their size, and at most {limit:.0e} is let through."
        )
    return deviation


def _check_dtype(policy: PipelinePolicy) -> None:
    if policy.dtype != torch.float32:
        raise ValueError("`dtype` of a policy must be float32 to be compared with what is written.")


def _trained_parts(policy: PipelinePolicy) -> list[str]:
    parts = {part: policy.get_submodule(part).parameters() for part in policy.transformers}
    return [part for part, parameters in parts.items() if any(parameter.requires_grad for parameter in parameters)]


def _lora_file(part: str) -> str:
    # The first is what diffusers takes by itself. The second must not end so, or diffusers would have a choice.
    return "pytorch_lora_weights.safetensors" if part == "transformer" else f"{part}_lora_weights.safetensors"


def _save_lora(policy: PipelinePolicy, part: str, folder: Path, file: str) -> None:
    from peft import get_peft_model_state_dict

    transformer: Any = policy.get_submodule(part)
    layers = get_peft_model_state_dict(transformer, adapter_name=ADAPTER)
    _pipeline_class(policy).save_lora_weights(
        folder,
        transformer_lora_layers={name: value.detach().cpu().contiguous() for name, value in layers.items()},
        transformer_lora_adapter_metadata=transformer.peft_config[ADAPTER].to_dict(),
        weight_name=file,
    )


@torch.no_grad()
def _save_transformer(transformer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save a transformer, and round its weights in memory to what was saved."""
    kept = tuple(transformer._keep_in_fp32_modules or ())
    rounded = {
        parameter: parameter.data.to(dtype)
        for name, parameter in transformer.named_parameters()
        if not any(entry in name.split(".") for entry in kept)
    }
    for parameter, value in rounded.items():
        parameter.data = value
    with quiet_loading():
        transformer.save_pretrained(folder)
    for parameter, value in rounded.items():
        parameter.data = value.float()


def _copy_rest(policy: PipelinePolicy, folder: Path, trained: list[str]) -> None:
    """Copy the pipeline's index, its other parts, and the licence if it has one."""
    source = policy.files.folder
    shutil.copyfile(source / INDEX, folder / INDEX)
    for part in _parts(policy):
        if part not in trained and (source / part).is_dir():
            shutil.copytree(source / part, folder / part)
    for licence in (path for path in source.glob("LICEN[CS]E*") if path.is_file()):
        shutil.copyfile(licence, folder / licence.name)


def _parts(policy: PipelinePolicy) -> list[str]:
    return [name for name, entry in policy.files.config("").items() if isinstance(entry, list)]


def _pipeline_class(policy: PipelinePolicy) -> Any:
    import diffusers

    return getattr(diffusers, policy.files.config("")["_class_name"])


def _load_transformers(policy: PipelinePolicy, folder: Path) -> Pipeline:
    """Load a pipeline as a user does, but only what `velocity` needs of it."""
    others = {part: None for part in _parts(policy) if part not in (*policy.transformers, "scheduler")}
    with quiet_loading():
        return _pipeline_class(policy).from_pretrained(
            str(folder), torch_dtype=torch.float32, local_files_only=True, **others
        )


def _drop_transformers(policy: PipelinePolicy) -> torch.device:
    """Free their memory before others come; returns where they were."""
    device = policy.device
    for part in policy.transformers:
        delattr(policy, part)
    return device


def _take_transformers(policy: PipelinePolicy, pipeline: Pipeline, device: torch.device) -> None:
    for part in policy.transformers:
        policy.add_module(part, getattr(pipeline, part).to(device).eval())
