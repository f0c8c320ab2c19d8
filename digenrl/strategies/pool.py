"""The workers of a run: starting them, and talking to a group of them as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from digenrl.engines import Engine, ObjectRef, Task
from digenrl.strategies.optimizers import OptimizerSpec
from digenrl.strategies.skeleton import ModuleOutline
from digenrl.strategies.weight_planes import SharedMemoryPlane, WeightPlane, WeightSyncError
from digenrl.strategies.workers import BuildReport, LogCall, Precision, StepReport, Worker
from digenrl.types import PromptBatch


class WorkerPool:
    """Generators, trainers and reward workers of one run.

    Lifecycle: `start_generators` (and `start_trainers`, for training), `build`, then, for training,
    `connect_trainers`, `configure_optimizer` and any number of steps; `shutdown` ends the workers.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_generators: int,
        num_trainers: int,
        num_reward_workers: int,
        device: str,
        precision: Precision,
        offloads_to_assist: bool,
    ) -> None:
        self.engine = engine
        self.generators = tuple(f"generator-{index}" for index in range(num_generators))
        self.reward_workers = tuple(f"reward-worker-{index}" for index in range(num_reward_workers))
        self.trainers: tuple[str, ...] = ()
        self._num_trainers = num_trainers
        self._device = device
        self._precision: Precision = precision
        self._offloads_to_assist = offloads_to_assist
        self._plane: WeightPlane = SharedMemoryPlane(engine)
        self._built: set[str] = set()
        self._rendezvous: TCPStore | None = None

    # ---- set-up --------------------------------------------------------------------------------------------

    def start_generators(self) -> None:
        """Start the generators, and the reward workers that score for them."""
        for index, worker in enumerate((*self.generators, *self.reward_workers)):
            self.engine.start(worker, Worker, env=self._environment(index))

    def start_trainers(self) -> None:
        """Start the trainers."""
        self.trainers = tuple(f"trainer-{rank}" for rank in range(self._num_trainers))
        for index, worker in enumerate(self.trainers, len(self.generators) + len(self.reward_workers)):
            self.engine.start(worker, Worker, env=self._environment(index))

    def build(self, module: bytes) -> tuple[ModuleOutline, ...]:
        """Have the workers that are new build the pickled module; returns its outline.

        Raises:
            WeightSyncError: workers built different weights, trained ones aside, which are synchronized.
        """
        started = (*self.generators, *self.reward_workers, *self.trainers)
        new = [worker for worker in started if worker not in self._built]
        tasks = [
            self.engine.submit(
                worker,
                "build",
                module,
                self._device,
                self._precision,
                offloads_to_assist=self._offloads_to_assist,
                sets_up_reward=worker in (self.reward_workers or self.generators),
            )
            for worker in new
        ]
        reports: list[BuildReport] = self.engine.gather(tasks)
        for worker, report in zip(new, reports, strict=True):
            if report.frozen_digest != reports[0].frozen_digest:
                raise WeightSyncError(
                    f"workers {new[0]} and {worker} built different frozen weights: `policy.build` must give the "
                    "same ones in every process."
                )
        self._built.update(new)
        return reports[0].outlines

    def connect_trainers(self, version: int) -> None:
        """Let the trainers meet, and give their weights to the generators."""
        if self._num_trainers > 1:
            self._rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._rendezvous.port if self._rendezvous is not None else 0
        self.engine.gather(
            [
                self.engine.submit(
                    trainer,
                    "join_group",
                    "127.0.0.1",
                    port,
                    rank,
                    self._num_trainers,
                    self.engine.task_timeout_s,
                )
                for rank, trainer in enumerate(self.trainers)
            ]
        )
        self._plane.setup(self.trainers, self.generators)
        self.publish(version, must_change=False)
        self.engine.gather([self.load_weights(generator, version) for generator in self.generators])

    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        """Make the optimizer on all trainers."""
        self._call(self.trainers, "configure_optimizer", spec)

    def resume(self, version: int, seed: int) -> None:
        """Have all workers continue at `version`."""
        self._call([*self.generators, *self.trainers], "resume", version, seed)

    # ---- steps ---------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        settings: Sequence[Mapping[str, Any]],
        clip_value: float,
        clip_algorithm: Literal["norm", "value"],
        *scales: float,
    ) -> dict[str, Task]:
        """Have every trainer rank step its optimizer; each task's result is a `StepReport`."""
        return {
            trainer: self.engine.submit(trainer, "optimizer_step", settings, clip_value, clip_algorithm, *scales)
            for trainer in self.trainers
        }

    def skip_step(self) -> None:
        """Have every trainer count a step without stepping its optimizer."""
        self._call(self.trainers, "skip_step")

    def gather(self, tasks: Mapping[str, Task]) -> dict[str, StepReport]:
        """Wait for tasks of some workers."""
        return dict(zip(tasks, self.engine.gather(list(tasks.values())), strict=True))

    def publish(self, version: int, *, must_change: bool) -> None:
        """Have the trainers write their weights for the generators."""
        self._plane.publish(version, must_change=must_change)

    def sampler_steps(self) -> int:
        """Ask a trainer how many optimizer steps the copy that makes the samples has followed."""
        steps: int = self.engine.call(self.trainers[0], "sampler_steps")
        return steps

    def load_weights(self, generator: str, version: int) -> Task:
        """Queue a generator's load of the published weights; its result is the `Span` it took."""
        return self._plane.load(generator, version)

    # ---- evaluation ----------------------------------------------------------------------------------------

    def evaluate(
        self, hook: str, batch: Sequence[Any], *args: Any, units: Sequence[int] | None = None
    ) -> list[list[tuple[int, LogCall]]]:
        """Run an evaluation hook with the batch spread over the generators.

        Args:
            hook: name of the module's method.
            batch: prompts, or strings.
            *args: what the hook takes beside it.
            units: rows at which the batch may be cut, 0 and its length included; None is any.

        Returns:
            What the hook logged for each generator's share, each with the number of samples it speaks for.
        """
        shares = self._generators_shares(batch, units)
        tasks = [
            self.engine.submit(generator, "evaluation_step", hook, share, *args) for generator, share in shares.items()
        ]
        logged = self.engine.gather(tasks)
        return [[(len(share), call) for call in calls] for share, calls in zip(shares.values(), logged, strict=True)]

    def validate(
        self, batch: Sequence[Any], batch_idx: int, *, units: Sequence[int] | None = None
    ) -> list[list[tuple[int, LogCall]]]:
        """Make a validation batch on the generators and score it on the reward workers; see `evaluate`."""
        shares = self._generators_shares(batch, units)
        making = [
            self.engine.submit(generator, "validation_samples", share, batch_idx) for generator, share in shares.items()
        ]
        scorers = itertools.cycle(self.reward_workers)
        scoring = []
        for task in making:  # each is scored while the next are made
            samples: ObjectRef = self.engine.gather([task])[0]
            scoring.append((samples, self.engine.submit(next(scorers), "score_validation", samples)))
        logged = self.engine.gather([task for _, task in scoring])
        self.engine.gather([self.engine.submit(samples.worker, "free", [samples]) for samples, _ in scoring])
        return [[(len(share), call) for call in calls] for share, calls in zip(shares.values(), logged, strict=True)]

    def _generators_shares(self, batch: Sequence[Any], units: Sequence[int] | None) -> dict[str, Sequence[Any]]:
        borders = range(len(batch) + 1) if units is None else units
        return {
            generator: batch[borders[start] : borders[stop]]
            for generator, (start, stop) in zip(self.generators, self._shares(len(borders) - 1), strict=True)
            if stop > start
        }

    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make deterministic samples on the generators: media [B, (F), C, H, W] in [0, 1]."""
        tasks = [
            self.engine.submit(generator, "sample", prompts.select(slice(start, stop)))
            for generator, (start, stop) in zip(self.generators, self._shares(len(prompts)), strict=True)
            if stop > start
        ]
        return torch.cat(self.engine.gather(tasks))

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def _keeper(self) -> str:
        """Whose state is that of the run."""
        return (self.trainers or self.generators)[0]

    def await_state(self, timeout_s: float) -> None:
        """Wait until the worker whose state is fetched is free.

        Raises:
            WorkerTimeout: it is not within `timeout_s` seconds.
        """
        self.engine.drain(self._keeper, timeout_s)

    def fetch_state_dict(self) -> dict[str, Any]:
        """Fetch the weights: the trainers', if there are any."""
        return self._fetch(self._keeper, "state_dict")

    def push_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Replace the weights of all workers."""
        self._push([*self.trainers, *self.generators], "load_state_dict", dict(state_dict), strict)

    def fetch_optimizer_state(self) -> dict[str, Any]:
        """Fetch the optimizer's state by parameter name."""
        return self._fetch(self.trainers[0], "optimizer_state")

    def push_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state on all trainers."""
        self._push(self.trainers, "load_optimizer_state", dict(state))

    def shutdown(self) -> None:
        """End all workers. Safe to call twice."""
        self.engine.shutdown()
        self._plane.close()
        self._built.clear()

    def _fetch(self, worker: str, method: str) -> dict[str, Any]:
        ref = self.engine.call(worker, method)
        # A copy: what was read is memory that the worker is about to give back.
        state: dict[str, Any] = _clone_tensors(self.engine.store.get(ref))
        self.engine.call(worker, "free", [ref])
        return state

    def _push(self, workers: Sequence[str], method: str, state: dict[str, Any], *args: Any) -> None:
        ref = self.engine.store.put(state)
        self._call(workers, method, ref, *args)
        self.engine.store.free([ref])

    def _call(self, workers: Sequence[str], method: str, *args: Any) -> list[Any]:
        return self.engine.gather([self.engine.submit(worker, method, *args) for worker in workers])

    def _shares(self, num_rows: int) -> list[tuple[int, int]]:
        count = len(self.generators)
        return [(index * num_rows // count, (index + 1) * num_rows // count) for index in range(count)]

    def _environment(self, index: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": str(index)} if self._device == "cuda" else {}


def _clone_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone_tensors(entry) for key, entry in value.items()}
    return value
