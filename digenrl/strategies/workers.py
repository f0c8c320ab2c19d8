"""What runs in a worker: a copy of the module, and the tasks that the driver calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from digenrl.engines import ObjectRef, ObjectStore
from digenrl.metrics import MetricAccumulator, MetricValue, Reduction
from digenrl.module import DiffusionRLModule, NonFiniteGradientError
from digenrl.strategies.optimizers import OptimizerSpec, TrainingState, load_named_state, named_state
from digenrl.strategies.skeleton import ModuleOutline, describe
from digenrl.strategies.weight_planes import ArenaLayout, WeightArena, WeightSyncError, WrittenWeights, weights_digest
from digenrl.types import Prompt, PromptBatch, ScoredBatch, Trajectory

_MAX_POLICY_AGE = 1  # versions; the scheduler never lets a trajectory grow older

Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True)
class Span:
    """When a task ran, in seconds of the host's monotonic clock."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class BuildReport:
    """What a worker built."""

    outlines: tuple[ModuleOutline, ...]
    frozen_digest: str
    """Of everything that is not trained, and so never synchronized."""


@dataclass(frozen=True)
class GenerateReport:
    """A trajectory was made and is kept by its maker."""

    trajectory: ObjectRef
    metrics: Mapping[str, MetricValue]
    span: Span
    score: ScoreReport | None = None
    """If its maker has scored it, too."""


@dataclass(frozen=True)
class ScoreReport:
    """Rewards of a trajectory's samples."""

    rewards: tuple[Any, ...]  # [B] numbers, or tuples of R; NaN where a reward failed and groups are dropped
    metrics: Mapping[str, MetricValue]
    span: Span


@dataclass(frozen=True)
class AssistReport:
    """A trainer has made its share of a micro-batch, and scored it where no reward workers do."""

    trajectories: tuple[ObjectRef, ...]  # one per slice
    rewards: tuple[tuple[Any, ...], ...]
    """Of each slice's samples; empty where they are still to be scored."""
    metrics: Mapping[str, MetricValue]
    switch_s: float
    """Seconds spent on making room for generation."""
    span: Span


@dataclass(frozen=True)
class UpdateReport:
    """A micro-batch's gradient was accumulated."""

    loss_sum: float
    """Sum of the unreduced losses of this rank's rows, without the regularizer."""
    regularizer_sum: float
    """Sum of the rows' `RowLosses.regularizer`."""
    metrics: Mapping[str, MetricValue]
    switch_s: float
    """Seconds spent on bringing the training state back."""
    span: Span


@dataclass(frozen=True)
class StepReport:
    """The optimizer was stepped."""

    gradient_norm: float
    """Before clipping."""
    span: Span


@dataclass(frozen=True)
class LogCall:
    """One `self.log` of a worker, to be repeated in the driver."""

    name: str
    value: Any
    kwargs: Mapping[str, Any]


@contextmanager
def _with_gradient() -> Iterator[None]:
    """Allow gradients, also where this process validates meanwhile, as it does with the inline engine."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Worker:
    """One worker's tasks. Generators and trainers run the same class: an assisting trainer generates, too."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._module: DiffusionRLModule
        self._device = torch.device("cpu")
        self._precision: Precision = "32-true"
        self._optimizer: torch.optim.Optimizer
        self._arena: WeightArena
        self._rank, self._num_ranks = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._log_calls: list[LogCall] | None = None
        self._trains = False
        self._offloads_to_assist = False
        self._offloaded: TrainingState | None = None
        self._regularizer_gradients: dict[str, Tensor] = {}
        self.policy_version = 0

    # ---- set-up --------------------------------------------------------------------------------------------

    def build(
        self,
        module: bytes,
        device: str,
        precision: Precision,
        *,
        offloads_to_assist: bool = False,
        sets_up_reward: bool = False,
    ) -> BuildReport:
        """Unpickle the module and build its policy on `device`; whoever is to score gets its reward ready, too."""
        self._device, self._precision = torch.device(device), precision
        self._offloads_to_assist = offloads_to_assist
        self._module = built = cloudpickle.loads(module)
        built.configure_model()
        built.to(self._device)
        # A worker has no trainer, and Lightning's `log` would drop the value.
        built.log, built.log_dict = self._log, self._log_dict
        built._is_reward_set_up = False  # whatever the module did before it was sent here
        if sets_up_reward:
            built.set_up_reward()
        published = built.published_weights()
        frozen = {name: tensor for name, tensor in built.state_dict().items() if name not in published}
        return BuildReport(describe(built), weights_digest(frozen.items()))

    def join_group(self, address: str, port: int, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Meet the other ranks of the trainer group."""
        self._rank, self._num_ranks = rank, num_ranks
        if num_ranks == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address, port, num_ranks, is_master=False, timeout=timeout)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        self._group = self._module._row_group = dist.group.WORLD

    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        """Make the optimizer that the driver described."""
        self._optimizer = spec.bind(self._module)
        self._trains = True

    # ---- generating ----------------------------------------------------------------------------------------

    def generate_and_score(self, prompts: PromptBatch) -> GenerateReport:
        """Make a trajectory and score it, in one task."""
        report = self.generate(prompts)
        return replace(report, score=self.score(report.trajectory))

    def generate(self, prompts: PromptBatch) -> GenerateReport:
        """Make a trajectory with the weights this worker has now, and keep it for the others."""
        start_s = time.monotonic()
        with self._without_gradient(), self._autocast():
            trajectory = self._module.rollout(prompts)
        # Copies are ordinary tensors, which a trainer of this process may put into its graph.
        trajectory = replace(trajectory, policy_version=self.policy_version).to("cpu", copy=True)
        ref = self._store.put(trajectory)
        return GenerateReport(ref, self._module.take_metrics(), Span(start_s, time.monotonic()))

    def score(self, trajectory: ObjectRef) -> ScoreReport:
        """Decode a trajectory's samples and ask the reward."""
        start_s = time.monotonic()
        with self._without_gradient(), self._autocast():
            samples = self._store.get(trajectory)
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

    def assist(self, slices: Sequence[PromptBatch], *, scores: bool) -> AssistReport:
        """Make slices of the step that is being trained, between two of its updates, and score them if told to."""
        start_s = time.monotonic()
        if self._offloads_to_assist and self._offloaded is None:
            self._offloaded = TrainingState.take(self._optimizer)
        switch_s = time.monotonic() - start_s
        reports = [self.generate(prompts) for prompts in slices]
        scored = [self.score(report.trajectory) for report in reports] if scores else []
        metrics = MetricAccumulator()
        for part in [*(report.metrics for report in reports), *(report.metrics for report in scored)]:
            metrics.join(part)
        return AssistReport(
            tuple(report.trajectory for report in reports),
            tuple(report.rewards for report in scored),
            metrics.take(),
            switch_s,
            Span(start_s, time.monotonic()),
        )

    def _bring_back(self) -> float:
        """Undo the switch to generation, if there was one; returns its seconds."""
        if self._offloaded is None:
            return 0.0
        start_s = time.monotonic()
        self._offloaded.give_back(self._optimizer)
        self._offloaded = None
        return time.monotonic() - start_s

    # ---- training ------------------------------------------------------------------------------------------

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

    # ---- weights -------------------------------------------------------------------------------------------

    def weights_layout(self) -> ArenaLayout:
        """Say what a transfer of the trained weights consists of."""
        return ArenaLayout.of(self._module.published_weights())

    def open_arena(self, paths: Sequence[str]) -> None:
        """Map the shared memory that weights travel through."""
        self._arena = WeightArena(paths, self.weights_layout())

    def write_weights(self, slot: int) -> WrittenWeights:
        """Write the weights that generators need; one rank does, all have the same."""
        published, trained = self._module.published_weights(), self._trained_parameters()
        if self._rank == 0:
            self._arena.write(slot, published)
        digest = weights_digest(published.items())
        return WrittenWeights(digest, digest if len(published) == len(trained) else weights_digest(trained.items()))

    def sampler_steps(self) -> int:
        """Give how many optimizer steps the copy that makes the samples has followed; 0 if there is none."""
        return self._module.sampler_steps

    def load_weights(self, slot: int, version: int, digest: str) -> Span:
        """Load published weights and check that they are those that were sent."""
        start_s = time.monotonic()
        published = self._module.published_weights()
        self._arena.read(slot, published)
        loaded = weights_digest(published.items())
        if loaded != digest:
            raise WeightSyncError(f"weights of version {version} arrived as {loaded}, but were sent as {digest}.")
        self.policy_version = version
        return Span(start_s, time.monotonic())

    def state_dict(self) -> ObjectRef:
        """Keep a copy of the module's whole state for the driver to fetch."""
        return self._store.put({name: value.to("cpu", copy=True) for name, value in self._module.state_dict().items()})

    def load_state_dict(self, state_dict: ObjectRef, strict: bool) -> None:
        """Replace the module's state by one that the driver keeps."""
        self._module.load_state_dict(self._store.get(state_dict), strict=strict)

    def optimizer_state(self) -> ObjectRef:
        """Keep a copy of the optimizer's state, by parameter name, for the driver to fetch."""
        self._bring_back()
        return self._store.put(named_state(self._optimizer, self._module))

    def load_optimizer_state(self, state: ObjectRef) -> None:
        """Replace the optimizer's state by one that the driver keeps."""
        self._bring_back()
        load_named_state(self._optimizer, self._module, self._store.get(state))

    def resume(self, version: int, seed: int) -> None:
        """Continue a run at the policy version and with the seed that it had."""
        self.policy_version, self._module.seed = version, seed

    def _trained_parameters(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision == "bf16-mixed":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _without_gradient(self) -> AbstractContextManager[Any]:
        """Forbid gradients, for good where nothing is trained: inference tensors save a tenth of a small policy's time.

        A trainer must not have them: what its module keeps of a rollout, such as embeddings, it also trains with.
        """
        return torch.no_grad() if self._trains else torch.inference_mode()

    def _log(self, name: str, value: Any, **kwargs: Any) -> None:
        value = value.detach().cpu() if isinstance(value, Tensor) else value
        if self._log_calls is not None:
            self._log_calls.append(LogCall(name, value, kwargs))
        else:
            reduction: Reduction = "max" if kwargs.get("reduce_fx") in ("max", torch.max) else "mean"
            self._module.track(name, torch.as_tensor(value, dtype=torch.float64).reshape(1), reduction=reduction)

    def _log_dict(self, values: Mapping[str, Any], **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value, **kwargs)
