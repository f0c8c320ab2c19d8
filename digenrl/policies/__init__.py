"""Diffusion and flow models as policies."""

from digenrl.policies.checks import check_multiple
from digenrl.policies.flux import FluxPolicy
from digenrl.policies.flux_kontext import FluxKontextPolicy
from digenrl.policies.hunyuan_video import HunyuanVideoPolicy
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.policies.pipeline_files import vae_factor
from digenrl.policies.policy import DiffusionPolicy, VelocityField
from digenrl.policies.qwen_image import QwenImagePolicy
from digenrl.policies.stable_diffusion3 import StableDiffusion3Policy
from digenrl.policies.stored_tensors import StoredTensor, stored_tensors
from digenrl.policies.wan import WanPolicy
from digenrl.policies.wan_image_to_video import WanImageToVideoPolicy
from digenrl.policies.weight_copy import WeightCopy

__all__ = [
    "DiffusionPolicy",
    "FluxKontextPolicy",
    "FluxPolicy",
    "HunyuanVideoPolicy",
    "PipelinePolicy",
    "QwenImagePolicy",
    "StableDiffusion3Policy",
    "StoredTensor",
    "VelocityField",
    "WanImageToVideoPolicy",
    "WanPolicy",
    "WeightCopy",
    "check_multiple",
    "stored_tensors",
    "vae_factor",
]
