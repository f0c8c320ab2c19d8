"""A group of trainers by itself, without generators, scheduler and Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from digenrl.engines import InlineEngine, LocalEngine
from digenrl.module import DiffusionRLModule, as_prompts
from digenrl.strategies.optimizers import OptimizerSpec, hyper_parameters
from digenrl.strategies.workers import BuildReport, RankGroup, Worker, WorkerSettings
from digenrl.types import PromptBatch, Trajectory
from tests.toy import WORDS, ToyPolicy


class BlockToy(ToyPolicy):
    """The toy with its blocks named. 33 rows: two ranks hold 17 and 16 of them, three 11 each."""

    def __init__(self, hidden: int = 33) -> None:
        super().__init__(hidden)

    def blocks(self) -> nn.ModuleList:
        return self.blocks_


class TrainerGroup:
    """Trainers of a module; one rank runs in this process and is the run that the others must equal."""

    def __init__(
        self,
        module: DiffusionRLModule,
        num_ranks: int = 1,
        *,
        hosts: Sequence[str] = (),
        worker: type[Worker] = Worker,
        **settings: Any,
    ) -> None:
        self.module = cloudpickle.loads(cloudpickle.dumps(module))  # built here to make samples
        self.engine = InlineEngine(60.0) if num_ranks == 1 else LocalEngine(60.0)
        self.names = [f"trainer-{rank}" for rank in range(num_ranks)]
        self.version = 0
        self.settings = WorkerSettings(**({"sharding": "fsdp"} if num_ranks > 1 else {}) | settings)
        try:
            for name in self.names:
                self.engine.start(name, worker)
            if num_ranks > 1:
                self._meet(hosts or ["localhost"] * num_ranks)
            blob = cloudpickle.dumps(module)
            self.reports: list[BuildReport] = self.call("build", blob, self.settings, trains=True)
            self.module.configure_model()
            self.optimizer = self.module.configure_optimizers()
            self.call("configure_optimizer", OptimizerSpec.of(self.optimizer, self.module))
        except BaseException:
            self.engine.shutdown()
            raise

    def _meet(self, hosts: Sequence[str]) -> None:
        self._rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        groups = [
            RankGroup("127.0.0.1", self._rendezvous.port, "trainers-1", rank, tuple(hosts), 60.0)
            for rank in range(len(hosts))
        ]
        tasks = [
            self.engine.submit(name, "join_group", group, self.settings)
            for name, group in zip(self.names, groups, strict=True)
        ]
        self.engine.gather(tasks)

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.shutdown()

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Have all ranks do the same."""
        return self.engine.gather([self.engine.submit(name, method, *args, **kwargs) for name in self.names])

    def update(
        self, step: int, words: Sequence[str] = WORDS, *, method: str = "update", num_rows: int = 64, **kwargs: Any
    ) -> list[Any]:
        """Train a micro-batch of a group for each word, made with the weights of the beginning."""
        trajectory, rewards, advantages = samples(self.module, step, words)
        ref = self.engine.store.put(replace(trajectory, policy_version=self.version))
        options = {"timestep_batch_size": None, **kwargs}
        return self.call(method, [ref], rewards, advantages, num_rows=num_rows, **options)

    def step(self, clip: float = 0.0, algorithm: str = "norm", *scales: float) -> float:
        """Step the optimizer; returns the norm of the gradient, the same on all ranks."""
        reports = self.call("optimizer_step", hyper_parameters(self.optimizer), clip, algorithm, *scales)
        self.version += 1
        assert len({report.gradient_norm for report in reports}) == 1
        return reports[0].gradient_norm

    def state(self, method: str = "state_dict") -> dict[str, Any]:
        """The whole state, which the first rank hands over and no other."""
        first, *others = self.call(method)
        assert others == [None] * len(others)
        return {name: _copied(value) for name, value in self.engine.store.get(first).items()}

    def load(self, state: dict[str, Any], optimizer_state: dict[str, Any]) -> None:
        self.call("load_state_dict", self.engine.store.put(state), True)
        self.call("load_optimizer_state", self.engine.store.put(optimizer_state))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def samples(module: DiffusionRLModule, step: int, words: Sequence[str]) -> tuple[Trajectory, list[Any], list[Any]]:
    """A group for each word, with rewards and advantages."""
    prompts = PromptBatch.for_step(
        as_prompts(words), step=step, group_size=module.group_size, seed=module.seed, first_group=0
    )
    with torch.no_grad():
        trajectory = module.rollout(prompts)
        rewards = module.score(trajectory)
    advantages = module.advantages(rewards, torch.tensor(prompts.group_ids))
    return trajectory, rewards.tolist(), advantages.tolist()
