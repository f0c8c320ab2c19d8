"""The part of a worker that shows whether generators and trainers compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from digenrl.engines import ObjectRef
from digenrl.metrics import MetricAccumulator
from digenrl.strategies.parity import (
    ParityMeasure,
    ParitySample,
    Tolerances,
    largest,
    ratio_deviation,
    velocity_deviation,
)
from digenrl.strategies.workers.weights import Weights
from digenrl.types import PromptBatch, ScoredBatch, Trajectory


class Parity(Weights):
    """What both do at the start of a fit, before any work; the run goes on as if it had not been done."""

    _parity_sample: ObjectRef | None = None

    def make_parity_sample(self, prompts: PromptBatch, *, follows: bool = False) -> ObjectRef | None:
        """Make samples as `generate` does, and the velocity they begin with, and keep them for the trainers.

        Where weights are sharded all ranks go together; one that `follows` keeps nothing.
        """
        self.drop_parity_sample()
        with self._unnoticed(), self._without_gradient(), self._autocast():
            trajectory = self._module.rollout(prompts)
            noise = self._module.initial_latents(prompts).to(self._device)
            sample = ParitySample(
                replace(trajectory, policy_version=self.policy_version),
                noise,
                self._initial_velocity(trajectory, noise),
            )
        if follows:
            return None
        self._parity_sample = self._store.put(sample.to("cpu", copy=True))
        return self._parity_sample

    def drop_parity_sample(self) -> None:
        """Let go of what `make_parity_sample` has kept."""
        if self._parity_sample is not None:
            self._store.free([self._parity_sample])
            self._parity_sample = None

    def changed_weights(self, digests: bytes) -> str | None:
        """Name what a generator holds otherwise than it was published, by the digests of that; None if nothing."""
        assert self._end is not None, "`changed_weights` comes after `open_weights`"
        return self._end.weights.find_changed(digests)

    def check_parity(self, samples: Sequence[ObjectRef]) -> ParityMeasure:
        """Recompute, as a trainer, what the ranks of a generator have made, in the batches in which they made it."""
        parts: list[ParitySample] = [self._store.get(ref) for ref in samples]
        tolerances = Tolerances.of(self._device.type, in_half=self._computes_in_half())
        for part in parts:
            fault = part.find_fault(
                version=self.policy_version,
                num_steps=self._module.num_steps,
                recorded=self._module.recorded_steps(part.trajectory.prompts.step),
                latent_shape=tuple(self._module.policy.latent_shape),
            )
            if fault is not None:
                return ParityMeasure(tolerances, fault)
        ratios, velocities = [], []
        # Not in inference mode: what the module keeps of this, such as embeddings, it also trains with.
        with self._unnoticed(), torch.inference_mode(False), torch.no_grad(), self._autocast():
            for sample in (part.to(self._device) for part in parts):
                velocity = self._initial_velocity(sample.trajectory, sample.noise)
                velocities.append(velocity_deviation(velocity, sample.velocity))
                ratios += [ratio_deviation(*pair) for pair in self._log_probs(sample.trajectory)]
        return ParityMeasure(tolerances, ratio=largest(ratios), velocity=largest(velocities))

    def _initial_velocity(self, trajectory: Trajectory, noise: Tensor) -> Tensor:
        guided = self._module.guided(self._module.rollout_policy)
        return guided(noise, trajectory.sigmas[0].expand(len(noise)), trajectory.condition).float()

    def _log_probs(self, trajectory: Trajectory) -> Iterator[tuple[Tensor, Tensor]]:
        """Score the recorded steps under the weights that made them, one after another as the rollout did."""
        if trajectory.old_log_probs is None or trajectory.kernel.is_deterministic:
            return
        nothing = torch.zeros(len(trajectory))
        scored = ScoredBatch.of_groups(trajectory, nothing, nothing)
        for index in trajectory.timestep_indices:
            batch = scored.timestep_batch(torch.full((len(trajectory), 1), index))
            step = self._module.score_step(batch, self._module.rollout_policy)
            assert step.log_prob is not None, "the kernel is not deterministic"
            assert batch.old_log_probs is not None, "those of the trajectory"
            yield step.log_prob, batch.old_log_probs

    def _computes_in_half(self) -> bool:
        """Whether autocast or the policy's own weights round to half precision."""
        return self._settings.precision != "32-true" or any(
            parameter.is_floating_point() and parameter.itemsize < 4 for parameter in self._module.policy.parameters()
        )

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Leave no metric behind, and the global random state as it is."""
        kept, self._module._metrics = self._module._metrics, MetricAccumulator()
        devices = [torch.cuda.current_device()] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self._module._metrics = kept
