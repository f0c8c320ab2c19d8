"""The reference job of the throughput ladder: a tiny model in the shape of Stable Diffusion 3, and a cheap reward.

A step is 8 groups of 8 samples, 10 denoising steps of which 5 are trained, full fine-tuning in float32, made 8 samples
at a time. Three sizes differ only in the transformer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from digenrl.algorithms import FlowGRPO
from digenrl.diffusion import flow_match_sigmas
from digenrl.policies import DiffusionPolicy
from digenrl.types import Condition, PromptBatch, TimestepBatch, Trajectory

if TYPE_CHECKING:
    from diffusers import SD3Transformer2DModel

PROMPTS = ("black", "night", "dusk", "shade", "gray", "haze", "dawn", "white")
"""A step's prompts, from dark to bright."""

GROUP_SIZE = 8
NUM_STEPS = 10
NUM_TRAINED_TIMESTEPS = 5
GENERATION_BATCH_SIZE = 8
NUM_SAMPLES = len(PROMPTS) * GROUP_SIZE
"""Of a step."""
LR = 3e-4
WEIGHT_DECAY = 1e-4
NOISE_LEVEL = 0.7
CLIP_RANGE = 1e-4
ADVANTAGE_CLIP = 5.0
NUM_EXTREMES = 2
"""Best samples of a group that the generation-heavy variant trains, and as many of the worst."""

Variant = Literal["reference", "generation-heavy", "mixed-speed"]

SLOW_PROCESS = "DIGENRL_BENCHMARK_SLOW_PROCESS"
"""Environment variable: `1` in the process that `MixedSpeed` slows down."""

_NUM_TEXT_TOKENS = 4
_TEXT_DIM = 32


@dataclass(frozen=True)
class Size:
    """A transformer of the job."""

    num_layers: int
    num_heads: int
    head_dim: int
    forward_ms: float
    """What a forward of 8 samples is meant to take on one thread of the machine that the job was made on."""


SIZES = {
    "S": Size(num_layers=2, num_heads=2, head_dim=16, forward_ms=2.5),
    "M": Size(num_layers=2, num_heads=4, head_dim=16, forward_ms=5.5),
    "L": Size(num_layers=4, num_heads=4, head_dim=32, forward_ms=21.0),
}


@dataclass(frozen=True)
class TextCondition(Condition):
    """What Stable Diffusion 3's transformer is conditioned on."""

    tokens: Tensor  # [B, 4, 32]
    pooled: Tensor  # [B, 32]


class SmallSD3Policy(DiffusionPolicy):
    """Stable Diffusion 3's transformer (arXiv:2403.03206) over latents 4x16x16 in patches of 2, with random weights.

    The frozen text encoder is a table of random vectors, one row per prompt.
    """

    latent_shape = (4, 16, 16)

    transformer: SD3Transformer2DModel
    text_table: Tensor

    def __init__(self, size: Size) -> None:
        """Choose the transformer's size; nothing is built."""
        super().__init__()
        self.size = size

    def build(self) -> None:
        """Make random weights from torch's global random state."""
        from diffusers import SD3Transformer2DModel

        width = self.size.num_heads * self.size.head_dim
        self.transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=self.size.num_layers,
            num_attention_heads=self.size.num_heads,
            attention_head_dim=self.size.head_dim,
            caption_projection_dim=width,
            joint_attention_dim=_TEXT_DIM,
            pooled_projection_dim=_TEXT_DIM,
            pos_embed_max_size=16,
        )
        self.register_buffer("text_table", torch.randn(len(PROMPTS), _NUM_TEXT_TOKENS + 1, _TEXT_DIM))

    def encode(self, prompts: Sequence[str]) -> TextCondition:
        """Look up B prompts."""
        rows = self.text_table[torch.tensor([PROMPTS.index(prompt) for prompt in prompts])]
        return TextCondition(tokens=rows[:, 1:], pooled=rows[:, 0])

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data, [N, 4, 16, 16]."""
        assert isinstance(condition, TextCondition)
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigma * 1000,
            encoder_hidden_states=condition.tokens,
            pooled_projections=condition.pooled,
            return_dict=False,
        )[0]
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        """Show the first three channels as an image [B, 3, 16, 16] in [0, 1]."""
        return (latents[:, :3] / 2 + 0.5).clamp(0, 1)

    def sigmas(self, num_steps: int) -> Tensor:
        """Give Stable Diffusion 3's schedule [num_steps + 1]."""
        return flow_match_sigmas(num_steps, shift=3.0)

    def blocks(self) -> Iterable[nn.Module]:
        """Give the transformer's blocks."""
        return tuple(self.transformer.transformer_blocks)


def brightness_reward(media: Tensor, texts: Sequence[str]) -> Tensor:
    """Reward samples [B, 3, H, W] for the mean brightness that their texts ask for: [B], at most 0."""
    wanted = torch.tensor([PROMPTS.index(text) / (len(PROMPTS) - 1) for text in texts])
    return -(media.flatten(1).mean(1) - wanted).square()


def brightness(media: Tensor, prompts: PromptBatch) -> Tensor:
    """Reward as digenrl calls it: see `brightness_reward`."""
    return brightness_reward(media, prompts.texts)


class BestAndWorst(FlowGRPO):
    """Flow-GRPO that trains half of the samples: the best and the worst of each group, as DanceGRPO does.

    All samples are made and scored, and advantages are those of the whole group (arXiv:2505.07818, section on sample
    selection). The network runs over the rows of chosen samples only; rows of the others lose nothing and cost nothing,
    and the chosen ones are weighted so that the step's loss is the mean over them.
    """

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give Flow-GRPO's loss on chosen rows and 0 on the others, [N]."""
        rows = extreme_rows(batch.advantages, group_size=self.group_size, num_extremes=NUM_EXTREMES)
        losses = super().timestep_loss(select_rows(batch, rows))
        return losses.new_zeros(len(batch)).index_copy(0, rows, losses * (len(batch) / len(rows)))


class MixedSpeed(FlowGRPO):
    """Flow-GRPO on devices of two speeds: a process marked by `SLOW_PROCESS` does all network work twice.

    It computes a rollout, and the forward and backward of a loss, a second time and drops the first result, so that it
    needs twice the processor time of a fast process for the same result. It does not sleep. Decoding, rewards and the
    optimizer, which cost next to nothing here, are done once.
    """

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample with the SDE; a slow process does so twice, with the same noise."""
        if is_slow_process():
            super().rollout(prompts)
        return super().rollout(prompts)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give Flow-GRPO's loss, [N]; a slow process first computes and drops it and its gradient."""
        if is_slow_process():
            parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
            torch.autograd.grad(super().timestep_loss(batch).sum(), parameters, allow_unused=True)
        return super().timestep_loss(batch)


_ALGORITHMS: dict[Variant, type[FlowGRPO]] = {
    "reference": FlowGRPO,
    "generation-heavy": BestAndWorst,
    "mixed-speed": MixedSpeed,
}


def make_module(size: str, variant: Variant = "reference") -> FlowGRPO:
    """Make the job's module; nothing is built."""
    return _ALGORITHMS[variant](
        SmallSD3Policy(SIZES[size]),
        brightness,
        group_size=GROUP_SIZE,
        num_steps=NUM_STEPS,
        timestep_fraction=NUM_TRAINED_TIMESTEPS / NUM_STEPS,
        noise_level=NOISE_LEVEL,
        clip_range=CLIP_RANGE,
        advantage_clip=ADVANTAGE_CLIP,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        seed=0,
    )


def is_slow_process() -> bool:
    """Whether this process plays the slow device."""
    return os.environ.get(SLOW_PROCESS) == "1"


def extreme_rows(advantages: Tensor, *, group_size: int, num_extremes: int) -> Tensor:
    """Choose the rows with the highest and lowest advantages of each group, in the order of rows.

    Args:
        advantages: [N], the rows of a group side by side.
        group_size: rows side by side that belong together.
        num_extremes: rows to take from either end.
    """
    order = advantages.reshape(-1, group_size).argsort(dim=1, stable=True)
    chosen = torch.cat([order[:, :num_extremes], order[:, -num_extremes:]], dim=1)
    first_row = torch.arange(len(order))[:, None] * group_size
    return (first_row + chosen).flatten().sort().values


def select_rows(batch: TimestepBatch, rows: Tensor) -> TimestepBatch:
    """Take some rows of a batch."""
    return replace(
        batch,
        latents=batch.latents[rows],
        next_latents=batch.next_latents[rows],
        final_latents=batch.final_latents[rows],
        sigma=batch.sigma[rows],
        next_sigma=batch.next_sigma[rows],
        sigma_max=batch.sigma_max[rows],
        timestep_index=batch.timestep_index[rows],
        old_log_probs=None if batch.old_log_probs is None else batch.old_log_probs[rows],
        advantages=batch.advantages[rows],
        group_index=batch.group_index[rows],
        condition=batch.condition.select(rows),
    )
