"""The part of a worker that makes, scores and evaluates samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from digenrl.engines import ObjectRef
from digenrl.metrics import MetricAccumulator
from digenrl.strategies.optimizers import TrainingState
from digenrl.strategies.span import Span
from digenrl.strategies.workers.base import WorkerBase
from digenrl.strategies.workers.reports import AssistReport, GenerateReport, LogCall, ScoreReport
from digenrl.types import Prompt, PromptBatch, Trajectory


class Generating(WorkerBase):
    """Generators and trainers both have it: an assisting trainer generates, too."""

    def generate_and_score(self, prompts: PromptBatch, *, follows: bool = False) -> GenerateReport:
        """Make a trajectory and score it, in one task; see `generate`."""
        report = self.generate(prompts, follows=follows)
        return report if follows else replace(report, score=self.score(report.trajectories))

    def generate(self, prompts: PromptBatch, *, follows: bool = False) -> GenerateReport:
        """Make a trajectory with the weights this worker has now, and keep it for the others.

        Where weights are sharded, all ranks go through a rollout together; one that has no samples to make `follows`
        the others with `prompts` of theirs, and keeps nothing.
        """
        start_s = time.monotonic()
        with self._without_gradient(), self._autocast():
            trajectory = self._module.rollout(prompts)
        if follows:
            self._module.take_metrics()
            return GenerateReport((), {}, Span(start_s, time.monotonic()))
        # Copies are ordinary tensors, which a trainer of this process may put into its graph.
        trajectory = replace(trajectory, policy_version=self.policy_version).to("cpu", copy=True)
        ref = self._store.put(trajectory)
        return GenerateReport((ref,), self._module.take_metrics(), Span(start_s, time.monotonic()))

    def score(self, trajectories: Sequence[ObjectRef]) -> ScoreReport:
        """Decode samples, which may be several trajectories, and ask the reward."""
        start_s = time.monotonic()
        with self._without_gradient(), self._autocast():
            samples = Trajectory.cat([self._store.get(ref) for ref in trajectories])
            rewards = self._module.score(samples.to(self._device))
            self._module.kept_rows(rewards, torch.tensor(samples.prompts.group_ids))  # refuses what is not finite
        return ScoreReport(tuple(rewards.tolist()), self._module.take_metrics(), Span(start_s, time.monotonic()))

    def free(self, trajectories: Sequence[ObjectRef]) -> None:
        """Let go of trajectories made here."""
        self._store.free(trajectories)

    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make deterministic samples, for people to look at."""
        with torch.no_grad(), self._autocast():
            return self._module.sample(prompts).float().cpu()

    def evaluation_step(self, hook: str, batch: Sequence[Prompt | str], *args: Any) -> list[LogCall]:
        """Run `validation_step` or `test_step` on some samples and hand over what it logged."""
        with self._collect_logs() as calls:
            getattr(self._module, hook)(batch, *args)
        return calls

    def validation_samples(self, batch: Sequence[Prompt | str], batch_idx: int) -> ObjectRef:
        """Make the samples of a validation batch and keep them for the worker that scores them."""
        with torch.no_grad(), self._autocast():
            prompts = self._module.validation_prompts(batch, batch_idx)
            return self._store.put((self._module.sample(prompts).cpu(), prompts))

    def score_validation(self, samples: ObjectRef) -> list[LogCall]:
        """Score a validation batch that another worker has made, and hand over what is logged of it."""
        media, prompts = self._store.get(samples)
        with self._collect_logs() as calls:
            self._module.score_validation(media.to(self._device), prompts)
        return calls

    @contextmanager
    def _collect_logs(self) -> Iterator[list[LogCall]]:
        calls: list[LogCall] = []
        self._log_calls = calls
        try:
            with torch.no_grad(), self._autocast():
                yield calls
        finally:
            self._log_calls = None

    # ---- assisting -----------------------------------------------------------------------------------------

    def assist(
        self, slices: Sequence[PromptBatch], *, scores: bool, follows: Sequence[PromptBatch] = ()
    ) -> AssistReport:
        """Make slices of the step that is being trained, between two of its updates, and score them if told to.

        Args:
            slices: this rank's.
            scores: whether it asks the reward.
            follows: what other ranks make beyond that, where weights are sharded; see `generate`.
        """
        start_s = time.monotonic()
        if self._settings.offloads_to_assist and self._offloaded is None:
            self._offloaded = TrainingState.take(self._optimizer, self._gradients.holders)
        switch_s = time.monotonic() - start_s
        reports = [self.generate(prompts) for prompts in slices]
        for prompts in follows:
            self.generate(prompts, follows=True)
        scored = [self.score(report.trajectories) for report in reports] if scores else []
        metrics = MetricAccumulator()
        for part in [*(report.metrics for report in reports), *(report.metrics for report in scored)]:
            metrics.join(part)
        return AssistReport(
            tuple(ref for report in reports for ref in report.trajectories),
            tuple(report.rewards for report in scored),
            metrics.take(),
            switch_s,
            Span(start_s, time.monotonic()),
        )
