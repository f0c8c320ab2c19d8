"""The workers of a run: starting them, and talking to a group of them as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from digenrl.engines import Engine, JoinedTask, ObjectRef, Requirements, Task
from digenrl.strategies.optimizers import OptimizerSpec
from digenrl.strategies.skeleton import ModuleOutline
from digenrl.strategies.weight_planes import SharedMemoryPlane, WeightPlane, WeightSyncError
from digenrl.strategies.workers import (
    BuildReport,
    LogCall,
    RankGroup,
    StepReport,
    Worker,
    WorkerSettings,
    even_shares,
    join_generate_reports,
    join_score_reports,
    join_spans,
)
from digenrl.types import PromptBatch


class WorkerPool:
    """Generators, trainers and reward workers of one run.

    Lifecycle: `start_generators` (and `start_trainers`, for training), `build`, then, for training,
    `connect_trainers`, `configure_optimizer` and any number of steps; `shutdown` ends the workers.
    """

    def __init__(
        self,
        engine: Engine,
        settings: WorkerSettings,
        *,
        num_generators: int,
        num_trainers: int,
        num_reward_workers: int,
        devices_per_generator: int = 1,
        resources: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Describe the workers; `resources` are what those of a role need beside a device, by role."""
        self.engine = engine
        self.generators = tuple(f"generator-{index}" for index in range(num_generators))
        self.reward_workers = tuple(f"reward-worker-{index}" for index in range(num_reward_workers))
        self.trainers: tuple[str, ...] = ()
        self.shards_trainers = settings.sharding != "none" and num_trainers > 1
        self._settings = settings
        self._ranks = {
            generator: (generator,)
            if devices_per_generator == 1
            else tuple(f"{generator}-rank-{rank}" for rank in range(devices_per_generator))
            for generator in self.generators
        }
        self._num_trainers = num_trainers
        self._resources = resources or {}
        self._plane: WeightPlane = SharedMemoryPlane(engine)
        self._built: set[str] = set()
        self._rendezvous: TCPStore | None = None
        self._num_groups = 0
        self._devices: dict[str, int] = {}
        """Index of each worker's device among those of a host, where one host has all."""

    # ---- set-up --------------------------------------------------------------------------------------------

    @property
    def generator_ranks(self) -> tuple[str, ...]:
        """All ranks of all generators."""
        return tuple(rank for generator in self.generators for rank in self._ranks[generator])

    def reserve(self, *, trains: bool) -> None:
        """Set aside the machines' resources for all workers.

        Raises:
            ValueError: the machines do not have them.
        """
        trainers = tuple(f"trainer-{rank}" for rank in range(self._num_trainers)) if trains else ()
        roles = {"generator": self.generator_ranks, "reward_worker": self.reward_workers, "trainer": trainers}
        num_gpus = 1 if self._settings.device == "cuda" else 0
        self.engine.reserve(
            {
                worker: Requirements(role, num_gpus, self._resources.get(role, {}))
                for role, workers in roles.items()
                for worker in workers
            }
        )

    def start_generators(self) -> None:
        """Start the generators, and the reward workers that score for them."""
        for worker in (*self.generator_ranks, *self.reward_workers):
            self._start(worker)
        for generator in self.generators:
            if len(self._ranks[generator]) > 1:
                self._join(generator, self._ranks[generator])

    def start_trainers(self) -> None:
        """Start the trainers and let them meet."""
        self.trainers = tuple(f"trainer-{rank}" for rank in range(self._num_trainers))
        for worker in self.trainers:
            self._start(worker)
        self._join("trainers", self.trainers)

    def _start(self, worker: str) -> None:
        index = self._devices.setdefault(worker, len(self._devices))
        env = {"CUDA_VISIBLE_DEVICES": str(index)} if self._settings.device == "cuda" else {}
        self.engine.start(worker, Worker, env=env)

    def _join(self, name: str, ranks: Sequence[str]) -> None:
        """Let the ranks of a group meet."""
        if len(ranks) > 1 and self._rendezvous is None:
            self._rendezvous = TCPStore(self.engine.driver_address, 0, is_master=True, wait_for_workers=False)
        self._num_groups += 1
        hosts = tuple(self.engine.host(rank) for rank in ranks)
        groups = [
            RankGroup(
                self.engine.driver_address,
                self._rendezvous.port if self._rendezvous is not None else 0,
                f"{name}-{self._num_groups}",
                rank,
                hosts,
                self.engine.task_timeout_s,
            )
            for rank in range(len(ranks))
        ]
        self.engine.gather(
            [
                self.engine.submit(worker, "join_group", group, self._settings)
                for worker, group in zip(ranks, groups, strict=True)
            ]
        )

    def build(self, module: bytes) -> tuple[ModuleOutline, ...]:
        """Have the workers that are new build the pickled module; returns its outline.

        Raises:
            WeightSyncError: workers built different weights, trained ones aside, which are synchronized.
        """
        started = (*self.generator_ranks, *self.reward_workers, *self.trainers)
        new = [worker for worker in started if worker not in self._built]
        tasks = [
            self.engine.submit(
                worker,
                "build",
                module,
                self._settings,
                trains=worker in self.trainers,
                sets_up_reward=worker in (self.reward_workers or self.generator_ranks),
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
        """Give the trainers' weights to the generators."""
        self._plane.setup(self.trainers, self.generator_ranks)
        self.publish(version, must_change=False)
        self.engine.gather([self.load_weights(generator, version) for generator in self.generators])

    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        """Make the optimizer on all trainers."""
        self._call(self.trainers, "configure_optimizer", spec)

    def resume(self, version: int, seed: int) -> None:
        """Have all workers continue at `version`."""
        self._call([*self.generator_ranks, *self.trainers], "resume", version, seed)

    # ---- steps ---------------------------------------------------------------------------------------------

    def generate(self, generator: str, prompts: PromptBatch) -> Task:
        """Have a generator make samples, and score them unless reward workers do; the result is a `GenerateReport`.

        Several devices share the samples; those that get none go along, since all hold a share of the weights.
        """
        method = "generate" if self.reward_workers else "generate_and_score"
        ranks = self._ranks[generator]
        if len(ranks) == 1:
            return self.engine.submit(generator, method, prompts)
        calls = []
        for rank, (start, stop) in zip(ranks, even_shares(len(prompts), len(ranks)), strict=True):
            share = prompts.select(slice(start, stop)) if stop > start else prompts.select(slice(1))
            calls.append(self.engine.submit(rank, method, share, follows=stop == start))
        return JoinedTask(generator, calls, join_generate_reports)

    def score(self, worker: str, trajectories: Sequence[ObjectRef]) -> Task:
        """Have a worker score samples; several devices of a generator score those they have made."""
        if worker not in self._ranks or len(self._ranks[worker]) == 1:
            return self.engine.submit(worker, "score", trajectories)
        calls = [self.engine.submit(ref.worker, "score", [ref]) for ref in trajectories]
        return JoinedTask(worker, calls, join_score_reports)

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
        loads = [self._plane.load(rank, version) for rank in self._ranks[generator]]
        return loads[0] if len(loads) == 1 else JoinedTask(generator, loads, join_spans)

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
            self._on_ranks(generator, "evaluation_step", hook, share, *args) for generator, share in shares.items()
        ]
        logged = self.engine.gather(tasks)
        return [[(len(share), call) for call in calls] for share, calls in zip(shares.values(), logged, strict=True)]

    def _on_ranks(self, generator: str, method: str, *args: Any) -> Task:
        """Have all devices of a generator do the same together; the first one's result counts."""
        tasks = [self.engine.submit(rank, method, *args) for rank in self._ranks[generator]]
        return tasks[0] if len(tasks) == 1 else JoinedTask(generator, tasks, itemgetter(0))

    def validate(
        self, batch: Sequence[Any], batch_idx: int, *, units: Sequence[int] | None = None
    ) -> list[list[tuple[int, LogCall]]]:
        """Make a validation batch on the generators and score it on the reward workers; see `evaluate`."""
        shares = self._generators_shares(batch, units)
        making = [
            self._on_ranks(generator, "validation_samples", share, batch_idx) for generator, share in shares.items()
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
            for generator, (start, stop) in zip(
                self.generators, even_shares(len(borders) - 1, len(self.generators)), strict=True
            )
            if stop > start
        }

    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make deterministic samples on the generators: media [B, (F), C, H, W] in [0, 1]."""
        tasks = [
            self._on_ranks(generator, "sample", prompts.select(slice(start, stop)))
            for generator, (start, stop) in zip(
                self.generators, even_shares(len(prompts), len(self.generators)), strict=True
            )
            if stop > start
        ]
        return torch.cat(self.engine.gather(tasks))

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def _keeper(self) -> str:
        """Whose state is that of the run."""
        return (self.trainers or self.generator_ranks)[0]

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
        self._push([*self.trainers, *self.generator_ranks], "load_state_dict", dict(state_dict), strict)

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


def _clone_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone_tensors(entry) for key, entry in value.items()}
    return value
