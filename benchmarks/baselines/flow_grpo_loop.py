"""Flow-GRPO (arXiv:2505.05470) in one file: what somebody who needs nothing else would write with torch.distributed.

Data parallel: each rank makes, scores and trains its own groups; gradients are summed in one message a step. Beside
torch it uses the job's network and reward only, so that what differs from digenrl is the loop. Letters in shapes:
B samples of a group, K trained timesteps, T denoising steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.jobs import SmallSD3Policy, TextCondition

NoiseSource = Callable[[int, int, int | None], Tensor]
"""(step, group, denoising step or None for the initial latents) -> standard normal noise [B, 4, 16, 16]."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt."""

    condition: TextCondition  # B rows
    latents: Tensor  # [B, K+1, ...]
    old_log_probs: Tensor  # [B, K]
    advantages: Tensor  # [B]


class FlowGRPOLoop:
    """Trains a policy; `step` is one optimizer step over all prompts.

    Samples are made one group at a time, and trained one group at a time, either one timestep after another as the
    authors' code does, or all timesteps of the group in one batch.
    """

    def __init__(
        self,
        policy: SmallSD3Policy,
        reward: Callable[[Tensor, Sequence[str]], Tensor],
        prompts: Sequence[str],
        *,
        batches_timesteps: bool,
        rank: int = 0,
        num_ranks: int = 1,
        group_size: int = 8,
        num_steps: int = 10,
        num_trained_timesteps: int = 5,
        num_extremes: int | None = None,
        noise_level: float = 0.7,
        clip_range: float = 1e-4,
        advantage_clip: float = 5.0,
        lr: float = 3e-4,
        weight_decay: float = 1e-4,
        eps: float = 1e-8,
        noise: NoiseSource | None = None,
    ) -> None:
        """Take a built policy; with more than one rank, torch.distributed is set up already.

        Args:
            policy: the same weights on all ranks.
            reward: (media, texts) -> [B].
            prompts: of a step, for all ranks together.
            batches_timesteps: train all timesteps of a group in one batch, not one after another.
            rank: of this process.
            num_ranks: processes that share a step.
            group_size: samples per prompt.
            num_steps: T.
            num_trained_timesteps: K, the first ones.
            num_extremes: train this many best and worst samples of each group; None trains all.
            noise_level: a in sigma_t = a sqrt(t / (1 - t)).
            clip_range: of PPO's ratio.
            advantage_clip: advantages are clamped to plus or minus this.
            lr: of AdamW.
            weight_decay: of AdamW.
            eps: of AdamW.
            noise: where noise comes from; None draws from a generator of this rank.
        """
        self.policy = policy
        self.reward = reward
        self.prompts = prompts
        self.groups = range(rank * len(prompts) // num_ranks, (rank + 1) * len(prompts) // num_ranks)
        self.batches_timesteps = batches_timesteps
        self.num_ranks = num_ranks
        self.group_size = group_size
        self.num_steps = num_steps
        self.num_trained_timesteps = num_trained_timesteps
        self.num_extremes = num_extremes
        self.noise_level = noise_level
        self.clip_range = clip_range
        self.advantage_clip = advantage_clip
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=weight_decay, eps=eps)
        self.rng = torch.Generator().manual_seed(rank)
        self.noise = noise or self._draw
        self.sigmas = policy.sigmas(num_steps)
        self.num_steps_done = 0
        self.generate_s = 0.0
        """Seconds of this rank's last step spent on making and scoring samples."""
        self.update_s = 0.0
        """Seconds spent on forwards and backwards."""
        self.optimizer_s = 0.0
        """Seconds spent on summing gradients over the ranks, waiting for the others included, and on the step."""

    def step(self) -> None:
        """Make the samples of this rank's groups, train on them and step the optimizer."""
        start_s = time.monotonic()
        groups = [self.sample_group(group) for group in self.groups]
        sampled_s = time.monotonic()
        num_trained = 2 * self.num_extremes if self.num_extremes is not None else self.group_size
        num_rows = len(self.prompts) * num_trained * self.num_trained_timesteps  # over all ranks
        for group in groups:
            for timesteps in self._batches():
                (self.losses(group, timesteps).sum() / num_rows).backward()
        trained_s = time.monotonic()
        self._sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps_done += 1
        end_s = time.monotonic()
        self.generate_s, self.update_s = sampled_s - start_s, trained_s - sampled_s
        self.optimizer_s = end_s - trained_s

    @torch.no_grad()
    def sample_group(self, group: int) -> Group:
        """Make and score the samples of one prompt with the SDE, eq. 9."""
        texts = [self.prompts[group]] * self.group_size
        condition = self.policy.encode(texts)
        x = self.noise(self.num_steps_done, group, None)
        latents, log_probs = [x], []
        for index in range(self.num_steps):
            sigma = self.sigmas[index].expand(len(x))
            next_sigma = self.sigmas[index + 1].expand(len(x))
            mean, std = self.transition(x, self.policy(x, sigma, condition), sigma, next_sigma)
            x = mean + std.view(-1, 1, 1, 1) * self.noise(self.num_steps_done, group, index)
            if index < self.num_trained_timesteps:
                latents.append(x)
                log_probs.append(log_prob(x, mean, std))
        rewards = self.reward(self.policy.decode(x), texts).double()
        std = rewards.std(correction=0)
        advantages = ((rewards - rewards.mean()) / (std + 1e-4) if std > 0 else torch.zeros_like(rewards)).float()
        made = Group(condition, torch.stack(latents, 1), torch.stack(log_probs, 1), advantages)
        return made if self.num_extremes is None else select_extremes(made, self.num_extremes)

    def losses(self, group: Group, timesteps: Sequence[int]) -> Tensor:
        """Give PPO's clipped surrogate of each (timestep, sample), eq. 5, [len(timesteps) * B]."""
        index = torch.tensor(timesteps).repeat_interleave(len(group.advantages))
        sample = torch.arange(len(group.advantages)).repeat(len(timesteps))
        x, next_x = group.latents[sample, index], group.latents[sample, index + 1]
        condition = TextCondition(group.condition.tokens[sample], group.condition.pooled[sample])
        sigma = self.sigmas[index]
        mean, std = self.transition(x, self.policy(x, sigma, condition), sigma, self.sigmas[index + 1])
        ratio = (log_prob(next_x, mean, std) - group.old_log_probs[sample, index]).exp()
        advantages = group.advantages[sample].clamp(-self.advantage_clip, self.advantage_clip)
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return torch.maximum(-advantages * ratio, -advantages * clipped)

    def transition(self, x: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Give mean [N, ...] and std [N] of the next latents, eq. 9."""
        dt = sigma - next_sigma
        g = self.noise_level * (sigma / torch.maximum(1 - sigma, 1 - self.sigmas[1])).sqrt()
        score_weight = g.square() * dt / (2 * sigma)
        sigma_, dt_, weight_ = (value.view(-1, 1, 1, 1) for value in (sigma, dt, score_weight))
        mean = x - velocity * dt_ - (x + (1 - sigma_) * velocity) * weight_
        return mean, g * dt.sqrt()

    def _batches(self) -> list[list[int]]:
        timesteps = list(range(self.num_trained_timesteps))
        return [timesteps] if self.batches_timesteps else [[timestep] for timestep in timesteps]

    def _sum_gradients(self) -> None:
        if self.num_ranks == 1:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.parameters if p.grad is not None])
        dist.all_reduce(flat)
        start = 0
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()

    def _draw(self, step: int, group: int, index: int | None) -> Tensor:
        return torch.randn(self.group_size, *self.policy.latent_shape, generator=self.rng)


def log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Give the normal log-density of x [N, ...], averaged over its elements, [N]."""
    residual = (x - mean).square().flatten(1).mean(1)
    return -residual / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def select_extremes(group: Group, num_extremes: int) -> Group:
    """Keep the best and the worst samples."""
    order = group.advantages.argsort(stable=True)
    kept = torch.cat([order[:num_extremes], order[-num_extremes:]]).sort().values
    condition = TextCondition(group.condition.tokens[kept], group.condition.pooled[kept])
    return Group(condition, group.latents[kept], group.old_log_probs[kept], group.advantages[kept])
