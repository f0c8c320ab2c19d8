"""A diffusion policy that draws two digits as text, small enough to train on one CPU thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from digenrl.diffusion.sigmas import flow_match_sigmas
from digenrl.policies.policy import DiffusionPolicy
from digenrl.types import Condition

if TYPE_CHECKING:
    from diffusers import SD3Transformer2DModel

NUM_CHARACTERS = 2
EMBEDDING_DIM = 32


def characters_of(prompts: Sequence[str]) -> list[list[int]]:
    """Read the digits of quoted texts: `['"42"', '"07"']` gives `[[4, 2], [0, 7]]`.

    Raises:
        ValueError: a prompt is anything else than two digits in double quotes.
    """
    for prompt in prompts:
        if re.fullmatch(f'"[0-9]{{{NUM_CHARACTERS}}}"', prompt) is None:
            raise ValueError(f'a prompt must be two digits in double quotes, such as "42" with them, got {prompt!r}.')
    return [[int(character) for character in prompt.strip('"')] for prompt in prompts]


@dataclass(frozen=True)
class TextCondition(Condition):
    """Which digits each sample shall show, from left to right.

    Holds the digits and not their embeddings, so that the gradient reaches the embedding in `velocity`.
    """

    characters: Tensor  # [B, 2] int64


class TextPolicy(DiffusionPolicy):
    """Stable Diffusion 3's transformer (arXiv:2403.03206) with 955 thousand parameters, in pixel space.

    The prompt encoder is one trained vector per digit plus one per place; the two sums are the text tokens, and their
    mean is the pooled text embedding.

    Args:
        checkpoint: safetensors file that `pretrain.py` wrote; without one the weights are random.
    """

    latent_shape = (1, 16, 32)

    transformer: SD3Transformer2DModel
    digit_embedding: nn.Embedding
    place_embedding: nn.Embedding

    def __init__(self, checkpoint: str | None = None) -> None:
        super().__init__()
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise FileNotFoundError(
                f"`checkpoint` must be a safetensors file with the weights of the text policy, got "
                f"{checkpoint!r}, which does not exist; make it with "
                f"`python examples/ocr/pretrain.py --output {checkpoint}`."
            )
        self.checkpoint = checkpoint

    def build(self) -> None:
        """Create the transformer and the embeddings, and load the checkpoint if there is one."""
        from diffusers import SD3Transformer2DModel
        from safetensors.torch import load_file

        self.transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=4,
            in_channels=1,
            out_channels=1,
            num_layers=3,
            num_attention_heads=4,
            attention_head_dim=24,
            caption_projection_dim=96,
            joint_attention_dim=EMBEDDING_DIM,
            pooled_projection_dim=EMBEDDING_DIM,
            pos_embed_max_size=8,
        )
        self.digit_embedding = nn.Embedding(10, EMBEDDING_DIM)
        self.place_embedding = nn.Embedding(NUM_CHARACTERS, EMBEDDING_DIM)
        if self.checkpoint is not None:
            self.load_state_dict(load_file(self.checkpoint))

    def encode(self, prompts: Sequence[str]) -> TextCondition:
        """Turn B quoted texts into a condition of B rows."""
        return TextCondition(torch.tensor(characters_of(prompts), device=self.digit_embedding.weight.device))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, 1, 16, 32], for pixel latents [N, 1, 16, 32] at `sigma` [N]."""
        assert isinstance(condition, TextCondition)
        tokens = self.digit_embedding(condition.characters) + self.place_embedding.weight  # [N, 2, 32]
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(tokens.dtype),
            timestep=sigma.float() * 1000,
            encoder_hidden_states=tokens,
            pooled_projections=tokens.mean(dim=1),
            return_dict=False,
        )[0]
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        """Turn pixel latents in about [-1, 1] into gray images [B, 1, 16, 32] in [0, 1]."""
        return (latents / 2 + 0.5).clamp(0, 1)

    def sigmas(self, num_steps: int) -> Tensor:
        """Give the schedule [num_steps + 1]; samples of 512 pixels need no shift."""
        return flow_match_sigmas(num_steps)

    def blocks(self) -> Iterable[nn.Module]:
        """Give the transformer's three blocks."""
        return tuple(self.transformer.transformer_blocks)
