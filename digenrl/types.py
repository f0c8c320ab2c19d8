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

PROMPT_FIELDS = ("image", "images", "video", "negative_prompt")
"""Metadata columns for policies: paths of media, and a text. A run whose policy does not read one ends early."""


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

    def repeat(self, num_times: int) -> PromptBatch:
        """Give all rows several times."""
        return replace(
            self,
            prompts=self.prompts * num_times,
            group_ids=self.group_ids * num_times,
            sample_indices=self.sample_indices * num_times,
            seeds=self.seeds * num_times,
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
    """A dataclass whose tensors, and those of `Rows` in it, have rows as their first axis; all rows share the rest."""

    def select(self: RowsT, rows: slice | Tensor) -> RowsT:
        """Take some of the rows."""
        return replace(self, **{name: value[rows] for name, value in self._by_row()})

    def __getitem__(self: RowsT, rows: slice | Tensor) -> RowsT:
        """Take some of the rows."""
        return self.select(rows)

    def to(self: RowsT, device: torch.device | str, *, copy: bool = False) -> RowsT:
        """Move all tensors to `device`; `copy` makes new ones even if they are there."""
        return replace(self, **{name: value.to(device, copy=copy) for name, value in self._by_row()})

    @classmethod
    def cat(cls: type[RowsT], parts: Sequence[RowsT]) -> RowsT:
        """Join rows; the shared fields are those of the first part."""
        names = [[name for name, _ in part._by_row()] for part in parts]
        assert all(entry == names[0] for entry in names), f"parts hold different fields, {names}"
        return replace(
            parts[0],
            **{
                name: (torch if isinstance(value, Tensor) else type(value)).cat([getattr(part, name) for part in parts])
                for name, value in parts[0]._by_row()
            },
        )

    def _by_row(self) -> Iterator[tuple[str, Any]]:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor | Rows):
                yield entry.name, value

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in self._by_row() if isinstance(value, Tensor))


@dataclass(frozen=True)
class Condition(Rows):
    """What a policy is conditioned on; each policy family has its own subclass with tensors [B, ...]."""

    negative_condition: Condition | None = field(default=None, kw_only=True)
    """What classifier-free guidance leads away from, B rows, where each prompt has its own."""


@dataclass(frozen=True)
class Trajectory:
    """What a rollout leaves behind, with all that a trainer needs to score it again.

    One `policy_version` made the whole trajectory. Latents and log-probs are float32 whatever the policy's
    precision is: rounding them would move the ratio by more than the usual clip range. Algorithms that train on the
    forward process need the final latents only, and record no step.
    """

    prompts: PromptBatch  # B rows
    condition: Condition  # B rows
    latents: Tensor | None  # [B, K+1, ...] before each recorded step, and after the last one; None if K is 0
    final_latents: Tensor  # [B, ...] at sigma 0
    sigmas: Tensor  # [T+1] the schedule the rollout used; the policy was fed these very values
    timestep_indices: tuple[int, ...]  # [K] recorded steps, consecutive
    old_log_probs: Tensor | None  # [B, K] of the policy that made the samples; None after a deterministic rollout
    kernel: Kernel
    policy_version: int = 0
    old_means: Tensor | None = None  # [B, K, ...] of the recorded steps' next latents; None if nobody needs them

    def __post_init__(self) -> None:
        num_samples, num_recorded = len(self.prompts), len(self.timestep_indices)
        first = self.timestep_indices[0] if self.timestep_indices else 0
        consecutive = tuple(range(first, first + num_recorded))
        assert self.timestep_indices == consecutive, "recorded timestep_indices must be consecutive"
        assert self.final_latents.shape[:1] == (num_samples,), "final_latents must be [B, ...]"
        assert (self.latents is None) == (num_recorded == 0), "latents are those of the recorded steps"
        if self.latents is not None:
            assert self.latents.shape[:2] == (num_samples, num_recorded + 1), "latents must be [B, K+1, ...]"
            assert self.latents.dtype == torch.float32, "latents must be stored in float32"
            assert self.final_latents.shape[1:] == self.latents.shape[2:], "final_latents must be [B, ...]"
        for name in ("old_log_probs", "old_means"):
            value = getattr(self, name)
            assert value is None or value.shape[:2] == (num_samples, num_recorded), f"{name} must be [B, K, ...]"

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: slice | Sequence[int]) -> Trajectory:
        """Take some of the samples."""
        index = rows if isinstance(rows, slice) else torch.tensor(rows, device=self.final_latents.device)
        return replace(
            self,
            prompts=self.prompts.select(rows),
            condition=self.condition.select(index),
            **{name: value[index] for name, value in self._tensors()},  # type: ignore[arg-type]
        )

    def blank_but(self, is_kept: Tensor) -> Trajectory:
        """Set all numbers of samples that are not kept, [B] bool, to 0."""
        mask = is_kept.to(self.final_latents.device)
        blanked = {name: torch.where(_beside(mask, value), value, 0) for name, value in self._tensors()}
        return replace(self, **blanked)  # type: ignore[arg-type]

    def to(self, device: torch.device | str, *, copy: bool = False) -> Trajectory:
        """Move all tensors to `device`; `copy` makes new ones even if they are there."""
        return replace(
            self,
            condition=self.condition.to(device, copy=copy),
            sigmas=self.sigmas.to(device, copy=copy),
            **{name: value.to(device, copy=copy) for name, value in self._tensors()},  # type: ignore[arg-type]
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
            names = [[name for name, _ in entry._tensors()] for entry in (first, part)]
            assert names[0] == names[1], f"parts hold different tensors, {names[0]} and {names[1]}"
        return replace(
            first,
            prompts=PromptBatch.cat([part.prompts for part in parts]),
            condition=type(first.condition).cat([part.condition for part in parts]),
            **{name: torch.cat([getattr(part, name) for part in parts]) for name, _ in first._tensors()},  # type: ignore[arg-type]
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors that have rows."""
        for name in ("latents", "final_latents", "old_log_probs", "old_means"):
            value = getattr(self, name)
            if value is not None:
                yield name, value


@dataclass(frozen=True)
class TimestepBatch:
    """N rows to train, one row a sample at one timestep, timestep-major (all samples of one timestep first)."""

    prompts: PromptBatch  # N rows
    latents: Tensor | None  # [N, ...] at `sigma`; None if the rollout recorded no steps
    next_latents: Tensor | None  # [N, ...] at `next_sigma`
    final_latents: Tensor  # [N, ...] at sigma 0
    sigma: Tensor  # [N] the value fed to the policy, float32
    next_sigma: Tensor  # [N]
    sigma_max: Tensor  # [N] second value of the schedule, which bounds the pole of the kernels at sigma 1
    timestep_index: Tensor  # [N]
    old_log_probs: Tensor | None  # [N]
    advantages: Tensor  # [N], or [N, R] if each of R rewards has its own
    group_index: Tensor  # [N] equal where rows belong to one group at one timestep, in all parts of a micro-batch
    condition: Condition  # N rows
    kernel: Kernel
    policy_version: int
    old_means: Tensor | None = None  # [N, ...]
    is_kept: Tensor | None = None  # [N] bool: whether the row counts; None if all do

    def __len__(self) -> int:
        return len(self.final_latents)


@dataclass(frozen=True)
class ScoredBatch:
    """Samples of whole groups with their rewards and advantages, or a part of them: what a trainer is given."""

    trajectory: Trajectory  # B samples
    rewards: Tensor  # [B], or [B, R] of R rewards
    advantages: Tensor  # [B], or [B, R] if each reward has its own
    group_index: Tensor  # [B] number of the sample's group
    num_groups: int
    """Of the whole groups; a part may hold samples of fewer."""
    is_kept: Tensor | None = None  # [B] bool: whether a reward was had for all of the sample's group; None if for all

    @classmethod
    def of_groups(
        cls, trajectory: Trajectory, rewards: Tensor, advantages: Tensor, is_kept: Tensor | None = None
    ) -> ScoredBatch:
        """Number the groups of samples [B] that are whole groups.

        Rows of groups that are not kept go along, so that batches, ranks and what couples their rows stay as they were.
        Their losses do not count, and whatever made their reward fail is blanked out: 0 times NaN is NaN.
        """
        groups, index = torch.unique(torch.tensor(trajectory.prompts.group_ids), return_inverse=True)
        if is_kept is None or is_kept.all():
            return cls(trajectory, rewards, advantages, index, len(groups))
        kept_rewards = torch.where(_beside(is_kept, rewards), rewards, 0.0)
        return cls(trajectory.blank_but(is_kept), kept_rewards, advantages, index, len(groups), is_kept)

    def select(self, rows: slice | Sequence[int]) -> ScoredBatch:
        """Take some of the samples; groups keep their numbers."""
        index = rows if isinstance(rows, slice) else torch.tensor(rows)
        return replace(
            self,
            trajectory=self.trajectory.select(rows),
            rewards=self.rewards[index],
            advantages=self.advantages[index],
            group_index=self.group_index[index],
            is_kept=None if self.is_kept is None else self.is_kept[index],
        )

    def to(self, device: torch.device | str) -> ScoredBatch:
        """Move the trajectory to `device`; rows of `timestep_batch` are made there."""
        return replace(self, trajectory=self.trajectory.to(device))

    def timestep_batch(self, timesteps: Tensor, *, first_column: int = 0) -> TimestepBatch:
        """Lay out the rows of the given timesteps.

        Args:
            timesteps: [B, j] indices into the schedule, a column a pass over the samples; each must be recorded,
                unless nothing is.
            first_column: place of the first column among all that are trained.

        Raises:
            ValueError: a timestep that the rollout did not record.
        """
        trajectory = self.trajectory
        self._check_recorded(timesteps)
        device = trajectory.final_latents.device
        num_samples, num_columns = timesteps.shape
        # Timestep-major: row r is sample r % B at its (r // B)-th timestep.
        sample = torch.arange(num_samples, device=device).repeat(num_columns)
        column = torch.arange(num_columns, device=device).repeat_interleave(num_samples)
        index = timesteps.t().reshape(-1).to(device)
        recorded = index - trajectory.timestep_indices[0] if trajectory.timestep_indices else index

        def recorded_rows(values: Tensor | None, shift: int = 0) -> Tensor | None:
            return None if values is None else values[sample, recorded + shift]

        return TimestepBatch(
            prompts=trajectory.prompts.repeat(num_columns),
            latents=recorded_rows(trajectory.latents),
            next_latents=recorded_rows(trajectory.latents, 1),
            final_latents=trajectory.final_latents[sample],
            sigma=trajectory.sigmas[index],
            next_sigma=trajectory.sigmas[index + 1],
            sigma_max=trajectory.sigmas[1].expand(len(index)),
            timestep_index=index,
            old_log_probs=recorded_rows(trajectory.old_log_probs),
            advantages=self.advantages.to(device)[sample],
            group_index=(first_column + column) * self.num_groups + self.group_index.to(device)[sample],
            condition=trajectory.condition.select(sample),
            kernel=trajectory.kernel,
            policy_version=trajectory.policy_version,
            old_means=recorded_rows(trajectory.old_means),
            is_kept=None if self.is_kept is None else self.is_kept.to(device)[sample],
        )

    def _check_recorded(self, timesteps: Tensor) -> None:
        recorded = self.trajectory.timestep_indices or range(len(self.trajectory.sigmas) - 1)
        if len(timesteps) and (timesteps.min() < recorded[0] or timesteps.max() > recorded[-1]):
            raise ValueError(
                f"timesteps {timesteps.min()} to {timesteps.max()} are to be trained, but the rollout recorded "
                f"{recorded[0]} to {recorded[-1]}; `select_timesteps` and `rollout` must agree."
            )


def _beside(rows: Tensor, values: Tensor) -> Tensor:
    """Give values of rows, [B], further axes of size 1, as many as `values`, [B, ...], has."""
    return rows.reshape(-1, *[1] * (values.ndim - 1))


@dataclass(frozen=True)
class RowLosses:
    """Losses of N rows in two parts, for algorithms whose loss has a part that no advantage scales.

    Dividing advantages by the std of the whole step, which is known at its end, scales the gradient of `policy` only.
    """

    policy: Tensor  # [N] proportional to the advantages, if the algorithm says so
    regularizer: Tensor  # [N] such as a KL divergence, with its weight
