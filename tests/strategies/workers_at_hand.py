"""Trainers without an engine, for tests that look into them: in this process, a thread each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.engines import ObjectRef, ObjectStore
from digenrl.module import DiffusionRLModule
from digenrl.strategies import skeleton
from digenrl.strategies.optimizers import OptimizerSpec
from digenrl.strategies.workers import UpdateReport, Worker, WorkerSettings
from tests.integration.toy_runs import toy_data

R = TypeVar("R")


class LocalStore(ObjectStore):
    """Keeps objects of this process."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def put(self, value: Any) -> ObjectRef:
        self._kept.append(value)
        return ObjectRef("", len(self._kept) - 1, 0)

    def get(self, ref: ObjectRef) -> Any:
        return self._kept[ref.address]

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """They go with the store."""


class TrainersAtHand:
    """Ranks that train together, on samples that the first of them has made of each prompt."""

    def __init__(self, module: DiffusionRLModule, num_ranks: int = 1, **settings: Any) -> None:
        self.store = LocalStore()
        self.workers = [Worker(self.store) for _ in range(num_ranks)]
        self._threads = ThreadPoolExecutor(num_ranks)
        rendezvous = dist.HashStore()
        blob = cloudpickle.dumps(module)

        def start(rank: int) -> None:
            worker = self.workers[rank]
            worker._rank, worker._num_ranks = rank, num_ranks
            if num_ranks > 1:
                worker._group = dist.ProcessGroupGloo(rendezvous, rank, num_ranks, timedelta(seconds=60))

        self._on_all(start)
        for worker in self.workers:  # one after another: they draw from the random state of this process
            worker.build(blob, WorkerSettings(**settings), trains=True, sets_up_reward=True)
        outline = cloudpickle.loads(blob)
        skeleton.install(outline, skeleton.describe(self.workers[0]._module))
        spec = OptimizerSpec.of(outline.configure_optimizers(), outline)
        self._on_all(lambda rank: self.workers[rank].configure_optimizer(spec))
        prompts = module.prompt_batch(next(iter(toy_data().train_dataloader())))
        self.num_rows = module.num_rows(prompts)
        self.micro_batches = []
        for start_row in range(0, len(prompts), module.group_size):
            part = prompts.select(slice(start_row, start_row + module.group_size))
            report = self.workers[0].generate_and_score(part)
            assert report.score is not None
            rewards = torch.tensor(report.score.rewards)
            advantages = module.advantages(rewards, torch.tensor(part.group_ids))
            self.micro_batches.append((report.trajectories, rewards.tolist(), advantages.tolist()))

    def update(self, index: int, size: Any, **options: Any) -> list[UpdateReport]:
        """Train a micro-batch on all ranks; their reports."""
        return self._on_all(
            lambda rank: self.workers[rank].update(
                *self.micro_batches[index], num_rows=self.num_rows, timestep_batch_size=size, **options
            )
        )

    def train(self, size: Any, **options: Any) -> int:
        """Train all micro-batches, again from the first one whenever memory ran out; how often that was."""
        num_again, index = 0, 0
        while index < len(self.micro_batches):
            reports = self.update(index, size, **options)
            assert len({report.out_of_memory for report in reports}) == 1, "all ranks must say the same"
            index += 1
            if reports[0].out_of_memory:
                self._on_all(lambda rank: self.workers[rank].discard_gradient())
                num_again, index = num_again + 1, 0
        return num_again

    def step(self, **settings: Any) -> None:
        """Step the optimizers."""
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, **settings}
            for group in self.workers[0]._optimizer.param_groups
        ]
        self._on_all(lambda rank: self.workers[rank].optimizer_step(groups, 0.0, "norm"))

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        """Of each rank."""
        return [worker._module.state_dict() for worker in self.workers]

    def _on_all(self, call: Callable[[int], R]) -> list[R]:
        return list(self._threads.map(call, range(len(self.workers))))
