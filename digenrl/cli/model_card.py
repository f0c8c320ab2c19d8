"""README.md of what `digenrl export` writes, as the hub shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import digenrl
from digenrl.policies import DiffusionPolicy, PipelinePolicy
from digenrl.policies.export import Exported
from digenrl.policies.image_prompts import ImagePromptPolicy
from digenrl.policies.pipeline_files import may_be_on_the_hub
from digenrl.policies.video import VideoPipelinePolicy

CARD = "README.md"

_PRIVATE = (
    "path", "revision", "adapter", "adapter_2", "embedding_cache", "text_encoders", "vae_slicing",
    "vae_tiling", "offload_vae",
)  # fmt: skip
"""Settings of policies that say where files lie, or what a machine has memory for."""


@dataclass(frozen=True)
class Recipe:
    """How the weights came about."""

    algorithm: str | None
    settings: Mapping[str, Any]
    """Of the algorithm."""
    rewards: tuple[str, ...]
    """Class names."""
    policy: Mapping[str, Any]
    """The policy's settings, without those of the machine."""
    adapters: tuple[str, ...]
    """That training started from."""
    num_steps: int
    is_averaged: bool
    is_merged: bool
    base_model: str | None
    """Id on the hub, where it was given."""

    @classmethod
    def of(
        cls,
        model: Mapping[str, Any],
        *,
        hyper_parameters: Mapping[str, Any],
        num_steps: int,
        is_averaged: bool,
        is_merged: bool,
        base_model: str | None,
    ) -> Recipe:
        """Read it from the `model` of a run's configuration, and from what the checkpoint notes."""
        given = model.get("init_args", model)
        policy = given["policy"].get("init_args") or {} if isinstance(given["policy"], dict) else {}
        configured = {name: value for name, value in given.items() if name not in ("policy", "reward")}
        return cls(
            algorithm=_last_name(model.get("class_path") or hyper_parameters.get("_class_path")),
            settings=_shown(hyper_parameters or configured),
            rewards=tuple(_reward_names(given.get("reward"))),
            policy=_shown(policy),
            adapters=tuple(policy[name] for name in ("adapter", "adapter_2") if policy.get(name)),
            num_steps=num_steps,
            is_averaged=is_averaged,
            is_merged=is_merged,
            base_model=base_model,
        )


def write_card(folder: Path, policy: DiffusionPolicy, exported: Exported, recipe: Recipe, *, title: str) -> None:
    """Write README.md into a folder.

    Args:
        folder: with what was written.
        policy: that was written.
        exported: how it was written.
        recipe: how its weights came about.
        title: of the page.
    """
    parts = [f"---\n{_header(policy, exported, recipe)}\n---", f"# {title}", _introduction(policy, exported, recipe)]
    parts += ["## Use", *_use(policy, exported, recipe), "## Training", *_training(recipe)]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _header(policy: DiffusionPolicy, exported: Exported, recipe: Recipe) -> str:
    from huggingface_hub import ModelCardData

    relation = "adapter" if exported.form == "lora" else "finetune"
    base = _base_of(policy, recipe)
    is_pipeline = isinstance(policy, PipelinePolicy)
    source = "image" if isinstance(policy, ImagePromptPolicy) else "text"
    task = f"{source}-to-{'video' if isinstance(policy, VideoPipelinePolicy) else 'image'}" if is_pipeline else None
    data = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else relation,
        library_name="diffusers" if is_pipeline else "digenrl",
        pipeline_tag=task,
        tags=["digenrl", "reinforcement-learning", *(["lora"] if exported.form == "lora" else [])],
    )
    return str(data.to_yaml()).strip()


def _introduction(policy: DiffusionPolicy, exported: Exported, recipe: Recipe) -> str:
    base = _base_of(policy, recipe) or "a pipeline of diffusers"
    what = {
        "lora": f"A LoRA for {base}",
        "pipeline": f"Weights of {base}, a LoRA merged into them" if recipe.is_merged else f"Weights of {base}",
        "state": f"The weights of a `{type(policy).__name__}`",
    }[exported.form]
    return (
        f"{what}, trained with reinforcement learning by digenrl {digenrl.__version__}.\n\n"
        "Before you publish it: the license of the model that was trained holds for this as well; name yours as "
        "`license:` in the lines at the top."
    )


def _use(policy: DiffusionPolicy, exported: Exported, recipe: Recipe) -> Iterator[str]:
    if not isinstance(policy, PipelinePolicy):
        yield _python(
            "from safetensors.torch import load_file",
            f"policy.load_state_dict(load_file({next(iter(exported.weights.values()))!r}))"
            f"  # a `{type(policy).__name__}` that is built",
        )
        return
    name = "FOLDER_OR_ID_OF_THIS" if exported.form == "pipeline" else _base_of(policy, recipe) or "BASE_MODEL"
    lines = [
        "import torch",
        "from diffusers import DiffusionPipeline",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained({name!r}, torch_dtype=torch.bfloat16)",
    ]
    if exported.form == "lora":
        for part, file in exported.weights.items():
            second = ", load_into_transformer_2=True" if part == "transformer_2" else ""
            lines.append(f"pipeline.load_lora_weights('FOLDER_OR_ID_OF_THIS', weight_name={file!r}{second})")
    yield _python(*lines)
    if exported.form == "lora" and policy.lora is not None:
        yield (
            f"Rank {policy.lora.rank}, alpha {policy.lora.alpha:g}; the file notes both, and diffusers scales by them."
        )


def _training(recipe: Recipe) -> Iterator[str]:
    weights = "an average of the weights (`ema_decay`)" if recipe.is_averaged else "the weights of the last step"
    facts = [f"- optimizer steps: {recipe.num_steps}", f"- these are {weights}"]
    if recipe.algorithm is not None:
        facts.insert(0, f"- algorithm: {recipe.algorithm}")
    if recipe.rewards:
        facts.append(f"- reward: {', '.join(recipe.rewards)}")
    if recipe.adapters:
        facts.append(f"- started from the adapter {' and '.join(map(_public_name, recipe.adapters))}")
    yield "\n".join(facts)
    for title, settings in (("The algorithm", recipe.settings), ("The policy", recipe.policy)):
        if settings:
            yield f"{title}'s settings:"
            yield f"```yaml\n{yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True).strip()}\n```"


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _base_of(policy: DiffusionPolicy, recipe: Recipe) -> str | None:
    """Give the id on the hub of what was trained; a folder of this machine says nothing to others."""
    if recipe.base_model is not None:
        return recipe.base_model
    if isinstance(policy, PipelinePolicy) and may_be_on_the_hub(policy.path) and not Path(policy.path).exists():
        return policy.path
    return None


def _public_name(path: str) -> str:
    return path if may_be_on_the_hub(path) and not Path(path).exists() else Path(path).name


def _last_name(class_path: str | None) -> str | None:
    return None if class_path is None else class_path.rpartition(".")[2]


def _reward_names(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node.rpartition(".")[2]
    elif isinstance(node, list):
        for item in node:
            yield from _reward_names(item)
    elif isinstance(node, dict):
        inner = (node.get("init_args") or {}).get("rewards")
        yield from _reward_names(node.get("class_path") if inner is None else inner)


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what says where files lie, and what YAML has no form for."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if name not in _PRIVATE and not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (int, float, bool, type(None))) or (isinstance(value, str) and not os.path.isabs(value))
