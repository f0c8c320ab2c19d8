"""A random model in the shape of FLUX.1: a frozen base and trained low-rank adapters, for CPUs and for large GPUs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from digenrl.algorithms import FlowGRPO
from digenrl.diffusion import flow_match_sigmas
from digenrl.policies import DiffusionPolicy
from digenrl.types import Condition, PromptBatch

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel

PROMPTS = ("black", "night", "dusk", "shade", "gray", "haze", "dawn", "white")
"""From dark to bright."""

_GUIDANCE = 3.5  # what FLUX.1-dev is told of the guidance that it has distilled
_ADAPTED = ["to_q", "to_k", "to_v", "to_out.0"]
_LARGE_BLOCKS_BYTES = 1_250_000_000  # of a double and two single blocks of FLUX.1's width in bfloat16
_MOST_DOUBLE_BLOCKS = 4
_MEMORY_SHARE = 0.3  # of a device, for the weights of all processes that share it; the rest is for activations


@dataclass(frozen=True)
class Size:
    """A transformer and what it is fed."""

    num_double_blocks: int
    num_single_blocks: int
    num_heads: int
    axes_dims_rope: tuple[int, int, int]
    """Their sum is the width of a head."""
    latent_side: int
    """Of the square of image tokens."""
    latent_channels: int
    num_text_tokens: int
    text_dim: int
    lora_rank: int
    base_dtype: torch.dtype


TINY = Size(1, 1, 2, (4, 6, 6), 4, 16, 4, 32, 4, torch.float32)
"""For CPUs, and for comparing gradients to float32's precision."""


def large(num_double_blocks: int) -> Size:
    """Give blocks of FLUX.1's width over a picture of 512x512, the base in bfloat16."""
    return Size(num_double_blocks, 2 * num_double_blocks, 24, (16, 56, 56), 32, 64, 256, 4096, 32, torch.bfloat16)


def largest_that_fits(memory_bytes: int, num_processes: int) -> Size:
    """Give the size for a device that `num_processes` share."""
    fitting = int(_MEMORY_SHARE * memory_bytes / num_processes / _LARGE_BLOCKS_BYTES)
    return large(min(max(fitting, 1), _MOST_DOUBLE_BLOCKS))


@dataclass(frozen=True)
class FluxCondition(Condition):
    """What FLUX.1's transformer is conditioned on, one row of numbers for each prompt."""

    tokens: Tensor  # [B, text tokens, text_dim]
    pooled: Tensor  # [B, text_dim]


class SmallFluxPolicy(DiffusionPolicy):
    """FLUX.1's transformer with embedded guidance, over packed latents, with random weights.

    The base is frozen; low-rank adapters of the attention are trained, in float32. Text embeddings are random numbers
    that depend on the prompt alone.
    """

    transformer: FluxTransformer2DModel

    def __init__(self, size: Size) -> None:
        """Choose the size; nothing is built."""
        super().__init__()
        self.size = size
        self.latent_shape = (size.latent_side**2, size.latent_channels)

    def build(self) -> None:
        """Make random weights, on the GPU where there is one: a large model takes minutes on a CPU."""
        from diffusers import FluxTransformer2DModel
        from peft import LoraConfig

        size = self.size
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            with _default_dtype(size.base_dtype):
                self.transformer = FluxTransformer2DModel(
                    patch_size=1,
                    in_channels=size.latent_channels,
                    num_layers=size.num_double_blocks,
                    num_single_layers=size.num_single_blocks,
                    attention_head_dim=sum(size.axes_dims_rope),
                    num_attention_heads=size.num_heads,
                    joint_attention_dim=size.text_dim,
                    pooled_projection_dim=size.text_dim,
                    guidance_embeds=True,
                    axes_dims_rope=size.axes_dims_rope,
                )
            self.transformer.requires_grad_(False)
            # Not zeros in the second matrix, as usual: the first one would have no gradient to compare.
            adapters = LoraConfig(r=size.lora_rank, target_modules=_ADAPTED, init_lora_weights=False)
            self.transformer.add_adapter(adapters)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def encode(self, prompts: Sequence[str]) -> FluxCondition:
        """Draw the embeddings of B prompts."""
        size = self.size
        rows = torch.stack([_numbers_of(prompt, size.num_text_tokens + 1, size.text_dim) for prompt in prompts])
        rows = rows.to(next(self.parameters()).device)
        return FluxCondition(tokens=rows[:, 1:], pooled=rows[:, 0])

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, image tokens, channels]."""
        assert isinstance(condition, FluxCondition)
        dtype = self.size.base_dtype
        side = torch.arange(self.size.latent_side, device=latents.device)
        rows, columns = torch.meshgrid(side, side, indexing="ij")
        image_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma,  # the transformer multiplies it by 1000
            guidance=torch.full_like(sigma, _GUIDANCE),
            pooled_projections=condition.pooled.to(dtype),
            encoder_hidden_states=condition.tokens.to(dtype),
            txt_ids=torch.zeros(condition.tokens.shape[1], 3, device=latents.device),
            img_ids=image_ids.to(torch.float32),
            return_dict=False,
        )[0]
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        """Show the first channel as a picture [B, 1, side, side] in [0, 1]."""
        side = self.size.latent_side
        return (latents[..., 0].reshape(-1, 1, side, side) / 2 + 0.5).clamp(0, 1)

    def sigmas(self, num_steps: int) -> Tensor:
        """Give a shifted schedule [num_steps + 1]."""
        return flow_match_sigmas(num_steps, shift=3.0)

    def blocks(self) -> Iterable[nn.Module]:
        """Give the transformer's double and single blocks."""
        return (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks)


def brightness(media: Tensor, prompts: PromptBatch) -> Tensor:
    """Reward samples for the brightness that their texts ask for: [B], at most 0."""
    wanted = torch.tensor([PROMPTS.index(text) / (len(PROMPTS) - 1) for text in prompts.texts], device=media.device)
    return -(media.flatten(1).mean(1).float() - wanted).square()


class Descent(FlowGRPO):
    """Plain gradient descent: the difference of the weights is the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Step by `lr` along the gradient."""
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=self.lr)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _numbers_of(text: str, *shape: int) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
