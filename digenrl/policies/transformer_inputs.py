"""Inputs for diffusers' transformers, of the right shapes and without meaning: for what needs no model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.policies.policy import DiffusionPolicy

_CLIP_TOKENS = 77


def find_transformer(policy: DiffusionPolicy) -> nn.Module | None:
    """Give the network inside a policy that `transformer_inputs` can make inputs for; None if there is none."""
    return next((module for module in policy.modules() if type(module).__name__ in _INPUTS), None)


def call_transformer(transformer: nn.Module, policy: DiffusionPolicy, num_rows: int) -> Tensor:
    """Call a policy's transformer with zeros: its prediction for so many rows."""
    output = transformer(**transformer_inputs(transformer, policy, num_rows), return_dict=False)
    prediction: Tensor = output[0]
    return prediction


def transformer_inputs(transformer: nn.Module, policy: DiffusionPolicy, num_rows: int) -> dict[str, Any]:
    """Make inputs of zeros for so many rows of the policy's size."""
    return _INPUTS[type(transformer).__name__](transformer.config, policy, num_rows)


def _stable_diffusion_3(config: Any, policy: DiffusionPolicy, num_rows: int) -> dict[str, Any]:
    return {
        "hidden_states": _latents(policy, num_rows),
        "encoder_hidden_states": _states(
            policy, num_rows, _CLIP_TOKENS + _num_tokens(policy, 256), config.joint_attention_dim
        ),
        "pooled_projections": _states(policy, num_rows, config.pooled_projection_dim),
        "timestep": torch.zeros(num_rows),
    }


def _flux(config: Any, policy: DiffusionPolicy, num_rows: int) -> dict[str, Any]:
    num_text = _num_tokens(policy, 512)
    num_image = math.prod(policy.latent_shape) // config.in_channels + _num_image_tokens(policy, 0)
    guidance = {"guidance": torch.ones(num_rows)} if config.guidance_embeds else {}
    return {
        "hidden_states": _states(policy, num_rows, num_image, config.in_channels),
        "encoder_hidden_states": _states(policy, num_rows, num_text, config.joint_attention_dim),
        "pooled_projections": _states(policy, num_rows, config.pooled_projection_dim),
        "timestep": torch.zeros(num_rows),
        "img_ids": torch.zeros(num_image, 3),
        "txt_ids": torch.zeros(num_text, 3),
        **guidance,
    }


def _qwen_image(config: Any, policy: DiffusionPolicy, num_rows: int) -> dict[str, Any]:
    num_text = _num_tokens(policy, 512)
    num_image = math.prod(policy.latent_shape) // config.in_channels
    height = max(side for side in range(1, math.isqrt(num_image) + 1) if num_image % side == 0)
    return {
        "hidden_states": _states(policy, num_rows, num_image, config.in_channels),
        "encoder_hidden_states": _states(policy, num_rows, num_text, config.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(num_rows, num_text, dtype=torch.bool),
        "timestep": torch.zeros(num_rows),
        "img_shapes": [[(1, height, num_image // height)]] * num_rows,
    }


def _wan(config: Any, policy: DiffusionPolicy, num_rows: int) -> dict[str, Any]:
    images = {}
    if config.image_dim is not None:
        num_rows_each = 2 if config.pos_embed_seq_len is not None else 1  # of the first and the last frame
        num_image = _num_image_tokens(policy, 257 * num_rows_each) // num_rows_each
        images["encoder_hidden_states_image"] = _states(policy, num_rows * num_rows_each, num_image, config.image_dim)
    return {
        # Channels of images come after those that are denoised.
        "hidden_states": _states(policy, num_rows, config.in_channels, *policy.latent_shape[1:]),
        "encoder_hidden_states": _states(policy, num_rows, _num_tokens(policy, 512), config.text_dim),
        "timestep": torch.zeros(num_rows),
        **images,
    }


def _hunyuan_video(config: Any, policy: DiffusionPolicy, num_rows: int) -> dict[str, Any]:
    num_text = _num_tokens(policy, 256)
    guidance = {"guidance": torch.ones(num_rows)} if config.guidance_embeds else {}
    return {
        "hidden_states": _latents(policy, num_rows),
        "encoder_hidden_states": _states(policy, num_rows, num_text, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(num_rows, num_text, dtype=torch.bool),
        "pooled_projections": _states(policy, num_rows, config.pooled_projection_dim),
        "timestep": torch.zeros(num_rows),
        **guidance,
    }


def _latents(policy: DiffusionPolicy, num_rows: int) -> Tensor:
    return _states(policy, num_rows, *policy.latent_shape)


def _states(policy: DiffusionPolicy, num_rows: int, *shape: int) -> Tensor:
    return torch.zeros(num_rows, *shape, dtype=getattr(policy, "compute_dtype", torch.float32))


def _num_image_tokens(policy: DiffusionPolicy, default: int) -> int:
    """Give the tokens of a prompt's images, which policies that are given images know."""
    return int(getattr(policy, "num_image_tokens", default))


def _num_tokens(policy: DiffusionPolicy, default: int) -> int:
    """Give the length of a prompt's embeddings, which policies of pipelines have as a setting."""
    return int(getattr(policy, "max_sequence_length", None) or default)


_INPUTS: Mapping[str, Callable[[Any, DiffusionPolicy, int], dict[str, Any]]] = {
    "SD3Transformer2DModel": _stable_diffusion_3,
    "FluxTransformer2DModel": _flux,
    "QwenImageTransformer2DModel": _qwen_image,
    "WanTransformer3DModel": _wan,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
}
