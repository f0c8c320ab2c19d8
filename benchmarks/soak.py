"""Does a long run stay as it began: `python -m benchmarks.soak` from the repository's root.

Runs the digits job (`examples/digits`; its base policy is made if it is not there) for many steps and notes, at the end
of each step, the resident memory, the open files and the kept objects of every process: the driver, the process that
workers are forked from, and the workers. Memory must not grow (least squares over the steps after a warm-up), no
object may be kept past its step, and the number of open files must stay. Set `OMP_NUM_THREADS=1`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from rich.console import Console
from rich.table import Table

from digenrl import DisaggregatedStrategy, PromptData, Trainer
from digenrl.algorithms import FlowGRPO
from digenrl.engines import Engine, LocalEngine
from examples.digits.policy import DigitsPolicy
from examples.digits.reward import DigitReward

BASE = Path("runs/digits/base.safetensors")
PROMPTS = "examples/digits/prompts.txt"
MOST_GROWTH = 0.05 * 2**20
"""Bytes per step."""

OBJECT = "memfd:digenrl-object"
"""What an object that a worker of the local engine keeps is called among its open files."""


@dataclass(frozen=True)
class Look:
    """What a process holds at the end of a step."""

    rss: int
    """Resident bytes."""
    open_files: int
    """But for kept objects."""
    objects: frozenset[int]
    """Kept for other processes, by their inodes."""


class Recorder(pl.Callback):
    """Looks at the driver and all its descendants at the end of each step."""

    def __init__(self) -> None:
        self.looks: list[dict[int, Look]] = []
        self.names: dict[int, str] = {}
        self.ends_s: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Look, once what a step no longer needs is let go of."""
        strategy = trainer.strategy
        assert isinstance(strategy, DisaggregatedStrategy)
        # Workers free a step's samples after what they were at: `sampler_steps` comes behind it in each one's queue.
        engine = strategy.pool.engine
        workers = (*strategy.pool.generator_ranks, *strategy.pool.reward_workers, *strategy.pool.trainers)
        engine.gather([engine.submit(worker, "sampler_steps") for worker in workers])
        self.looks.append({process.pid: look_at(process) for process in family()})
        self.ends_s.append(time.monotonic())
        self.names = names_of(engine)


def family() -> list[psutil.Process]:
    """Give this process and its descendants that still run."""
    this = psutil.Process()
    return [this, *(child for child in this.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE)]


def look_at(process: psutil.Process) -> Look:
    """Count what a process holds."""
    num_others, objects = 0, set()
    for link in Path("/proc", str(process.pid), "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as the one that lists them is
            if OBJECT in os.readlink(link):
                objects.add(link.stat().st_ino)
            else:
                num_others += 1
    return Look(process.memory_info().rss, num_others, frozenset(objects))


def names_of(engine: Engine) -> dict[int, str]:
    """Name processes for people: this one and its descendants."""
    workers = (
        {process.pid: name for name, process in engine._processes.items()} if isinstance(engine, LocalEngine) else {}
    )
    this, *others = family()
    return {
        this.pid: "driver",
        **{other.pid: workers.get(other.pid, f"{other.name()} {other.pid}") for other in others},
    }


def slope(values: Sequence[float]) -> float:
    """Fit a line by least squares; returns its growth from one value to the next."""
    return statistics.linear_regression(range(len(values)), values).slope


@dataclass(frozen=True)
class Growth:
    """What became of a process over the steps after a warm-up."""

    process: str
    rss: int
    """Bytes at the end."""
    bytes_per_step: float
    """Slope of the resident memory."""
    open_files: tuple[int, int]
    """At the first and last of the steps."""
    objects_left: int
    """Kept at the end of a step and of the next one, too; a step's samples may be made during the one before."""


def growth(recorder: Recorder, num_warm_up: int) -> list[Growth]:
    """Sum up each process that was there from the warm-up on."""
    looks = recorder.looks[num_warm_up:]
    return [
        Growth(
            recorder.names.get(pid, str(pid)),
            looks[-1][pid].rss,
            slope([entry[pid].rss for entry in looks]),
            (looks[0][pid].open_files, looks[-1][pid].open_files),
            sum(len(before[pid].objects & after[pid].objects) for before, after in itertools.pairwise(looks)),
        )
        for pid in looks[0]
        if all(pid in entry for entry in looks)
    ]


def run(
    base: Path, *, num_steps: int, engine: str, folder: Path, checkpoint_interval: int | None, **settings: Any
) -> Recorder:
    """Train on the digits; `settings` are further ones of the strategy."""
    algorithm = FlowGRPO(
        DigitsPolicy(str(base)), DigitReward(), group_size=8, num_steps=10, timestep_fraction=0.5, lr=1e-4, seed=0
    )
    recorder = Recorder()
    callbacks: list[pl.Callback] = [recorder]
    if checkpoint_interval is not None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=checkpoint_interval, save_top_k=1))
    strategy = DisaggregatedStrategy(engine=engine, groups_per_micro_batch=2, **settings)  # type: ignore[arg-type]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        default_root_dir=str(folder),
        enable_checkpointing=checkpoint_interval is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(algorithm, PromptData(PROMPTS, prompts_per_step=8, seed=0))
    finally:
        strategy.shutdown()
    return recorder


def table_of(entries: Sequence[Growth], title: str) -> Table:
    """Lay out all processes."""
    table = Table(title=title)
    for header in ("process", "memory MiB", "growth MiB/step", "target", "open files", "objects left"):
        table.add_column(header, justify="left" if header == "process" else "right")
    for entry in entries:
        is_met = entry.bytes_per_step < MOST_GROWTH
        table.add_row(
            entry.process,
            f"{entry.rss / 2**20:.1f}",
            f"{entry.bytes_per_step / 2**20:.4f}",
            f"{MOST_GROWTH / 2**20:g}: {'met' if is_met else 'MISSED'}",
            " to ".join(str(count) for count in entry.open_files),
            str(entry.objects_left),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=100, help="first steps, which do not count")
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--staleness", type=float, default=0.0)
    parser.add_argument(
        "--checkpoint-interval", type=int, help="steps from one checkpoint to the next; none by default"
    )
    parser.add_argument("--base", type=Path, default=BASE, help=f"base policy ({BASE})")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="for what the run writes")
    options = parser.parse_args(arguments)
    if options.steps < options.warm_up + 2:
        parser.error("`--steps` must be above `--warm-up` by two or more")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    if not options.base.exists():
        subprocess.run([sys.executable, "examples/digits/pretrain.py", "--output", str(options.base)], check=True)
    recorder = run(
        options.base,
        num_steps=options.steps,
        engine=options.engine,
        folder=options.folder,
        checkpoint_interval=options.checkpoint_interval,
        generators=options.generators,
        trainers=options.trainers,
        staleness=options.staleness,
    )
    title = (
        f"{options.steps} steps of the digits job, engine {options.engine}; the first {options.warm_up} do not count"
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table_of(growth(recorder, options.warm_up), title))


if __name__ == "__main__":
    main()
