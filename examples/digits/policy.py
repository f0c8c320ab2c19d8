"""A diffusion policy that draws 8x8 digits, small enough to train on one CPU thread."""

from __future__ import annotations

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

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The prompts this policy knows; the place of a word is its digit."""

EMBEDDING_DIM = 32


def digits_of(prompts: Sequence[str]) -> list[int]:
    """Read digit words: `["nine", "two"]` gives `[9, 2]`.

    Raises:
        ValueError: a prompt is not one of `DIGIT_WORDS`.
    """
    for prompt in prompts:
        if prompt not in DIGIT_WORDS:
            raise ValueError(f"a digits prompt must be one of {', '.join(DIGIT_WORDS)}, got {prompt!r}.")
    return [DIGIT_WORDS.index(prompt) for prompt in prompts]


@dataclass(frozen=True)
class DigitCondition(Condition):
    """Which digit each sample shall show.

    Holds the digits and not their embeddings, so that the gradient reaches the embedding in `velocity`.
    """

    digits: Tensor  # [B] int64


class DigitsPolicy(DiffusionPolicy):
    """Stable Diffusion 3's transformer (arXiv:2403.03206) with 283 thousand parameters, in pixel space.

    The prompt encoder is one trained vector per digit word, which serves as the only text token and as the
    pooled text embedding.

    Args:
        checkpoint: safetensors file that `pretrain.py` wrote; without one the weights are random.
    """

    latent_shape = (1, 8, 8)

    transformer: SD3Transformer2DModel
    prompt_embedding: nn.Embedding

    def __init__(self, checkpoint: str | None = None) -> None:
        super().__init__()
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise FileNotFoundError(
                f"`checkpoint` must be a safetensors file with the weights of the digits policy, got "
                f"{checkpoint!r}, which does not exist; make it with "
                f"`python examples/digits/pretrain.py --output {checkpoint}`."
            )
        self.checkpoint = checkpoint

    def build(self) -> None:
        """Create the transformer and the prompt embedding, and load the checkpoint if there is one."""
        from diffusers import SD3Transformer2DModel
        from safetensors.torch import load_file

        self.transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=1,
            out_channels=1,
            num_layers=2,
            num_attention_heads=4,
            attention_head_dim=16,
            caption_projection_dim=64,
            joint_attention_dim=EMBEDDING_DIM,
            pooled_projection_dim=EMBEDDING_DIM,
            pos_embed_max_size=8,
        )
        self.prompt_embedding = nn.Embedding(len(DIGIT_WORDS), EMBEDDING_DIM)
        if self.checkpoint is not None:
            self.load_state_dict(load_file(self.checkpoint))

    def encode(self, prompts: Sequence[str]) -> DigitCondition:
        """Turn B digit words into a condition of B rows."""
        return DigitCondition(torch.tensor(digits_of(prompts), device=self.prompt_embedding.weight.device))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, 1, 8, 8], for pixel latents [N, 1, 8, 8] at `sigma` [N]."""
        assert isinstance(condition, DigitCondition)
        embedding = self.prompt_embedding(condition.digits)  # [N, 32]
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(embedding.dtype),
            timestep=sigma.float() * 1000,
            encoder_hidden_states=embedding[:, None],
            pooled_projections=embedding,
            return_dict=False,
        )[0]
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        """Turn pixel latents in about [-1, 1] into gray images [B, 1, 8, 8] in [0, 1]."""
        return (latents / 2 + 0.5).clamp(0, 1)

    def sigmas(self, num_steps: int) -> Tensor:
        """Give the schedule [num_steps + 1]; samples of 64 pixels need no shift."""
        return flow_match_sigmas(num_steps)

    def blocks(self) -> Iterable[nn.Module]:
        """Give the transformer's two blocks."""
        return tuple(self.transformer.transformer_blocks)
