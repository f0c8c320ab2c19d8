"""A job whose work costs nothing: what is left of a step is what digenrl itself takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from digenrl.diffusion import flow_match_sigmas
from digenrl.diffusion.kernels import Euler
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.types import Condition, PromptBatch, TimestepBatch, Trajectory

_TENSOR_BYTES = 1 << 20  # of each of the policy's tensors: a policy has many


@dataclass(frozen=True)
class NoCondition(Condition):
    """A number for each row, since a condition has rows."""

    level: Tensor  # [B]


class EmptyPolicy(DiffusionPolicy):
    """Trained weights of any size that nothing is computed with, but for one number.

    All of them are published after each step, as those of any policy are.
    """

    def __init__(self, num_bytes: int, latent_shape: tuple[int, ...] = (4,)) -> None:
        """Choose the sizes; nothing is built."""
        super().__init__()
        self.num_bytes = num_bytes
        self.latent_shape = latent_shape

    def build(self) -> None:
        """Make zeros, and the number that is trained."""
        self.gain = nn.Parameter(torch.ones(()))
        sizes = [min(_TENSOR_BYTES, self.num_bytes - start) // 4 for start in range(0, self.num_bytes, _TENSOR_BYTES)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def encode(self, prompts: Sequence[str]) -> NoCondition:
        """Give zeros [B]."""
        return NoCondition(torch.zeros(len(prompts)))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Give back the latents."""
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Give black pictures [B, 1, 1, 1]."""
        return torch.zeros(len(latents), 1, 1, 1)

    def sigmas(self, num_steps: int) -> Tensor:
        """Give a schedule [num_steps + 1]."""
        return flow_match_sigmas(num_steps)


class EmptyWork(DiffusionRLModule):
    """Rollouts of zeros, and a loss that moves one number of the weights."""

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Give zeros as latents."""
        latents = torch.zeros(len(prompts), self.num_steps + 1, *self.policy.latent_shape)
        return Trajectory(
            prompts=prompts,
            condition=self.policy.encode(prompts.texts),
            latents=latents,
            final_latents=latents[:, -1],
            sigmas=self.policy.sigmas(self.num_steps),
            timestep_indices=tuple(range(self.num_steps)),
            old_log_probs=torch.zeros(len(prompts), self.num_steps),
            kernel=Euler(),
        )

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give the trained number for each row, [N]."""
        assert isinstance(self.policy, EmptyPolicy)
        return self.policy.gain.expand(len(batch.sigma))


def sample_numbers(media: Tensor, prompts: PromptBatch) -> Tensor:
    """Reward a sample by its place in its group: [B]."""
    return torch.tensor(prompts.sample_indices, dtype=torch.float32)


def empty_module(policy: EmptyPolicy, *, group_size: int = 2) -> EmptyWork:
    """Make the job for groups of `group_size` samples, each of one denoising step."""
    return EmptyWork(policy, sample_numbers, group_size=group_size, num_steps=1, lr=1e-3, weight_decay=0.0, seed=0)
