"""The part of a worker that computes gradients and steps the optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.engines import ObjectRef
from digenrl.module import NonFiniteGradientError
from digenrl.strategies.optimizers import OptimizerSpec
from digenrl.strategies.workers.base import WorkerBase
from digenrl.strategies.workers.reports import Span, StepReport, UpdateReport
from digenrl.types import ScoredBatch, Trajectory

_MAX_POLICY_AGE = 1  # versions; the scheduler never lets a trajectory grow older


@contextmanager
def _with_gradient() -> Iterator[None]:
    """Allow gradients, also where this process validates meanwhile, as it does with the inline engine."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Training(WorkerBase):
    """What trainers do."""

    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        """Make the optimizer that the driver described."""
        self._optimizer = spec.bind(self._module)

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
        timestep_batch_size: int | None,
        keeps_parts_apart: bool = False,
    ) -> UpdateReport:
        """Accumulate the gradient of this rank's share of a micro-batch.

        Args:
            trajectories: its slices, in the order of their samples.
            rewards: [B] or [B, R] of the micro-batch, as nested lists.
            advantages: [B] or [B, R] of the micro-batch.
            num_rows: rows that the optimizer step covers, over all micro-batches: the one divisor of all losses.
            timestep_batch_size: timesteps in one forward and backward; None takes all at once.
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
        num_columns = timestep_batch_size or timesteps.shape[1]
        loss_sum, regularizer_sum = 0.0, 0.0
        for first_column in range(0, timesteps.shape[1], num_columns):
            batch = scored.timestep_batch(
                timesteps[:, first_column : first_column + num_columns], first_column=first_column
            )
            with self._autocast():
                losses = self._module.checked_losses(batch)
            sums = self._backward(losses, num_rows=num_rows, keeps_parts_apart=keeps_parts_apart)
            loss_sum += sums[0]
            regularizer_sum += sum(sums[1:])
        return UpdateReport(
            loss_sum, regularizer_sum, self._module.take_metrics(), switch_s, Span(start_s, time.monotonic())
        )

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
                self._accumulate_regularizer(sums[1] / num_rows)
            (sums[0] / num_rows).backward()
        else:
            (torch.stack(sums).sum() / num_rows).backward()
        return [part.item() for part in sums]

    def _accumulate_regularizer(self, loss: Tensor) -> None:
        parameters = self._trained_parameters()
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                so_far = self._regularizer_gradients.get(name)
                self._regularizer_gradients[name] = gradient if so_far is None else so_far + gradient

    def discard_gradient(self) -> None:
        """Forget what `update` has accumulated."""
        self._bring_back()
        self._optimizer.zero_grad(set_to_none=True)
        self._regularizer_gradients.clear()

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
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._join_parts(gradient_scale, row_scale)
        self._all_reduce_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
        if not torch.isfinite(torch.tensor(norm)):
            names = [
                name
                for name, parameter in self._module.named_parameters()
                if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
            ]
            raise NonFiniteGradientError(
                f"the gradient of step {self.policy_version} is {norm} in {len(names)} parameters, first "
                f"`{names[0] if names else 'none'}`; the weights are unchanged."
            )
        if clip_value > 0 and clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, clip_value)
        elif clip_value > 0:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._module.update_weight_copies()
        self.policy_version += 1
        return StepReport(norm, Span(start_s, time.monotonic()))

    def skip_step(self) -> None:
        """Count a step in which no row was left to train: the weights stay as they are."""
        self.discard_gradient()
        self._module.update_weight_copies()
        self.policy_version += 1

    def _join_parts(self, gradient_scale: float, row_scale: float) -> None:
        """Scale the policy's gradient and add the regularizer's to it."""
        for name, parameter in self._trained_parameters().items():
            if parameter.grad is not None and gradient_scale != 1.0:
                parameter.grad.mul_(gradient_scale)
            extra = self._regularizer_gradients.pop(name, None)
            if extra is not None:
                parameter.grad = extra if parameter.grad is None else parameter.grad + extra
            if parameter.grad is not None and row_scale != 1.0:
                parameter.grad.mul_(row_scale)

    def _all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum over ranks in one message per dtype; a gradient that no rank has stays absent."""
        if self._group is None:
            return
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        present = present.to(self._device)
        dist.all_reduce(present, group=self._group)
        shared = [parameter for parameter, count in zip(parameters, present.tolist(), strict=True) if count > 0]
        for dtype in sorted({parameter.dtype for parameter in shared}, key=str):
            members = [parameter for parameter in shared if parameter.dtype == dtype]
            for parameter in members:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in members if parameter.grad is not None])
            dist.all_reduce(flat, group=self._group)
            for parameter, total in zip(members, flat.split([p.numel() for p in members]), strict=True):
                parameter.grad = total.view_as(parameter)
