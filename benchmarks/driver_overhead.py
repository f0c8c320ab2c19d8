"""What digenrl itself takes: `python -m benchmarks.driver_overhead` from the repository's root.

Steps of a job whose rollouts, rewards and losses cost nothing (`benchmarks/empty_work.py`) go through the real Trainer,
on one generator and one trainer. What is left of a step's time is the driver, Lightning's loop and logging in it, and
what workers need to pass things on. From steps of few and of many micro-batches follows what one more micro-batch
takes. Set `OMP_NUM_THREADS=1`.

The driver's memory is measured in processes of their own, with a small and with a large policy: it must not depend on
the policy. A checkpoint is the exception, since Lightning writes it here: its cost is shown beside.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.empty_work import EmptyPolicy, empty_module
from benchmarks.machine import OtherLoad
from digenrl import DisaggregatedStrategy, PromptData, Trainer

ENGINES = ("inline", "local", "ray")

MICRO_BATCHES = (4, 36)
"""Of a step: the first is the one that the target of a step is for."""

MOST_PER_STEP_S = {"local": 0.015, "ray": 0.025}
MOST_PER_MICRO_BATCH_S = {"local": 0.001, "ray": 0.003}
MOST_RSS_DIFFERENCE = 20 << 20
POLICY_BYTES = (1 << 20, 384 << 20)

_NUM_WARM_UP = 5


@dataclass(frozen=True)
class StepCosts:
    """A step of empty work: medians over steps, in seconds."""

    num_micro_batches: int
    step_s: float
    """Wall clock."""
    fastest_step_s: float
    driver_s: float
    """Processor time of the driver's thread."""
    busiest_worker_s: float
    """Of the worker that was at tasks for longest."""
    others_cpu: float
    """Share of the machine's processor time that other processes took; the less, the better the figures."""


@dataclass(frozen=True)
class Memory:
    """The driver's memory, in bytes."""

    policy_bytes: int
    rss: int
    """Largest resident memory between steps."""
    checkpoint_peak: int
    """Largest resident memory while a checkpoint is written."""
    after_checkpoint: int
    checkpoint_s: float


def measure_steps(engine: str, num_micro_batches: int, *, num_steps: int, **settings: Any) -> StepCosts:
    """Run steps of empty work; `settings` are further ones of the strategy."""
    strategy = DisaggregatedStrategy(engine=engine, trainer_assist="off", **settings)  # type: ignore[arg-type]
    recorder, load = _Recorder(strategy), OtherLoad()
    with TemporaryDirectory() as folder:
        trainer = _trainer(strategy, recorder, num_steps=_NUM_WARM_UP + num_steps, folder=folder)
        try:
            trainer.fit(empty_module(EmptyPolicy(POLICY_BYTES[0])), _prompts(num_micro_batches))
            others_cpu = load.share()  # while the workers are there to be counted
        finally:
            strategy.shutdown()
    step_s, driver_s, busiest_s = recorder.medians(_NUM_WARM_UP)
    return StepCosts(num_micro_batches, step_s, recorder.fastest_s(_NUM_WARM_UP), driver_s, busiest_s, others_cpu)


def measure_memory(engine: str, policy_bytes: int, *, num_steps: int) -> Memory:
    """Run steps with a policy of some size in a process of their own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure_memory_here, engine, policy_bytes, num_steps).result()


def _measure_memory_here(engine: str, policy_bytes: int, num_steps: int) -> Memory:
    torch.set_num_threads(1)
    _be_quiet()
    strategy = DisaggregatedStrategy(engine=engine, trainer_assist="off")  # type: ignore[arg-type]
    recorder, process = _Recorder(strategy), psutil.Process()
    with TemporaryDirectory() as folder:
        trainer = _trainer(strategy, recorder, num_steps=num_steps, folder=folder)
        try:
            trainer.fit(empty_module(EmptyPolicy(policy_bytes)), _prompts(MICRO_BATCHES[0]))
            _forget_peak()
            start_s = time.monotonic()
            trainer.save_checkpoint(Path(folder, "state.ckpt"))
            checkpoint_s = time.monotonic() - start_s
            return Memory(policy_bytes, max(recorder.rss), _peak_rss(), process.memory_info().rss, checkpoint_s)
        finally:
            strategy.shutdown()


class _Recorder(pl.Callback):
    """Notes clocks, spans and memory at the end of each step."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy
        self._process = psutil.Process()
        self._wall_s: list[float] = []
        self._driver_s: list[float] = []
        self._busiest_s: list[float] = []
        self.rss: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self._wall_s.append(time.monotonic())
        self._driver_s.append(time.thread_time())
        busy_s: dict[str, float] = defaultdict(float)
        for entry in self._strategy.last_step_spans:
            busy_s[entry.worker] += entry.span.seconds
        self._busiest_s.append(max(busy_s.values()))
        self.rss.append(self._process.memory_info().rss)

    def medians(self, first: int) -> tuple[float, float, float]:
        """Give the medians of wall clock, driver and busiest worker over the steps from `first` on."""
        return (
            statistics.median(_differences(self._wall_s[first - 1 :])),
            statistics.median(_differences(self._driver_s[first - 1 :])),
            statistics.median(self._busiest_s[first:]),
        )

    def fastest_s(self, first: int) -> float:
        """Give the shortest step."""
        return min(_differences(self._wall_s[first - 1 :]))


def _differences(values: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip(values, values[1:], strict=False)]


def _trainer(strategy: DisaggregatedStrategy, recorder: pl.Callback, *, num_steps: int, folder: str) -> pl.Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        callbacks=[recorder],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _prompts(num_micro_batches: int) -> PromptData:
    names = [f"prompt {index}" for index in range(num_micro_batches)]
    return PromptData(names, prompts_per_step=num_micro_batches)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory


def _peak_rss() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def _be_quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


# ---- tables --------------------------------------------------------------------------------------------------


def step_table(engine: str, few: StepCosts, many: StepCosts) -> Table:
    """Lay out what a step and one more micro-batch take."""
    table = Table(
        title=f"Empty work, engine {engine}",
        caption=f"medians over steps; others took {max(few.others_cpu, many.others_cpu):.0%} of the processors",
    )
    for header in ("milliseconds", "wall clock", "fastest", "driver's processor time", "busiest worker", "target"):
        table.add_column(header, justify="left" if header == "milliseconds" else "right")
    for costs in (few, many):
        most_s = MOST_PER_STEP_S.get(engine) if costs is few else None
        table.add_row(
            f"step of {costs.num_micro_batches} micro-batches",
            *(f"{seconds * 1e3:.1f}" for seconds in (costs.step_s, costs.fastest_step_s, costs.driver_s)),
            f"{costs.busiest_worker_s * 1e3:.1f}",
            _verdict(costs.step_s, most_s),
        )
    table.add_row(
        "one more micro-batch",
        *(f"{_slope(few, many, name) * 1e3:.2f}" for name in ("step_s", "fastest_step_s", "driver_s")),
        f"{_slope(few, many, 'busiest_worker_s') * 1e3:.2f}",
        _verdict(_slope(few, many, "driver_s"), MOST_PER_MICRO_BATCH_S.get(engine)),
    )
    return table


def memory_table(engine: str, entries: Sequence[Memory]) -> Table:
    """Lay out the driver's memory with each policy."""
    difference = max(entry.rss for entry in entries) - min(entry.rss for entry in entries)
    verdict = "met" if difference <= MOST_RSS_DIFFERENCE else "MISSED"
    table = Table(
        title=f"Resident memory of the driver, engine {engine}, MiB",
        caption=f"difference {difference / 2**20:.1f} MiB, target {MOST_RSS_DIFFERENCE >> 20}: {verdict}",
    )
    for header in ("policy", "steps", "peak at a checkpoint", "after it", "checkpoint s"):
        table.add_column(header, justify="right")
    for entry in entries:
        sizes = (entry.policy_bytes, entry.rss, entry.checkpoint_peak, entry.after_checkpoint)
        table.add_row(*(f"{size / 2**20:.0f}" for size in sizes), f"{entry.checkpoint_s:.2f}")
    return table


def _slope(few: StepCosts, many: StepCosts, name: str) -> float:
    difference: float = getattr(many, name) - getattr(few, name)
    return difference / (many.num_micro_batches - few.num_micro_batches)


def _verdict(seconds: float, most_s: float | None) -> str:
    if most_s is None:
        return ""
    return f"{most_s * 1e3:g}: {'met' if seconds <= most_s else 'MISSED'}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print both tables for each engine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.driver_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["inline", "local"])
    parser.add_argument("--steps", type=int, default=100, help="measured steps")
    parser.add_argument("--skip-memory", action="store_true", help="times only")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"`--steps` must be at least 2, got {options.steps}")
    torch.set_num_threads(1)
    _be_quiet()
    console = Console(width=None if sys.stdout.isatty() else 160)
    for engine in options.engine:
        few, many = (measure_steps(engine, count, num_steps=options.steps) for count in MICRO_BATCHES)
        console.print(step_table(engine, few, many))
        console.print("load average", *(f"{value:.1f}" for value in os.getloadavg()), highlight=False)
        if not options.skip_memory and engine != "inline":  # inline, the driver is a worker, too
            entries = [measure_memory(engine, size, num_steps=10) for size in POLICY_BYTES]
            console.print(memory_table(engine, entries))


if __name__ == "__main__":
    main()
