"""A pipeline's transformer before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from digenrl.policies.pipeline_files import PipelineFiles
from digenrl.policies.stored_tensors import StoredTensor, stored_tensors


def make_transformer(
    files: PipelineFiles, part: str, *, adapt: Callable[[nn.Module], None], frozen_dtype: torch.dtype
) -> nn.Module:
    """Make a transformer with what its files have on the meta device, and with all else as it computes it.

    Args:
        files: of the pipeline.
        part: name of the transformer in it.
        adapt: puts an adapter into it, and freezes what is not trained.
        frozen_dtype: of frozen weights but those that the model wants in float32.
    """
    import diffusers
    from accelerate import init_empty_weights

    config = files.config(part)
    with init_empty_weights(include_buffers=False):  # some tables of positions are in no file
        model: nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
    _leave_buffers_to_files(model, set(stored_tensors(files.weights(part))))
    adapt(model)
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not any(entry in name.split(".") for entry in kept):
            parameter.data = parameter.data.to(frozen_dtype)
    return model.eval()


def _leave_buffers_to_files(model: nn.Module, stored: Collection[str]) -> None:
    for path, module in model.named_modules():
        for name in set(module._buffers) - module._non_persistent_buffers_set:
            if f"{path}.{name}".lstrip(".") in stored:
                module._buffers[name] = module._buffers[name].to("meta")


def stored_transformer(files: PipelineFiles, part: str, adapted: Collection[str]) -> dict[str, StoredTensor]:
    """Say which files a transformer's weights are in, by their names in the policy.

    Args:
        files: of the pipeline.
        part: name of the transformer in it, and in the policy.
        adapted: paths of the layers that have an adapter.
    """
    layers = set(adapted)

    def rename(key: str) -> str:
        owner, _, last = key.rpartition(".")
        return f"{owner}.base_layer.{last}" if owner in layers else key

    return stored_tensors(files.weights(part), prefix=f"{part}.", rename=rename)
