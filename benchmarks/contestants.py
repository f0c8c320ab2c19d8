"""What runs on the ladder: each contestant keeps its processes between rounds and runs steps when it is told to."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import socket
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from benchmarks import jobs
from benchmarks.baselines.flow_grpo_loop import FlowGRPOLoop
from benchmarks.jobs import Variant
from digenrl import DisaggregatedStrategy
from digenrl.strategies.driver import WorkerSpan

NUM_RANKS = 2
_ANSWER_TIMEOUT_S = 600.0
_STOP_S = 10.0
_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_REPORTED = ("time/step_s", "assist/micro_batches", "staleness/frac")
_SAMPLES = re.compile(r"samples (\d+)-(\d+) of")


@dataclass(frozen=True)
class StageCosts:
    """Seconds of the stages of a step as its workers measured them."""

    generate_s: float
    """Per sample; so for the next three."""
    score_s: float
    update_s: float
    assist_s: float | None
    """None: no sample was made by a trainer."""
    optimizer_s: float
    """Per step; so for the next two."""
    publish_s: float
    load_s: float


@dataclass(frozen=True)
class Round:
    """Measured steps of one contestant that followed each other."""

    wall_s: tuple[float, ...]
    """From the end of a step to the end of the next: nothing hides in between."""
    reported_s: tuple[float, ...] = ()
    """Each step as the contestant itself reports it (`time/step_s`)."""
    costs: StageCosts | None = None
    bubbles: dict[str, float] = field(default_factory=dict)
    """By worker: share of the wall clock in which it did nothing."""
    gaps_s: dict[str, float] = field(default_factory=dict)
    """By kind of gap between a worker's tasks: median seconds, see `gaps_between`."""
    num_assisted: float = 0.0
    """Micro-batches per step that the trainer made."""
    stale_fraction: float = 0.0
    others_cpu: float = 0.0
    """Share of the machine's processor time that others took meanwhile."""

    @property
    def samples_per_s(self) -> float:
        """Trained samples per second of wall clock."""
        return jobs.NUM_SAMPLES * len(self.wall_s) / sum(self.wall_s)


class Contestant(ABC):
    """Something that trains the job. `run` any number of times, `close` once."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self, num_steps: int, *, num_warm_up: int) -> Round:
        """Run some steps after steps that are not measured."""

    @abstractmethod
    def close(self) -> None:
        """End all processes."""


# ---- digenrl on separate processes -------------------------------------------------------------------------------


class Disaggregated(Contestant):
    """digenrl with one generator and one trainer process, which stay alive between fits.

    Each round is a fit with warm-up steps before and one step after the measured ones: with staleness, work of the
    first measured step is done ahead by a warm-up step, and so the last one must do the same for the step after it.

    In the mixed-speed variant the generator is the slow process. Workers get the environment that the driver has when
    they start, and validation starts generators only.
    """

    def __init__(self, name: str, size: str, variant: Variant, **settings: Any) -> None:
        """Start nothing yet.

        Args:
            name: of the rung.
            size: of the job.
            variant: of the job.
            **settings: of the strategy.
        """
        super().__init__(name)
        _quiet_lightning()
        self.strategy = DisaggregatedStrategy(
            1, 1, generation_batch_size=jobs.GENERATION_BATCH_SIZE, task_timeout_s=_ANSWER_TIMEOUT_S, **settings
        )
        self.module = jobs.make_module(size, variant)
        self._slow_generator = variant == "mixed-speed"
        self._trainer: pl.Trainer | None = None

    def run(self, num_steps: int, *, num_warm_up: int) -> Round:
        """Fit, and look at the steps between the warm-up and the last one."""
        if self._trainer is None:
            self._trainer = self._start()
        trainer, recorder = self._trainer, _Recorder(self.strategy)
        trainer.callbacks[:] = [recorder]  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + num_warm_up + num_steps + 1
        trainer.fit(self.module, _Endless(list(jobs.PROMPTS)))
        return recorder.round(slice(num_warm_up, num_warm_up + num_steps))

    def _start(self) -> pl.Trainer:
        # One Trainer for all fits: Lightning does not let a second one have the strategy.
        trainer = pl.Trainer(strategy=self.strategy, accelerator="cpu", max_steps=0, limit_val_batches=1, **_QUIET)
        if self._slow_generator:
            os.environ[jobs.SLOW_PROCESS] = "1"
            try:
                trainer.validate(self.module, _Endless(list(jobs.PROMPTS[:1])), verbose=False)
            finally:
                # Not deleted: the server that forks workers may have been started with the value from above.
                os.environ[jobs.SLOW_PROCESS] = "0"
        return trainer

    def close(self) -> None:
        """End the workers."""
        self.strategy.shutdown()


class _Recorder(Callback):
    """Notes the end of each step, and what the strategy says of it."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy
        self._ends_s: list[float] = []
        self._metrics: list[dict[str, float]] = []
        self._spans: list[tuple[WorkerSpan, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._ends_s.append(time.monotonic())
        metrics = trainer.callback_metrics
        self._metrics.append({name: float(metrics[name]) for name in _REPORTED})
        self._spans.append(self._strategy.last_step_spans)

    def round(self, measured: slice) -> Round:
        ends_s = self._ends_s[measured.start - 1 : measured.stop]
        metrics = self._metrics[measured]
        spans = [span for step in self._spans for span in step]
        return Round(
            wall_s=_differences(ends_s),
            reported_s=tuple(step["time/step_s"] for step in metrics),
            costs=stage_costs([span for step in self._spans[measured] for span in step], len(metrics)),
            bubbles={
                worker: bubble_share(spans, worker, ends_s[0], ends_s[-1]) for worker in ("generator-0", "trainer-0")
            },
            gaps_s=gaps_between(spans, ends_s[0], ends_s[-1]),
            num_assisted=statistics.mean(step["assist/micro_batches"] for step in metrics),
            stale_fraction=statistics.mean(step["staleness/frac"] for step in metrics),
        )


def stage_costs(spans: Sequence[WorkerSpan], num_steps: int) -> StageCosts:
    """Average what workers measured over some whole steps."""

    def total_s(task: str, worker: str = "") -> float:
        return sum(span.span.seconds for span in spans if span.task == task and span.worker.startswith(worker))

    def num_samples(task: str) -> int:
        matches = [_SAMPLES.match(span.detail) for span in spans if span.task == task]
        return sum(int(match[2]) - int(match[1]) + 1 for match in matches if match is not None)

    num_assisted = jobs.GROUP_SIZE * sum(span.task == "assist" for span in spans)  # micro-batches of one group
    return StageCosts(
        generate_s=total_s("generate") / num_samples("generate"),
        score_s=total_s("score") / num_samples("score"),
        update_s=total_s("update") / (num_steps * jobs.NUM_SAMPLES),
        assist_s=total_s("assist") / num_assisted if num_assisted else None,
        optimizer_s=total_s("optimizer") / num_steps,
        publish_s=total_s("sync", "trainer") / num_steps,
        load_s=total_s("sync", "generator") / num_steps,
    )


def bubble_share(spans: Sequence[WorkerSpan], worker: str, start_s: float, end_s: float) -> float:
    """Give the share of [start_s, end_s] in which a worker has no task."""
    busy_s = sum(
        max(min(span.span.end_s, end_s) - max(span.span.start_s, start_s), 0.0)
        for span in spans
        if span.worker == worker
    )
    return 1 - busy_s / (end_s - start_s)


def gaps_between(spans: Sequence[WorkerSpan], start_s: float, end_s: float) -> dict[str, float]:
    """Give the median gap, in seconds, between neighbouring tasks of a worker, by kind: `update > optimizer`."""
    gaps_s: dict[str, list[float]] = {}
    for worker in sorted({span.worker for span in spans}):
        own = sorted((span for span in spans if span.worker == worker), key=lambda span: span.span.start_s)
        for before, after in itertools.pairwise(own):
            if before.span.end_s >= start_s and after.span.start_s <= end_s:
                kind = f"{worker}: {before.task} > {after.task}"
                gaps_s.setdefault(kind, []).append(after.span.start_s - before.span.end_s)
    return {kind: statistics.median(values) for kind, values in gaps_s.items()}


# ---- two ranks, data parallel ------------------------------------------------------------------------------------


class TwoRanks(Contestant):
    """Two processes that share a step as data-parallel ranks and wait between rounds."""

    def __init__(self, name: str, form: str, size: str, variant: Variant) -> None:
        """Start both ranks; in the mixed-speed variant the second one is slow.

        Args:
            name: of the contestant.
            form: `colocated`: the module under Lightning's stock DDP strategy, in two processes that are started as
                torchrun does; `loop` or `batched loop`: the hand-written loop.
            size: of the job.
            variant: of the job.
        """
        super().__init__(name)
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_rank, args=(rank, port, theirs, form, size, variant), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, num_steps: int, *, num_warm_up: int) -> Round:
        """Have both ranks run the steps; the first one's clock counts, as they wait for each other in each step."""
        for connection in self._connections:
            connection.send(num_warm_up + num_steps)
        answers = []
        for connection in self._connections:
            if not connection.poll(_ANSWER_TIMEOUT_S):
                raise TimeoutError(f"{self.name}: a rank did not answer within {_ANSWER_TIMEOUT_S:g} s.")
            answers.append(connection.recv())
        ends_s: list[float] = answers[0][0]
        stages = [stage for _, rank_stages in answers for stage in rank_stages[num_warm_up:]]
        costs = None
        if stages:
            per_rank = jobs.NUM_SAMPLES / NUM_RANKS
            costs = StageCosts(
                generate_s=statistics.mean(stage[0] for stage in stages) / per_rank,
                score_s=0.0,
                update_s=statistics.mean(stage[1] for stage in stages) / per_rank,
                assist_s=None,
                # The rank that comes last does not wait.
                optimizer_s=min(stage[2] for stage in stages),
                publish_s=0.0,
                load_s=0.0,
            )
        return Round(wall_s=_differences(ends_s[num_warm_up - 1 :]), costs=costs)

    def close(self) -> None:
        """End both ranks."""
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:  # it has died
                continue
        for process in self._processes:
            process.join(_STOP_S)
            if process.is_alive():
                process.terminate()
                process.join()


def _serve_rank(rank: int, port: int, connection: Connection, form: str, size: str, variant: Variant) -> None:
    """Run a rank: receive a number of steps, run them, answer with their ends and stages; end at None."""
    torch.set_num_threads(1)
    _quiet_lightning()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    ranks = {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS), "GROUP_RANK": "0"}
    os.environ.update({**address, **ranks, "TORCHELASTIC_RUN_ID": "ladder"})
    if variant == "mixed-speed" and rank == NUM_RANKS - 1:
        os.environ[jobs.SLOW_PROCESS] = "1"
    if form == "colocated":
        _serve_colocated(rank, connection, size, variant)
    else:
        _serve_loop(rank, connection, size, variant, batches_timesteps=form == "batched loop")


def _serve_loop(rank: int, connection: Connection, size: str, variant: Variant, *, batches_timesteps: bool) -> None:
    assert variant != "mixed-speed", "the loop has no slow form"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = jobs.SmallSD3Policy(jobs.SIZES[size])
    policy.build()
    loop = FlowGRPOLoop(
        policy,
        jobs.brightness_reward,
        jobs.PROMPTS,
        batches_timesteps=batches_timesteps,
        rank=rank,
        num_ranks=NUM_RANKS,
        num_extremes=jobs.NUM_EXTREMES if variant == "generation-heavy" else None,
    )
    while (num_steps := connection.recv()) is not None:
        ends_s, stages = [], []
        for _ in range(num_steps):
            loop.step()
            ends_s.append(time.monotonic())
            stages.append((loop.generate_s, loop.update_s, loop.optimizer_s))
        connection.send((ends_s, stages))
    dist.destroy_process_group()


def _serve_colocated(rank: int, connection: Connection, size: str, variant: Variant) -> None:
    share = len(jobs.PROMPTS) // NUM_RANKS
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=NUM_RANKS,
        max_steps=-1,
        callbacks=[_RoundsOnDemand(connection)],
        **_QUIET,
    )
    trainer.fit(jobs.make_module(size, variant), _Endless(list(jobs.PROMPTS[rank * share : (rank + 1) * share])))


class _Endless:
    """Gives a batch again and again. Not a list: Lightning would take a list of lists for several loaders."""

    def __len__(self) -> int:
        return 1_000_000  # so many that no round sees the end

    def __init__(self, batch: list[str]) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[list[str]]:
        return itertools.repeat(self._batch)


class _RoundsOnDemand(Callback):
    """Runs as many steps as it is told to through a connection, and waits there in between."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_left = 0
        self._ends_s: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wait(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._ends_s.append(time.monotonic())
        self._num_left -= 1
        if self._num_left == 0:
            self._connection.send((self._ends_s, []))
            self._wait(trainer)

    def _wait(self, trainer: pl.Trainer) -> None:
        self._ends_s = []
        num_steps = self._connection.recv()
        if num_steps is None:
            trainer.should_stop = True
        else:
            self._num_left = num_steps


def _differences(ends_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(end_s - start_s for start_s, end_s in itertools.pairwise(ends_s))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def _quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
