"""LoRA (arXiv:2106.09685) by peft, inside a model of diffusers whose weights are not loaded yet."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

LoRAInit = Literal["gaussian", "kaiming"]
"""How the first factor is drawn; the second is 0, so the policy starts as the base model."""

ADAPTER = "default"

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Ends of the paths of the layers that an adapter is for where text and image tokens attend to each other."""

_SCALES = ("use_rslora", "alpha_pattern")
"""Settings of peft that change the scale of an adapter, of all layers or of some."""


@dataclass(frozen=True)
class LoRASettings:
    """An adapter's form."""

    rank: int
    alpha: float
    """The adapter is scaled by this over the rank."""
    targets: Sequence[str] | str
    """Names of linear layers, as the ends of their paths, or a regular expression of whole paths."""
    init: LoRAInit = "gaussian"

    def __post_init__(self) -> None:
        """Check them, by the names that policies have."""
        if self.rank < 1:
            raise ValueError(f"`lora_rank` must be at least 1, got {self.rank}; None trains all weights.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"`lora_alpha` must be positive and finite, got {self.alpha}.")
        if self.init not in ("gaussian", "kaiming"):
            raise ValueError(f"`lora_init` must be gaussian or kaiming, got {self.init!r}.")
        if not self.targets:
            raise ValueError("`lora_targets` must name a layer, got none.")


def add_lora(model: nn.Module, settings: LoRASettings, weights: Mapping[str, Tensor] | None = None) -> list[str]:
    """Put an adapter called "default" into a model, float32 and on the CPU; it alone requires a gradient.

    The numbers come from torch's global random state, layer by layer, so they are equal wherever that is.

    Args:
        model: its own weights may be on the meta device.
        settings: form of the adapter.
        weights: of an adapter to start from, by peft's names without the adapter's.

    Returns:
        The paths of the layers that have it; their own weights are now called `base_layer`.

    Raises:
        ValueError: a target matches no linear layer, or `weights` are of another form.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    _check_targets(model, settings.targets)
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    init: Any = True if settings.init == "kaiming" else "gaussian"
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, init_lora_weights=init)
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    model._hf_peft_config_loaded = True  # type: ignore[assignment]  # what `add_adapter` of diffusers notes
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for layer in layers.values():
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.to_empty(device="cpu").to(torch.float32).requires_grad_(True)
        layer.reset_lora_parameters(ADAPTER, init)
    if weights is not None:
        _load(model, weights)
    return list(layers)


@torch.no_grad()
def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = {name.replace(f".{ADAPTER}.", "."): value for name, value in model.named_parameters() if value.requires_grad}
    unknown, absent = sorted(set(weights) - set(own)), sorted(set(own) - set(weights))
    if unknown or absent:
        raise ValueError(
            f"`adapter` does not fit the model: {len(unknown)} of its tensors have no place ({_few(unknown)}) and "
            f"{len(absent)} are missing ({_few(absent)})."
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"`{name}` of `adapter` has shape {list(value.shape)}, but the policy's has {list(own[name].shape)}."
            )
        own[name].copy_(value)


def _check_targets(model: nn.Module, targets: Sequence[str] | str) -> None:
    """Check that each target names a linear layer.

    Raises:
        ValueError: one does not.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    patterns = [targets] if isinstance(targets, str) else list(targets)
    unmatched = [pattern for pattern in patterns if not any(_matches(targets, pattern, name) for name in linear)]
    if unmatched:
        ends = sorted({_end(name) for name in linear})
        raise ValueError(
            f"`lora_targets` {', '.join(map(repr, unmatched))} matches no linear layer of `{type(model).__name__}`, "
            f"whose layers end in {', '.join(ends)}."
        )


def _matches(targets: Sequence[str] | str, pattern: str, name: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(pattern, name) is not None
    return name == pattern or name.endswith(f".{pattern}")


def _end(name: str) -> str:
    """Give the end of a path that tells a layer's role: what follows the last number that is not itself the end."""
    parts = name.split(".")
    last = max((index for index, part in enumerate(parts[:-1]) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"


@dataclass(frozen=True)
class StoredAdapter:
    """A LoRA that was read from a file."""

    rank: int
    alpha: float | None
    """None if the file does not say."""
    targets: tuple[str, ...]
    """Paths of layers."""
    weights: Mapping[str, Tensor]

    @classmethod
    def read(cls, pipeline_class: Any, path: str, part: str) -> StoredAdapter:
        """Read an adapter of a pipeline's `part`, in any format that diffusers reads.

        Args:
            pipeline_class: of diffusers.
            path: of its file or folder.
            part: what the names of layers begin with.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it has no layer of `part`, or others, or layers of several ranks or scales.
        """
        try:
            state, *others = pipeline_class.lora_state_dict(path, return_alphas=True, return_lora_metadata=True)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise FileNotFoundError(f"`adapter` {path!r} is not a LoRA that diffusers can read: {reason}") from error
        # Some classes of pipelines keep the alphas among the weights, others give them apart.
        apart, noted = (others[0] if len(others) > 1 else None) or {}, others[-1] or {}
        prefix = f"{part}."
        strangers = [key for key in (*state, *apart) if not key.startswith(prefix)]
        if strangers:
            raise ValueError(
                f"`adapter` {path!r} must have layers of `{part}` only, which alone is trained, got {len(strangers)} "
                f"others ({_few(strangers)}): leave these out, or merge the adapter into the pipeline."
            )
        scaled = [entry for entry in _SCALES if noted.get(f"{prefix}{entry}")]
        if scaled:
            raise ValueError(
                f"`adapter` {path!r} must have one scale, alpha over rank, for all layers, and was saved with "
                f"{', '.join(scaled)}: merge it into the pipeline, or save it without."
            )
        entries = {key.removeprefix(prefix): value for key, value in {**state, **apart}.items()}
        alphas = {float(value) for key, value in entries.items() if key.endswith(".alpha")}
        weights = {key: value for key, value in entries.items() if not key.endswith(".alpha")}
        ranks = {value.shape[0] for key, value in weights.items() if ".lora_A." in key}
        if len(ranks) != 1 or len(alphas) > 1:
            raise ValueError(
                f"`adapter` {path!r} must have layers of one rank and one alpha in `{part}`, got ranks "
                f"{sorted(ranks)} and alphas {sorted(alphas)}."
            )
        alpha = float(noted[f"{prefix}lora_alpha"]) if f"{prefix}lora_alpha" in noted else next(iter(alphas), None)
        targets = tuple(dict.fromkeys(key.split(".lora_")[0] for key in weights))
        return cls(ranks.pop(), alpha, targets, weights)
