"""Does it work on this machine's GPUs, and how fast: `python -m benchmarks.gpu_check` from the repository's root.

At most five minutes on any CUDA machine; with one GPU all workers share it. On a CPU: `--device cpu --size tiny`.

- gradient: one step on generators and trainers, in float32, against a loop written out by hand on the same device; with
  three GPUs or more also with sharded trainers.
- weights: each weight plane that the machine allows carries the adapters of a FLUX-shaped model; what did not arrive as
  it was sent would end the run.
- ladder: the same model with one mechanism more on each rung (naive, +GAP, +TSP, +TAG, +TCSS); in bfloat16, but for
  `tiny`.

Prints a table of each and writes all figures to `benchmarks/results/`. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.ladder import RUNGS
from benchmarks.small_flux import (
    PROMPTS,
    TINY,
    Descent,
    Size,
    SmallFluxPolicy,
    brightness,
    large,
    largest_that_fits,
)
from digenrl import DisaggregatedStrategy, PromptData, Trainer
from digenrl.algorithms import FlowGRPO
from digenrl.strategies.driver import WorkerSpan
from digenrl.types import ScoredBatch

Device = Literal["cuda", "cpu"]

RESULTS = Path(__file__).parent / "results"

LARGEST_DIFFERENCE = {"cpu": 1e-5, "cuda": 1e-4}
"""Of gradients, over the largest entry: on a GPU, other batch sizes take other kernels."""

_DESCENT_LR = 1e4  # so large that the moved weights are the gradient, to float32's own precision
_NUM_WARM_UP = 2


@dataclass(frozen=True)
class Machine:
    """What there is to compute on."""

    device: Device
    name: str
    num_devices: int
    memory_bytes: int
    """Of a GPU; 0 on CPUs."""

    @property
    def num_pairs(self) -> int:
        """Generators, and as many trainers: a GPU for each if there are two, and at most four of either."""
        return 1 if self.device == "cpu" else min(max(self.num_devices // 2, 1), 4)

    @property
    def workers_per_device(self) -> int:
        """Workers that share a GPU: both of a pair, if there is one only."""
        return 2 if self.device == "cuda" and self.num_devices < 2 else 1


@dataclass(frozen=True)
class Check:
    """One thing that works or not."""

    name: str
    verdict: str
    """`ok`, `FAILED`, or why it was not run."""
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Rung:
    """Steps of a rung: medians, in seconds."""

    name: str
    step_s: float
    samples_per_s: float
    ratio_to_naive: float
    update_s: float
    """Of a step's updates on a trainer."""
    generate_s: float
    num_assisted: float
    stale_fraction: float
    sync_s: float
    """In which trainers publish."""
    load_s: float
    """In which a generator loads."""


# ---- runs ------------------------------------------------------------------------------------------------------


class _Recorder(pl.Callback):
    """Notes when steps end, what they report and what workers did."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy
        self.ends_s: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.spans: list[tuple[WorkerSpan, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.ends_s.append(time.monotonic())
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.spans.append(self._strategy.last_step_spans)


@dataclass(frozen=True)
class Job:
    """What a step consists of."""

    num_groups: int
    group_size: int
    num_steps: int
    """Denoising steps, of which half are trained."""


FULL_JOB = Job(num_groups=8, group_size=4, num_steps=4)
TINY_JOB = Job(num_groups=4, group_size=2, num_steps=2)


def _module(size: Size, job: Job, algorithm: type[FlowGRPO], lr: float) -> FlowGRPO:
    return algorithm(
        SmallFluxPolicy(size),
        brightness,
        group_size=job.group_size,
        num_steps=job.num_steps,
        timestep_fraction=0.5,
        clip_range=1e-2,
        lr=lr,
        seed=0,
    )


def _fit(
    machine: Machine, module: FlowGRPO, job: Job, *, max_steps: int, precision: Any, **settings: Any
) -> tuple[_Recorder, dict[str, Tensor]]:
    """Run steps; returns what was recorded and the trained weights after them."""
    pairs = machine.num_pairs
    strategy = DisaggregatedStrategy(
        **{
            "generators": pairs,
            "trainers": pairs,
            "workers_per_device": machine.workers_per_device,
            "task_timeout_s": 300.0,
            **settings,
        }
    )
    recorder = _Recorder(strategy)
    trainer = Trainer(
        strategy=strategy,
        accelerator=machine.device,
        devices=machine.num_devices,
        precision=precision,
        max_steps=max_steps,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prompts = PromptData(list(PROMPTS[: job.num_groups]), prompts_per_step=job.num_groups, seed=0)
    try:
        trainer.fit(module, prompts)
        return recorder, trained_weights(module)
    finally:
        strategy.shutdown()


def _precision(size: Size) -> Any:
    return "bf16-mixed" if size.base_dtype == torch.bfloat16 else "32-true"


def trained_weights(module: FlowGRPO) -> dict[str, Tensor]:
    """Give a copy of the weights that are trained, on the CPU."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: value.cpu().clone() for name, value in module.state_dict().items() if name in trained}


# ---- gradients -------------------------------------------------------------------------------------------------


def hand_written_gradient(device: Device, size: Size, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Do one step without Lightning and workers, a backward per timestep over all samples.

    Returns:
        The trained weights before it, and their gradient.
    """
    module = _module(size, job, Descent, _DESCENT_LR)
    module.configure_model()
    module.to(device)
    data = PromptData(list(PROMPTS[: job.num_groups]), prompts_per_step=job.num_groups, seed=0)
    prompts = module.prompt_batch(next(iter(data.train_dataloader())))
    with torch.no_grad():
        trajectory = module.rollout(prompts)
        rewards = module.score(trajectory).cpu()
    advantages = module.advantages(rewards, torch.tensor(prompts.group_ids))
    scored = ScoredBatch.of_groups(trajectory.to("cpu"), rewards, advantages).to(torch.device(device))
    timesteps = module.select_timesteps(prompts)
    for column in range(timesteps.shape[1]):
        losses = module.timestep_loss(scored.timestep_batch(timesteps[:, column : column + 1], first_column=column))
        (losses.sum() / timesteps.numel()).backward()
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return (
        {name: parameter.detach().cpu().clone() for name, parameter in trained.items()},
        {name: torch.zeros_like(p).cpu() if p.grad is None else p.grad.cpu() for name, p in trained.items()},
    )


@cache
def _reference(device: Device, size: Size, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if device == "cpu":
        return hand_written_gradient(device, size, job)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # this process leaves the GPU alone
        return pool.submit(hand_written_gradient, device, size, job).result()


def check_gradient(machine: Machine, size: Size, job: Job, *, name: str, **settings: Any) -> Check:
    """Compare the gradient of one step with the hand-written one."""
    before, expected = _reference(machine.device, size, job)
    module = _module(size, job, Descent, _DESCENT_LR)
    recorder, after = _fit(machine, module, job, max_steps=1, precision="32-true", **settings)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    difference = max(((before[key] - after[key]) / _DESCENT_LR - expected[key]).abs().max().item() for key in expected)
    figures = {
        "relative difference": difference / largest,
        "ratio/max_abs_dev": recorder.metrics[-1]["ratio/max_abs_dev"],
    }
    is_good = largest > 0 and difference / largest <= LARGEST_DIFFERENCE[machine.device]
    return Check(name, "ok" if is_good else "FAILED", figures)


# ---- weights and the ladder --------------------------------------------------------------------------------------


def check_plane(machine: Machine, size: Size, job: Job, plane: str, *, num_steps: int) -> Check:
    """Carry weights with one plane for some steps."""
    module = _module(size, job, FlowGRPO, 1e-4)
    settings = {"weight_plane": plane, "trainer_assist": "off"}
    recorder, weights = _fit(
        machine, module, job, max_steps=_NUM_WARM_UP + num_steps, precision=_precision(size), **settings
    )
    measured = recorder.metrics[_NUM_WARM_UP:]
    return Check(
        f"weights: {plane}",
        "ok",
        {
            "MB": sum(tensor.numel() * tensor.element_size() for tensor in weights.values()) / 1e6,
            "trainer ms": 1e3 * statistics.median(entry["time/sync_s"] for entry in measured),
            "load ms": 1e3 * _median_s(recorder.spans[_NUM_WARM_UP:], "sync", "generator"),
        },
    )


def climb(machine: Machine, size: Size, job: Job, *, num_steps: int, report: Callable[[str], None]) -> list[Rung]:
    """Run each rung of the ladder."""
    rungs: list[Rung] = []
    for name, settings in RUNGS.items():
        report(f"rung {name}")
        module = _module(size, job, FlowGRPO, 1e-4)
        # One step more than is looked at: with staleness, the last one has no step after it to work ahead for.
        recorder, _ = _fit(
            machine, module, job, max_steps=_NUM_WARM_UP + num_steps + 1, precision=_precision(size), **settings
        )
        kept = slice(_NUM_WARM_UP, _NUM_WARM_UP + num_steps)
        ends_s, spans, metrics = (
            recorder.ends_s[kept.start - 1 : kept.stop],
            recorder.spans[kept],
            recorder.metrics[kept],
        )
        step_s = (ends_s[-1] - ends_s[0]) / num_steps
        samples_per_s = job.num_groups * job.group_size / step_s
        rungs.append(
            Rung(
                name,
                step_s,
                samples_per_s,
                samples_per_s / rungs[0].samples_per_s if rungs else 1.0,
                statistics.median(_total_s(step, "update") for step in spans) / machine.num_pairs,
                statistics.median(_total_s(step, "generate") for step in spans) / machine.num_pairs,
                statistics.mean(entry["assist/micro_batches"] for entry in metrics),
                statistics.mean(entry["staleness/frac"] for entry in metrics),
                statistics.median(entry["time/sync_s"] for entry in metrics),
                _median_s(spans, "sync", "generator"),
            )
        )
    return rungs


def _total_s(step: Sequence[WorkerSpan], task: str) -> float:
    return sum(entry.span.seconds for entry in step if entry.task == task)


def _median_s(steps: Sequence[Sequence[WorkerSpan]], task: str, role: str) -> float:
    seconds = [
        entry.span.seconds for step in steps for entry in step if entry.task == task and entry.worker.startswith(role)
    ]
    return statistics.median(seconds) if seconds else 0.0


# ---- all of it -------------------------------------------------------------------------------------------------


def find_machine(device: Device) -> Machine:
    """Look at the devices of this machine, without a CUDA context in this process."""
    if device == "cpu":
        return Machine("cpu", "CPU", 1, 0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_find_gpus).result()


def _find_gpus() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    return Machine("cuda", properties.name, torch.cuda.device_count(), properties.total_memory)


def planes_of(machine: Machine) -> dict[str, str]:
    """Say for each weight plane why it is not checked; empty if it is."""
    shares = machine.workers_per_device > 1
    return {
        "shared_memory": "",
        "object_store": "",
        "collective": "needs two GPUs: NCCL does not let two processes share one" if shares else "",
    }


def run_checks(
    machine: Machine, size: Size, job: Job, *, num_steps: int, report: Callable[[str], None]
) -> tuple[list[Check], list[Rung]]:
    """Run everything; a check that raises has failed, and the others are run all the same."""
    checks: list[Check] = []

    def run(name: str, check: Callable[[], Check]) -> None:
        report(name)
        try:
            checks.append(check())
        except Exception as error:  # noqa: BLE001 (whatever goes wrong is the finding)
            checks.append(Check(name, f"FAILED: {type(error).__name__}: {error}".splitlines()[0], {}))

    run("gradient", lambda: check_gradient(machine, TINY, TINY_JOB, name="gradient"))
    if machine.device == "cpu" or machine.num_devices >= 3:
        sharded: dict[str, Any] = {"generators": 1, "trainers": 2, "sharding": "fsdp"}
        run("gradient, fsdp", lambda: check_gradient(machine, TINY, TINY_JOB, name="gradient, fsdp", **sharded))
    else:
        checks.append(Check("gradient, fsdp", "not run: needs three GPUs", {}))
    for plane, obstacle in planes_of(machine).items():
        if obstacle:
            checks.append(Check(f"weights: {plane}", f"not run: {obstacle}", {}))
        else:
            run(f"weights: {plane}", lambda plane=plane: check_plane(machine, size, job, plane, num_steps=num_steps))  # type: ignore[misc]
    rungs: list[Rung] = []
    try:
        rungs = climb(machine, size, job, num_steps=num_steps, report=report)
        checks.append(Check("ladder", "ok", {}))
    except Exception as error:  # noqa: BLE001 (see above)
        checks.append(Check("ladder", f"FAILED: {type(error).__name__}: {error}".splitlines()[0], {}))
    return checks, rungs


def check_table(checks: Sequence[Check]) -> Table:
    """Lay out what works."""
    table = Table(title="Checks")
    for header in ("", "verdict", "figures"):
        table.add_column(header, overflow="fold")
    for check in checks:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in check.figures.items())
        table.add_row(check.name, check.verdict, figures)
    return table


def ladder_table(rungs: Sequence[Rung], machine: Machine) -> Table:
    """Lay out the ladder, and the gain of timestep parallelism: update times of +GAP over those of +TSP."""
    updates = {rung.name: rung.update_s for rung in rungs}
    gain = updates["+GAP"] / updates["+TSP"] if updates.get("+TSP") else float("nan")
    shares = machine.workers_per_device > 1
    table = Table(
        title=f"Ladder: {machine.num_pairs} generators, {machine.num_pairs} trainers on {machine.name}",
        caption=f"updates {gain:.2f} times as fast with all timesteps at once (+TSP)"
        + ("; workers share a GPU, so that what overlaps competes" if shares else ""),
    )
    for header in ("", "samples/s", "x naive", "step s", "update s", "generate s", "assisted", "stale", "sync ms"):
        table.add_column(header, justify="right" if header else "left")
    for rung in rungs:
        table.add_row(
            rung.name,
            f"{rung.samples_per_s:.2f}",
            f"{rung.ratio_to_naive:.2f}",
            *(f"{seconds:.3f}" for seconds in (rung.step_s, rung.update_s, rung.generate_s)),
            f"{rung.num_assisted:.1f}",
            f"{rung.stale_fraction:.2f}",
            f"{rung.sync_s * 1e3:.1f}",
        )
    return table


def as_json(
    machine: Machine, size: Size, job: Job, checks: Sequence[Check], rungs: Sequence[Rung], seconds: float
) -> dict[str, Any]:
    """Give all figures, with what they were measured on."""
    return {
        "machine": {
            **asdict(machine),
            "num_cpus": os.cpu_count(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "size": {**asdict(size), "base_dtype": str(size.base_dtype)},
        "job": asdict(job),
        "checks": [asdict(check) for check in checks],
        "ladder": [asdict(rung) for rung in rungs],
        "seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, print the tables, write the figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("auto", "tiny", "1", "2", "3", "4"), default="auto",
                        help="double blocks of FLUX.1's width, or what fits into the GPU's memory")  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--json", type=Path, help=f"file for all figures ({RESULTS.name}/gpu_check-DEVICE-SIZE.json)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"`--steps` is a count and must be at least 1, got {options.steps}")
    if options.device == "cpu" and options.size != "tiny":
        parser.error("`--device cpu` needs `--size tiny`: blocks of FLUX.1's width take minutes each there")
    machine = find_machine(options.device)
    size, job = _size(options.size, machine), TINY_JOB if options.size == "tiny" else FULL_JOB
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    status, console = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 160)
    start_s = time.monotonic()
    checks, rungs = run_checks(
        machine,
        size,
        job,
        num_steps=options.steps,
        report=lambda text: status.print(f"{time.monotonic() - start_s:5.0f} s  {text}", style="dim", highlight=False),
    )
    console.print(check_table(checks))
    if rungs:
        console.print(ladder_table(rungs, machine))
    slug = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
    path = options.json or RESULTS / f"gpu_check-{slug}-{options.size}.json"
    figures = as_json(machine, size, job, checks, rungs, time.monotonic() - start_s)
    path.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"all figures: {path}", highlight=False)
    return 1 if any(check.verdict.startswith("FAILED") for check in checks) else 0


def _size(name: str, machine: Machine) -> Size:
    if name == "tiny":
        return TINY
    if name != "auto":
        return large(int(name))
    return largest_that_fits(machine.memory_bytes, machine.workers_per_device)


if __name__ == "__main__":
    sys.exit(main())
