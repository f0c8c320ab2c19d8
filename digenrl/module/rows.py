"""What a loss asks about its rows: the steps' log-probs, noise, and what a group has in common."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.diffusion.kernels import KernelStep
from digenrl.diffusion.noise import sample_noise
from digenrl.functional import sum_per_group
from digenrl.metrics import MetricAccumulator, MetricValue, Reduction
from digenrl.module.rollouts import Rollouts
from digenrl.policies import VelocityField
from digenrl.types import RowLosses, TimestepBatch, derive_seed

OUT_OF_MEMORY = 1 << 40
"""What no rank's number in `largest_of_ranks` reaches but that of one which ran out of memory."""


class RankOutOfMemory(RuntimeError):
    """A rank ran out of memory while the others computed on; `args[0]` is the number that it said."""


def largest_of_ranks(value: int | Tensor, group: dist.ProcessGroup, device: torch.device) -> int:
    """Give the largest of the ranks' numbers.

    Ranks that train a micro-batch together meet in this one form only, before anything else that they exchange. So one
    that runs out of memory, wherever it is, can tell the others, wherever they are.

    Raises:
        RankOutOfMemory: one has.
    """
    largest = torch.as_tensor(value, dtype=torch.int64, device=device).reshape(())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    if largest >= OUT_OF_MEMORY:
        raise RankOutOfMemory(int(largest))
    return int(largest)


class RowHelpers(Rollouts):
    """The part of `DiffusionRLModule` that `timestep_loss` uses."""

    seed: int

    def __init__(self) -> None:
        super().__init__()
        self._metrics = MetricAccumulator()
        self._row_group: dist.ProcessGroup | None = None  # of the ranks among which a micro-batch's rows are split
        self._kept_rows: Tensor | None = None  # [N] bool: which rows of the batch at hand count; None is all

    def training_noise(self, batch: TimestepBatch, *, shared: Literal["group", "sample"]) -> Tensor:
        """Draw noise for the forward process, [N, ...] float32: fresh for each step, timestep and sample, or group.

        It depends on the seeds and the place in the schedule, so batching, ranks and restarts do not change it.
        """
        prompts = batch.prompts
        if shared == "group":
            seeds = [derive_seed(self.seed, "group", prompts.step, group) for group in prompts.group_ids]
        else:
            seeds = list(prompts.seeds)
        shape = batch.final_latents.shape[1:]
        drawn: dict[tuple[int, int], Tensor] = {}
        for key in zip(seeds, batch.timestep_index.tolist(), strict=True):
            if key not in drawn:
                drawn[key] = sample_noise([key[0]], f"training noise {key[1]}", shape)[0]
        keys = zip(seeds, batch.timestep_index.tolist(), strict=True)
        return torch.stack([drawn[key] for key in keys]).to(batch.final_latents.device)

    def group_mean(self, values: Tensor, group_index: Tensor) -> Tensor:
        """Give each row [N] the mean over its whole group at its timestep, wherever the group's rows are.

        Without gradient, and to be called by all ranks alike: sums include the rows of the other ranks.
        """
        return self.group_sum(values, group_index) / self.group_sum(torch.ones_like(values), group_index)

    def group_sum(self, values: Tensor, group_index: Tensor) -> Tensor:
        """Give each row [N] the sum over its whole group; see `group_mean`."""
        values = values.detach()
        if self._row_group is None:
            return sum_per_group(values, group_index)
        own = int(group_index.max()) + 1 if len(group_index) else 0
        num_groups = largest_of_ranks(own, self._row_group, values.device)
        sums = values.new_zeros(num_groups).index_add(0, group_index, values)
        dist.all_reduce(sums, group=self._row_group)
        return sums[group_index]

    def score_step(self, batch: TimestepBatch, policy: VelocityField | None = None) -> KernelStep:
        """Score the recorded steps under the current weights, with gradient, or under another policy's."""
        assert batch.latents is not None, "the rollout must record the steps that are trained"
        scale = None if self.train_guidance else 1.0
        velocity = self.guided(policy or self.policy, scale=scale)(batch.latents, batch.sigma, batch.condition)
        return batch.kernel.step(
            batch.latents,
            velocity,
            batch.sigma,
            batch.next_sigma,
            sigma_max=batch.sigma_max,
            next_latents=batch.next_latents,
        )

    def log_probs(self, batch: TimestepBatch) -> Tensor:
        """Give the recorded steps' log-probs under the current weights, [N], with gradient."""
        log_prob = self.score_step(batch).log_prob
        assert log_prob is not None, "a deterministic kernel has no log-probs; the constructor must refuse it"
        return log_prob

    def track(self, name: str, rows: Tensor, *, reduction: Reduction = "mean") -> None:
        """Report a metric's values [N] from inside `timestep_loss`; it is logged once per step over all rows.

        Rows of groups that are left out do not count.
        """
        if self._kept_rows is not None and len(rows) == len(self._kept_rows):
            rows = rows[self._kept_rows]
        if len(rows):
            self._metrics.add_rows(name, rows, reduction)

    def checked_losses(self, batch: TimestepBatch) -> tuple[Tensor, ...]:
        """Ask `timestep_loss` for its parts, each [N], with 0 for rows that do not count.

        Raises:
            ValueError: a part is of another shape.
        """
        self._kept_rows = batch.is_kept
        try:
            losses = self.timestep_loss(batch)
        finally:
            self._kept_rows = None
        parts = (losses,) if isinstance(losses, Tensor) else (losses.policy, losses.regularizer)
        for part in parts:
            if part.shape != (len(batch),):
                raise ValueError(
                    f"`timestep_loss` must return one loss per row, shape [{len(batch)}], got {list(part.shape)}."
                )
        return parts if batch.is_kept is None else tuple(torch.where(batch.is_kept, part, 0.0) for part in parts)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor | RowLosses:
        """Give one loss per row, [N]; the algorithm's."""
        raise NotImplementedError

    def take_metrics(self) -> dict[str, MetricValue]:
        """Hand over what `track` has collected since the last call."""
        return self._metrics.take()
