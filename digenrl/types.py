"""The data that passes from stage to stage, from a prompt to the rows a loss sees.

Letters in shapes: B samples, T denoising steps, K recorded steps (K <= T), k trained timesteps of a sample,
N rows (one row is one sample at one timestep), P prompts of a step. Sigma runs from 1 (noise) to 0 (data).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from digenrl.diffusion.kernels import Kernel

RowsT = TypeVar("RowsT", bound="Rows")


def derive_seed(*parts: int | str) -> int:
    """Hash `parts` to a seed in [0, 2**63): the same parts give the same seed on every machine and in every run."""
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Prompt:
    """One prompt as the data gives it."""

    text: str
    uid: int
    """Row of the prompt in its data set; equal texts in two rows are two prompts."""
    sample_index: int = 0
    """Which sample of this prompt is asked for; training numbers its own, so only validation data sets it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, for rewards that need them."""


@dataclass(frozen=True)
class PromptBatch:
    """B samples to be made, one row each. Holds text and integers only, so it costs nothing to send.

    The rows of a group share a prompt and differ in `sample_indices`. A group is a row id of the step, never a
    text. `seeds` fixes all noise of a sample: it depends on the run's seed, the step, the prompt and the
    sample's place in its group, and on nothing that placement, batching or arrival order can change.
    """

    prompts: tuple[Prompt, ...]  # [B]
    group_ids: tuple[int, ...]  # [B]
    sample_indices: tuple[int, ...]  # [B]
    seeds: tuple[int, ...]  # [B]
    step: int

    @classmethod
    def for_step(
        cls, prompts: Sequence[Prompt], *, step: int, group_size: int, seed: int, first_group: int = 0
    ) -> PromptBatch:
        """Ask for one group of `group_size` samples per prompt, groups in the order of `prompts`."""
        rows = [(prompt, first_group + row, index) for row, prompt in enumerate(prompts) for index in range(group_size)]
        return cls(
            prompts=tuple(prompt for prompt, _, _ in rows),
            group_ids=tuple(group for _, group, _ in rows),
            sample_indices=tuple(index for _, _, index in rows),
            seeds=tuple(derive_seed(seed, "train", step, group, prompt.uid, index) for prompt, group, index in rows),
            step=step,
        )

    @classmethod
    def for_validation(cls, prompts: Sequence[Prompt], *, seed: int) -> PromptBatch:
        """Ask for one sample per prompt; its noise depends on the prompt's row and sample index alone."""
        return cls(
            prompts=tuple(prompts),
            group_ids=tuple(prompt.uid for prompt in prompts),
            sample_indices=tuple(prompt.sample_index for prompt in prompts),
            seeds=tuple(derive_seed(seed, "validation", prompt.uid, prompt.sample_index) for prompt in prompts),
            step=0,
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts' texts, [B]."""
        return tuple(prompt.text for prompt in self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: slice | Sequence[int]) -> PromptBatch:
        """Take some of the rows."""
        index = range(len(self))[rows] if isinstance(rows, slice) else rows
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in index),
            group_ids=tuple(self.group_ids[i] for i in index),
            sample_indices=tuple(self.sample_indices[i] for i in index),
            seeds=tuple(self.seeds[i] for i in index),
        )

    @classmethod
    def cat(cls, parts: Sequence[PromptBatch]) -> PromptBatch:
        """Join batches of one step."""
        steps = {part.step for part in parts}
        assert len(steps) == 1, f"batches of steps {sorted(steps)} cannot be joined"
        return cls(
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            group_ids=tuple(group for part in parts for group in part.group_ids),
            sample_indices=tuple(index for part in parts for index in part.sample_indices),
            seeds=tuple(seed for part in parts for seed in part.seeds),
            step=parts[0].step,
        )


@dataclass(frozen=True)
class Rows:
    """A dataclass whose tensors all have rows as their first axis; other fields are shared by all rows."""

    def select(self: RowsT, rows: slice | Tensor) -> RowsT:
        """Take some of the rows."""
        return replace(self, **{name: value[rows] for name, value in self._tensors()})

    def to(self: RowsT, device: torch.device | str, *, copy: bool = False) -> RowsT:
        """Move all tensors to `device`; `copy` makes new ones even if they are there."""
        return replace(self, **{name: value.to(device, copy=copy) for name, value in self._tensors()})

    @classmethod
    def cat(cls: type[RowsT], parts: Sequence[RowsT]) -> RowsT:
        """Join rows; the shared fields are those of the first part."""
        return replace(
            parts[0],
            **{name: torch.cat([getattr(part, name) for part in parts]) for name, _ in parts[0]._tensors()},
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                yield entry.name, value


@dataclass(frozen=True)
class Condition(Rows):
    """What a policy is conditioned on; each policy family has its own subclass with tensors [B, ...]."""


@dataclass(frozen=True)
class Trajectory:
    """What a rollout leaves behind, with all that a trainer needs to score it again.

    One `policy_version` made the whole trajectory. Latents and log-probs are float32 whatever the policy's
    precision is: rounding them would move the ratio by more than the usual clip range.
    """

    prompts: PromptBatch  # B rows
    condition: Condition  # B rows
    latents: Tensor  # [B, K+1, ...] before each recorded step, and after the last one
    final_latents: Tensor  # [B, ...] at sigma 0
    sigmas: Tensor  # [T+1] the schedule the rollout used; the policy was fed these very values
    timestep_indices: tuple[int, ...]  # [K] recorded steps, consecutive
    old_log_probs: Tensor | None  # [B, K] of the policy that made the samples; None after a deterministic rollout
    kernel: Kernel
    policy_version: int = 0

    def __post_init__(self) -> None:
        num_samples, num_recorded = len(self.prompts), len(self.timestep_indices)
        assert self.latents.shape[:2] == (num_samples, num_recorded + 1), "latents must be [B, K+1, ...]"
        first = self.timestep_indices[0] if self.timestep_indices else 0
        consecutive = tuple(range(first, first + num_recorded))
        assert self.timestep_indices == consecutive, "recorded timestep_indices must be consecutive"
        assert self.latents.dtype == torch.float32, "latents must be stored in float32"
        assert self.final_latents.shape == (num_samples, *self.latents.shape[2:]), "final_latents must be [B, ...]"
        if self.old_log_probs is not None:
            assert self.old_log_probs.shape == (num_samples, num_recorded), "old_log_probs must be [B, K]"

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: slice) -> Trajectory:
        """Take some of the samples."""
        return replace(
            self,
            prompts=self.prompts.select(rows),
            condition=self.condition.select(rows),
            latents=self.latents[rows],
            final_latents=self.final_latents[rows],
            old_log_probs=None if self.old_log_probs is None else self.old_log_probs[rows],
        )

    def to(self, device: torch.device | str, *, copy: bool = False) -> Trajectory:
        """Move all tensors to `device`; `copy` makes new ones even if they are there."""
        log_probs = self.old_log_probs
        return replace(
            self,
            condition=self.condition.to(device, copy=copy),
            latents=self.latents.to(device, copy=copy),
            final_latents=self.final_latents.to(device, copy=copy),
            sigmas=self.sigmas.to(device, copy=copy),
            old_log_probs=None if log_probs is None else log_probs.to(device, copy=copy),
        )

    @classmethod
    def cat(cls, parts: Sequence[Trajectory]) -> Trajectory:
        """Join the samples of one micro-batch; all parts used one schedule, kernel and policy version."""
        first = parts[0]
        for part in parts[1:]:
            assert torch.equal(part.sigmas, first.sigmas), "parts were sampled on different schedules"
            assert part.timestep_indices == first.timestep_indices, "parts recorded different steps"
            assert part.kernel == first.kernel, "parts were sampled with different kernels"
            assert part.policy_version == first.policy_version, "parts were sampled with different weights"
        log_probs = [part.old_log_probs for part in parts if part.old_log_probs is not None]
        return replace(
            first,
            prompts=PromptBatch.cat([part.prompts for part in parts]),
            condition=type(first.condition).cat([part.condition for part in parts]),
            latents=torch.cat([part.latents for part in parts]),
            final_latents=torch.cat([part.final_latents for part in parts]),
            old_log_probs=torch.cat(log_probs) if log_probs else None,
        )


@dataclass(frozen=True)
class TimestepBatch:
    """N rows to train, one row a sample at one timestep, timestep-major (all samples of one timestep first)."""

    latents: Tensor  # [N, ...] at `sigma`
    next_latents: Tensor  # [N, ...] at `next_sigma`
    final_latents: Tensor  # [N, ...] at sigma 0
    sigma: Tensor  # [N] the value fed to the policy, float32
    next_sigma: Tensor  # [N]
    sigma_max: Tensor  # [N] second value of the schedule, which bounds the pole of the kernels at sigma 1
    timestep_index: Tensor  # [N]
    old_log_probs: Tensor | None  # [N]
    advantages: Tensor  # [N]
    group_index: Tensor  # [N] group id of the row's sample
    condition: Condition  # N rows
    kernel: Kernel
    policy_version: int

    def __len__(self) -> int:
        return self.latents.shape[0]


@dataclass(frozen=True)
class ScoredBatch:
    """Whole groups with their rewards and advantages: what a trainer is given."""

    trajectory: Trajectory  # B samples
    rewards: Tensor  # [B]
    advantages: Tensor  # [B]

    def timestep_batch(self, timesteps: Tensor) -> TimestepBatch:
        """Lay out the rows of the given timesteps.

        Args:
            timesteps: [B, j] indices into the schedule, a column a pass over the samples; each must be recorded.

        Raises:
            ValueError: a timestep that the rollout did not record.
        """
        trajectory = self.trajectory
        first, last = trajectory.timestep_indices[0], trajectory.timestep_indices[-1]
        if timesteps.min() < first or timesteps.max() > last:
            raise ValueError(
                f"timesteps {timesteps.min()} to {timesteps.max()} are to be trained, but the rollout recorded {first} "
                f"to {last}; `select_timesteps` and `rollout` must agree."
            )
        device = trajectory.latents.device
        num_samples, num_columns = timesteps.shape
        # Timestep-major: row r is sample r % B at its (r // B)-th timestep.
        sample = torch.arange(num_samples, device=device).repeat(num_columns)
        index = timesteps.t().reshape(-1).to(device)
        recorded = index - trajectory.timestep_indices[0]
        log_probs = trajectory.old_log_probs
        groups = torch.tensor(trajectory.prompts.group_ids, device=device)
        return TimestepBatch(
            latents=trajectory.latents[sample, recorded],
            next_latents=trajectory.latents[sample, recorded + 1],
            final_latents=trajectory.final_latents[sample],
            sigma=trajectory.sigmas[index],
            next_sigma=trajectory.sigmas[index + 1],
            sigma_max=trajectory.sigmas[1].expand(len(index)),
            timestep_index=index,
            old_log_probs=None if log_probs is None else log_probs[sample, recorded],
            advantages=self.advantages.to(device)[sample],
            group_index=groups[sample],
            condition=trajectory.condition.select(sample),
            kernel=trajectory.kernel,
            policy_version=trajectory.policy_version,
        )
