"""The part of a worker that computes gradients and steps the optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.engines import ObjectRef
from digenrl.module import NonFiniteGradientError
from digenrl.strategies.gradients import Gradients
from digenrl.strategies.optimizer_offload import step_in_pieces
from digenrl.strategies.optimizers import OptimizerSpec, update_settings
from digenrl.strategies.span import Span
from digenrl.strategies.workers.reports import StepReport, UpdateReport
from digenrl.strategies.workers.settings import TimestepBatchSize
from digenrl.strategies.workers.timestep_batch_size import TimestepBatches
from digenrl.types import ScoredBatch, Trajectory

_MAX_POLICY_AGE = 1  # versions; the scheduler never lets a trajectory grow older


@contextmanager
def _with_gradient() -> Iterator[None]:
    """Allow gradients, also where this process validates meanwhile, as it does with the inline engine."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Training(TimestepBatches):
    """What trainers do."""

    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        """Make the optimizer that the driver described."""
        self._optimizer = spec.bind(self._module)
        self._gradients = Gradients(
            self._module,
            [parameter for group in self._optimizer.param_groups for parameter in group["params"]],
            rank=self._rank,
            group=self._group,
            grad_sync=self._settings.grad_sync,
        )

    def _bring_back(self) -> float:
        """Undo the switch to generation, if there was one; returns its seconds."""
        if self._offloaded is None:
            return 0.0
        start_s = time.monotonic()
        self._offloaded.give_back(self._optimizer)
        self._offloaded = None
        return time.monotonic() - start_s

    @_with_gradient()
    def update(
        self,
        trajectories: Sequence[ObjectRef],
        rewards: Sequence[Any],
        advantages: Sequence[Any],
        *,
        num_rows: int,
        timestep_batch_size: TimestepBatchSize,
        keeps_parts_apart: bool = False,
    ) -> UpdateReport:
        """Accumulate the gradient of this rank's share of a micro-batch.

        Args:
            trajectories: its slices, in the order of their samples.
            rewards: [B] or [B, R] of the micro-batch, as nested lists.
            advantages: [B] or [B, R] of the micro-batch.
            num_rows: rows that the optimizer step covers, over all micro-batches: the one divisor of all losses.
            timestep_batch_size: timesteps in one forward and backward; None takes all at once, `"auto"` what fits.
            keeps_parts_apart: accumulate the gradient of `RowLosses.regularizer` beside the policy's, which
                `optimizer_step` will scale.
        """
        start_s = time.monotonic()
        switch_s = self._bring_back()
        parts = [self._store.get(ref) for ref in trajectories]
        for part in parts:
            age = self.policy_version - part.policy_version
            assert 0 <= age <= _MAX_POLICY_AGE, (
                f"a trajectory of policy version {part.policy_version} reached a trainer at {self.policy_version}"
            )
        trajectory = Trajectory.cat([replace(part, policy_version=self.policy_version) for part in parts])
        all_rewards = torch.tensor(rewards)
        is_kept = self._module.kept_rows(all_rewards, torch.tensor(trajectory.prompts.group_ids))
        whole = ScoredBatch.of_groups(trajectory, all_rewards, torch.tensor(advantages), is_kept)
        scored = self._share(self._module.trained_samples(whole)).to(self._device)
        timesteps = self._module.select_timesteps(scored.trajectory.prompts)

        def forward(start: int, stop: int) -> tuple[Tensor, ...]:
            batch = scored.timestep_batch(timesteps[:, start:stop], first_column=start)
            with self._autocast():
                return self._module.checked_losses(batch)

        def backward(losses: Sequence[Tensor]) -> list[float]:
            return self._backward(losses, num_rows=num_rows, keeps_parts_apart=keeps_parts_apart)

        sums = self._train_timesteps(timesteps.shape[1], timestep_batch_size, forward, backward)
        metrics, span = self._module.take_metrics(), Span(start_s, time.monotonic())
        if sums is None:
            return UpdateReport(0.0, 0.0, {}, switch_s, span, out_of_memory=True)
        return UpdateReport(sums[0], sum(sums[1:]), metrics, switch_s, span)

    def _share(self, scored: ScoredBatch) -> ScoredBatch:
        """Give this rank's rows."""
        num_samples = len(scored.trajectory)
        return scored.select(
            slice(self._rank * num_samples // self._num_ranks, (self._rank + 1) * num_samples // self._num_ranks)
        )

    def _backward(self, parts: Sequence[Tensor], *, num_rows: int, keeps_parts_apart: bool) -> list[float]:
        """Accumulate the gradient of a chunk's losses, each part [N]; returns the sum of each part."""
        sums = [part.sum() for part in parts]
        if keeps_parts_apart and len(sums) == 2:
            if sums[1].requires_grad:
                self._gradients.add_regularizer(sums[1] / num_rows)
            (sums[0] / num_rows).backward()
        else:
            (torch.stack(sums).sum() / num_rows).backward()
        return [part.item() for part in sums]

    def discard_gradient(self) -> None:
        """Forget what `update` has accumulated."""
        self._bring_back()
        self._gradients.clear()

    def optimizer_step(
        self,
        settings: Sequence[Mapping[str, Any]],
        clip_value: float,
        clip_algorithm: Literal["norm", "value"],
        gradient_scale: float = 1.0,
        row_scale: float = 1.0,
    ) -> StepReport:
        """Join the ranks' gradients, clip, step and clear them.

        Args:
            settings: hyper-parameters of the optimizer's parameter groups.
            clip_value: of gradient clipping; 0 is none.
            clip_algorithm: what is clipped.
            gradient_scale: of the policy's gradient, before the regularizer's is added.
            row_scale: of both, where rows that the divisor of the losses counts were left out.

        Raises:
            NonFiniteGradientError: before anything was changed.
        """
        start_s = time.monotonic()
        self._bring_back()
        self._gradients.join_parts(gradient_scale, row_scale)
        self._gradients.sum_over_ranks()
        norm = self._gradients.norm()
        if not norm.isfinite():
            names = self._gradients.not_finite()
            raise NonFiniteGradientError(
                f"the gradient of step {self.policy_version} is {norm.item()} in {len(names)} parameters, first "
                f"`{names[0] if names else 'none'}`; the weights are unchanged."
            )
        if clip_value > 0:
            self._gradients.clip(clip_value, clip_algorithm, norm)
        update_settings(self._optimizer, settings)
        if self._settings.offloads_optimizer:
            step_in_pieces(self._optimizer)
        else:
            self._optimizer.step()
        self._gradients.clear()
        self._module.update_weight_copies()
        self.policy_version += 1
        return StepReport(norm.item(), Span(start_s, time.monotonic()))

    def skip_step(self) -> None:
        """Count a step in which no row was left to train: the weights stay as they are."""
        self.discard_gradient()
        self._module.update_weight_copies()
        self.policy_version += 1
