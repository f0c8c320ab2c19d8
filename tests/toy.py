"""One toy for all tests: a two-layer flow model over 8 numbers, and a reward that wants a value per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from digenrl import Condition, DiffusionPolicy, PromptBatch
from digenrl.algorithms import FlowGRPO
from digenrl.diffusion import flow_match_sigmas

WORDS = ["low", "middle", "high", "top"]


@dataclass(frozen=True)
class ToyCondition(Condition):
    level: Tensor  # [B]


class ToyPolicy(DiffusionPolicy):
    latent_shape = (2, 4)

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.hidden = hidden

    def build(self) -> None:
        self.input = nn.Linear(8 + 2, self.hidden)
        self.blocks_ = nn.ModuleList(nn.Linear(self.hidden, self.hidden) for _ in range(2))
        self.output = nn.Linear(self.hidden, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def encode(self, prompts: Sequence[str]) -> ToyCondition:
        return ToyCondition(torch.tensor([WORDS.index(prompt) / len(WORDS) for prompt in prompts]))

    def unconditional(self, condition: Condition) -> ToyCondition:
        assert isinstance(condition, ToyCondition)
        return ToyCondition(torch.full_like(condition.level, -1.0))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
        hidden = self.input(torch.cat([latents.flatten(1), sigma[:, None], condition.level[:, None]], dim=1))
        for block in self.blocks_:
            hidden = hidden + block(nn.functional.silu(hidden))
        return (self.output(hidden) + 0.1 * self.frozen(latents.flatten(1))).view_as(latents)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.sigmoid().unsqueeze(1)

    def sigmas(self, num_steps: int) -> Tensor:
        return flow_match_sigmas(num_steps)

    def blocks(self) -> nn.ModuleList:
        return self.blocks_


def level_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    """Wants the mean brightness of a sample to be its prompt's level."""
    wanted = torch.tensor([WORDS.index(text) / len(WORDS) for text in prompts.texts])
    return -((media.flatten(1).mean(1) - wanted) ** 2)


def toy_module(**settings: object) -> FlowGRPO:
    defaults: dict[str, object] = {
        "group_size": 4,
        "num_steps": 5,
        "timestep_fraction": 0.8,
        "lr": 1e-3,
        "clip_range": 1e-2,
        "seed": 0,
    }
    return FlowGRPO(ToyPolicy(), level_reward, **{**defaults, **settings})  # type: ignore[arg-type]
