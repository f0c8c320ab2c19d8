"""Whose weights a run goes on with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import digenrl
from digenrl import DisaggregatedStrategy
from digenrl.engines import InlineEngine, Task, WorkerDied
from digenrl.module import DiffusionRLModule
from digenrl.strategies.pool import WorkerPool
from digenrl.strategies.run_state import RunState
from digenrl.strategies.workers import BuildReport, WorkerSettings
from tests.integration.toy_runs import QUIET, largest_difference, toy_data
from tests.toy import WORDS, toy_module


def validated(module: DiffusionRLModule, strategy: DisaggregatedStrategy, **settings: Any) -> digenrl.Trainer:
    """Begin with a validation, which starts no trainers."""
    trainer = digenrl.Trainer(strategy=strategy, max_steps=1, **QUIET)
    trainer.validate(module, toy_data(validation_prompts=WORDS, validation_samples_per_prompt=1), **settings)
    return trainer


def test_a_fit_begins_with_the_weights_that_were_loaded_after_a_validation() -> None:
    module, strategy = toy_module(lr=1e-6), DisaggregatedStrategy(engine="inline")
    trainer = validated(module, strategy, verbose=False)
    # The frozen ones, too: trainers do not get them from elsewhere.
    loaded = {name: 0.5 * value for name, value in module.state_dict().items()}
    module.load_state_dict(loaded)
    trainer.fit(module, toy_data())
    trained = dict(module.state_dict())
    strategy.shutdown()
    assert 0 < largest_difference(trained, loaded) < 2e-6  # one step of AdamW at this rate


def test_a_fit_begins_with_the_checkpoint_that_was_validated(tmp_path: Path) -> None:
    strategy = DisaggregatedStrategy(engine="inline")
    trainer = digenrl.Trainer(strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(toy_module(lr=3e-2, seed=7), toy_data())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    assert isinstance(trainer.lightning_module, DiffusionRLModule)
    trained = {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}
    strategy.shutdown()
    module, strategy = toy_module(lr=1e-6, seed=None), DisaggregatedStrategy(engine="inline")
    trainer = validated(module, strategy, ckpt_path=str(tmp_path / "trained.ckpt"), verbose=False)
    trainer.fit(module, toy_data())
    state = dict(module.state_dict())
    seeds = {worker: strategy.pool.engine._workers[worker]._module.seed for worker in ("generator-0", "trainer-0")}  # type: ignore[attr-defined]
    strategy.shutdown()
    assert 0 < largest_difference(state, trained) < 2e-6
    assert seeds == {"generator-0": 7, "trainer-0": 7}


class Recording(InlineEngine):
    """Carries no call out, and keeps their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[str]] = {}

    def submit(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Task:
        self.calls.setdefault(worker, []).append(method)
        task = Task(worker, method, self.task_timeout_s)
        task.finish(BuildReport((), "digest") if method == "build" else self.store.put({}))
        return task

    def free(self, refs: Any) -> list[Task]:
        self.store.free(refs)
        return []


def test_trainers_take_over_what_was_loaded_and_resumed_only_once_they_are_built() -> None:
    engine = Recording()
    pool = WorkerPool(engine, WorkerSettings(), num_generators=1, num_trainers=1, num_reward_workers=0, max_restarts=1)
    pool.start_generators()
    pool.build(b"")
    pool.state.push_weights({}, strict=True)
    pool.resume(3, seed=7)
    pool.start_trainers()
    assert engine.calls["trainer-0"] == ["join_group"]
    pool.build(b"")
    assert engine.calls["trainer-0"] == ["join_group", "build", "load_state_dict", "resume"]
    pool.launch("trainers")  # as after a death
    assert engine.calls["trainer-0"][4:] == ["join_group", "build", "load_state_dict", "resume"]


class GivingUp:
    """A pool whose first generator dies with the first call, and is not started again."""

    def __init__(self) -> None:
        self.trainers = ()
        self.generators = ("generator-0", "generator-1")
        self.generator_ranks, self.reward_workers = self.generators, ()
        self.published_version = 3
        self.recovery = SimpleNamespace(is_possible=True, run=self.run, check_state=lambda: None)
        store = SimpleNamespace(put=lambda value: value, get=lambda ref: ref, free=lambda refs: None)
        self.engine = SimpleNamespace(store=store, free=lambda refs: [], gather=list)
        self.asked: list[tuple[str, ...]] = []

    def ranks_of(self, unit: str) -> tuple[str, ...]:
        return (unit,)

    def run(self, call: Any) -> Any:
        try:
            return call()
        except WorkerDied:
            self.generators = ("generator-1",)
            return call()

    def call(self, workers: Any, method: str, *args: Any) -> list[Any]:
        self.asked.append(tuple(workers))
        if "generator-0" in workers:
            raise WorkerDied("gone", "generator-0")
        return ["digest"] if method == "frozen_digest" else [{"weight": torch.ones(2)}]

    def change(self, workers: Any, method: str, *args: Any) -> None:
        """Change nothing."""


def test_the_state_comes_from_a_generator_that_is_left() -> None:
    pool: Any = GivingUp()
    assert RunState(pool).fetch_weights()["weight"].tolist() == [1, 1]
    assert pool.asked == [("generator-0",), ("generator-1",)]


def test_a_generator_that_is_left_says_what_must_be_loaded_again() -> None:
    pool: Any = GivingUp()
    state = RunState(pool)
    state.push_weights({"weight": torch.ones(2)}, strict=True)
    assert pool.asked == [("generator-0",), ("generator-1",)]
