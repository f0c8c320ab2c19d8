"""Configurations of published pipelines, for dry runs on machines that do not have their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digenrl.cli.errors import UsageError

_KL = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "in_channels": 3,
    "latent_channels": 16,
    "out_channels": 3,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
_WAN_VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 96,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
_WAN_TRANSFORMER = {
    "_class_name": "WanTransformer3DModel",
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "freq_dim": 256,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
_WAN_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "flow_shift": 3.0,
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}


def _pipeline(name: str, *, transformer: Any, vae: Any, scheduler: Any) -> dict[str, Any]:
    parts = {"transformer": transformer, "vae": vae, "scheduler": scheduler}
    index = {part: ["diffusers", config["_class_name"]] for part, config in parts.items()}
    return {"": {"_class_name": name, **index}, **parts}


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "black-forest-labs/FLUX.1-dev": _pipeline(
        "FluxPipeline",
        transformer={
            "_class_name": "FluxTransformer2DModel",
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": True,
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 19,
            "num_single_layers": 38,
            "patch_size": 1,
            "pooled_projection_dim": 768,
        },
        vae={**_KL, "scaling_factor": 0.3611, "shift_factor": 0.1159},
        scheduler={
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 4096,
            "max_shift": 1.15,
            "num_train_timesteps": 1000,
            "shift": 3.0,
            "use_dynamic_shifting": True,
        },
    ),
    "stabilityai/stable-diffusion-3.5-medium": _pipeline(
        "StableDiffusion3Pipeline",
        transformer={
            "_class_name": "SD3Transformer2DModel",
            "attention_head_dim": 64,
            "caption_projection_dim": 1536,
            "dual_attention_layers": list(range(13)),
            "in_channels": 16,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 24,
            "out_channels": 16,
            "patch_size": 2,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "sample_size": 128,
        },
        vae={**_KL, "scaling_factor": 1.5305, "shift_factor": 0.0609},
        scheduler={"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0},
    ),
    "Qwen/Qwen-Image": _pipeline(
        "QwenImagePipeline",
        transformer={
            "_class_name": "QwenImageTransformer2DModel",
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": False,
            "in_channels": 64,
            "joint_attention_dim": 3584,
            "num_attention_heads": 24,
            "num_layers": 60,
            "out_channels": 16,
            "patch_size": 2,
        },
        vae={**_WAN_VAE, "_class_name": "AutoencoderKLQwenImage"},
        scheduler={
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 8192,
            "max_shift": 0.9,
            "num_train_timesteps": 1000,
            "shift": 1.0,
            "shift_terminal": 0.02,
            "use_dynamic_shifting": True,
        },
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _pipeline(
        "WanPipeline",
        transformer={**_WAN_TRANSFORMER, "ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30},
        vae=_WAN_VAE,
        scheduler=_WAN_SCHEDULER,
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _pipeline(
        "WanPipeline",
        transformer={**_WAN_TRANSFORMER, "ffn_dim": 13824, "num_attention_heads": 40, "num_layers": 40},
        vae=_WAN_VAE,
        scheduler=_WAN_SCHEDULER,
    ),
    "hunyuanvideo-community/HunyuanVideo": _pipeline(
        "HunyuanVideoPipeline",
        transformer={
            "_class_name": "HunyuanVideoTransformer3DModel",
            "attention_head_dim": 128,
            "guidance_embeds": True,
            "in_channels": 16,
            "mlp_ratio": 4.0,
            "num_attention_heads": 24,
            "num_layers": 20,
            "num_refiner_layers": 2,
            "num_single_layers": 40,
            "out_channels": 16,
            "patch_size": 2,
            "patch_size_t": 1,
            "pooled_projection_dim": 768,
            "qk_norm": "rms_norm",
            "rope_axes_dim": [16, 56, 56],
            "rope_theta": 256.0,
            "text_embed_dim": 4096,
        },
        vae={
            "_class_name": "AutoencoderKLHunyuanVideo",
            "block_out_channels": [128, 256, 512, 512],
            "latent_channels": 16,
            "scaling_factor": 0.476986,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
        },
        scheduler={"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 7.0},
    ),
}
"""By the id on the hub: the configuration of each part, and under "" the index of them."""


def write_published(name: str, folder: Path) -> None:
    """Write a published pipeline's configurations as `save_pretrained` lays them out, with no weights."""
    for part, config in PUBLISHED[name].items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        file = {"": "model_index.json", "scheduler": "scheduler_config.json"}.get(part, "config.json")
        (folder / part / file).write_text(json.dumps(config, indent=2), encoding="utf-8")
    _add_empty_indices(folder)


def fetch_configurations(name: str, revision: str | None, folder: Path) -> None:
    """Ask the hub for a pipeline's configurations, and for none of its weights.

    Raises:
        UsageError: it cannot be asked, or has no such repository.
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(name, revision=revision, allow_patterns=["*.json"])
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"`path` {name!r} is no folder here and cannot be had from the hub ({reason}): give the folder of a "
            f"download; without either a dry run knows {', '.join(PUBLISHED)}."
        ) from error
    copy_configurations(Path(snapshot), folder)


def copy_configurations(source: Path, folder: Path) -> None:
    """Copy a pipeline's configurations, and none of the weights that may be beside them."""

    def others(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if not name.endswith(".json") and not (Path(parent) / name).is_dir()]

    shutil.copytree(source, folder, ignore=others, dirs_exist_ok=True)
    _add_empty_indices(folder)


def _add_empty_indices(folder: Path) -> None:
    """Say of each transformer that its files have no weights, where nothing says what they have."""
    for part in folder.glob("transformer*"):
        index = part / "diffusion_pytorch_model.safetensors.index.json"
        if not index.exists():
            index.write_text(json.dumps({"weight_map": {}}), encoding="utf-8")
