"""`digenrl simulate`: the ladder of execution modes on a cluster and a workload, without either."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.cli.arguments import Arguments, read_arguments
from digenrl.cli.errors import SettingError, UsageError, show, suggest
from digenrl.cli.merge import merge
from digenrl.cli.settings import build, check_names, convert, explained, take_flags
from digenrl.cli.sources import Source
from digenrl.scheduling import SchedulingPolicy
from digenrl.scheduling.simulate import (
    Cluster,
    Mode,
    SimulationResult,
    Workload,
    ladder_modes,
    trace_events,
)

HELP = """\
usage: digenrl simulate --config FILE [--format table|json] [--timeline FILE] [--gantt FILE] [--key value]...

Run the real scheduler against a virtual clock and compare the ways to run a workload on a cluster: colocated, naive
disaggregated, and what pipelining along the generation axis (GAP), batched timesteps (TSP), assisting trainers (TAG)
and samples made one version early (TCSS) add to it.

options:
  -c, --config FILE     cluster, workload and policy in YAML, as examples/simulate.yaml; options win over it
  --format table|json   what to print (default: table)
  --timeline FILE       write what each worker does, for https://ui.perfetto.dev
  --gantt FILE          draw the modes below each other, as PNG, PDF or SVG (needs matplotlib)
  --num_steps N         optimizer steps to simulate (default: 10)
  --seed N              seed of the jitter (default: 0)
  -h, --help            show this

settings:
  --cluster.generators INT                workers that make samples
  --cluster.trainers INT                  data-parallel workers that train
  --cluster.reward_workers INT            workers that only score (default: 0, generators score)
  --cluster.generator_speeds LIST         a factor for each generator (default: all 1)
  --cluster.trainer_speed NUMBER          factor of the slowest trainer (default: 1)
  --cluster.failures LIST                 [[seconds, worker], ...]: when a worker is lost
  --cluster.restart_s NUMBER              seconds until a lost generator is back (default: it is not)
  --workload.num_groups INT               prompts of a step
  --workload.group_size INT               samples per prompt
  --workload.groups_per_micro_batch INT   groups that are generated, scored and trained as a unit (default: 1)
  --workload.generation_batch_size INT    most samples that a generator makes at a time (default: no bound)
  --workload.generate_s NUMBER            seconds of a sample on one worker; so for score_s, update_s and assist_s.
                                          update_s may be {1: SECONDS, all: SECONDS}: one timestep or all at a time
  --workload.generate_call_s NUMBER       seconds of each call beside its samples; so for score, update and assist
  --workload.optimizer_s NUMBER           seconds of the optimizer step; so for publish_s, load_s and switch_s
  --workload.jitter NUMBER                sigma of a lognormal factor on the cost of samples (default: 0)
  --policy.trainer_assist TEXT            off, static:K, search or optimal (default: optimal)
  --policy.staleness NUMBER               largest stale fraction of a step (default: 0.25)
  --policy.staleness_mode cap|exact       (default: cap)
"""

_FLAGS = ("format", "timeline", "gantt")
_KEYS = ("cluster", "workload", "policy", "num_steps", "seed")
_PICTURES = (".png", ".pdf", ".svg")
_DEFAULT_POLICY = {"trainer_assist": "optimal", "staleness": 0.25}
_MIN_WIDTH = 120  # the table's


@dataclass(frozen=True)
class Job:
    """What is to be simulated."""

    cluster: Cluster
    modes: tuple[Mode, ...]
    num_steps: int
    seed: int


def run(words: Sequence[str]) -> int:
    """Simulate the ladder, print it and write what is asked for; returns the exit code.

    Raises:
        UsageError: wrong input.
    """
    arguments = read_arguments(words)
    if arguments.show_help:
        print(HELP, end="")
        return 0
    flags = take_flags(arguments, _FLAGS, "simulate")
    form = flags.get("format", "table")
    if form not in ("table", "json"):
        raise UsageError(f"`--format` must be table or json, got `{form}`{suggest(form, ('table', 'json'))}")
    outputs = {name: _output(name, flags[name]) for name in ("timeline", "gantt") if name in flags}
    job = read_job(arguments)
    if "gantt" in outputs:
        _check_picture(outputs["gantt"])
    results = [
        mode.simulate(job.cluster, num_steps=job.num_steps, seed=job.seed, record_spans="timeline" in outputs)
        for mode in job.modes
    ]
    if form == "json":
        print(json.dumps(as_dict(job, results), indent=2))
    else:
        print_table(job, results)
    if "timeline" in outputs:
        outputs["timeline"].write_text(json.dumps(trace(job, results)), encoding="utf-8")
    if "gantt" in outputs:
        from digenrl.cli.gantt import draw_modes

        draw_modes(job.cluster, job.modes, seed=job.seed).savefig(outputs["gantt"])
    return 0


def read_job(arguments: Arguments) -> Job:
    """Check a configuration.

    Raises:
        UsageError: wrong input; the message says where it stands.
    """
    if not arguments.sources:
        raise UsageError("`--config FILE` is missing; examples/simulate.yaml is one.")
    sources = arguments.sources
    try:
        return _read_job(sources)
    except SettingError as error:
        raise explained(error, sources) from error


def print_table(job: Job, results: Sequence[SimulationResult]) -> None:
    """Print the ladder."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    cluster, workload = job.cluster, job.modes[-1].workload
    console = Console()
    if console.width < _MIN_WIDTH and not console.is_terminal:
        console = Console(width=_MIN_WIDTH)
    console.print(f"{_cluster_text(cluster)}, {_step_text(workload)}", style="bold", highlight=False)
    table = Table(box=SIMPLE_HEAD, header_style="none", pad_edge=False)
    for name in ("mode", "change"):
        table.add_column(name, no_wrap=name == "mode")
    for name in ("s/step", "samples/s", "x naive", "gen.", "train.", "bubbles", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for mode, result, ratio in zip(job.modes, results, _ratios(job, results), strict=True):
        busy = result.utilization
        table.add_row(
            mode.name,
            mode.change,
            _digits(result.mean_step_s),
            _digits(result.samples_per_s),
            f"{ratio:.2f}",
            f"{busy.get('generators', busy.get('devices', 0.0)):.0%}",
            f"{busy.get('trainers', busy.get('devices', 0.0)):.0%}",
            f"{result.bubble_share:.0%}",
            f"{result.efficiency:.2f}",
        )
    console.print(table)
    console.print(
        f"Means of {job.num_steps} steps. gen., train.: share of the time in which generators and trainers compute. "
        "bubbles: share of all workers' time without a task. efficiency: share of the fluid bound, the best possible "
        "time of an infinitely divisible workload on the same workers.",
        style="dim",
        highlight=False,
    )


def as_dict(job: Job, results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Give the ladder's figures, times in seconds."""
    return {
        "num_steps": job.num_steps,
        "seed": job.seed,
        "generators": job.cluster.generators,
        "trainers": job.cluster.trainers,
        "reward_workers": job.cluster.reward_workers,
        "modes": [
            {
                "name": mode.name,
                "change": mode.change,
                "mean_step_s": result.mean_step_s,
                "step_s": result.step_s,
                "makespan_s": result.makespan_s,
                "samples_per_s": result.samples_per_s,
                "ratio_to_naive": ratio,
                "utilization": result.utilization,
                "bubble_share": result.bubble_share,
                "bubbles": result.bubbles,
                "fluid_bound_s": result.fluid_bound_s,
                "efficiency": result.efficiency,
                "num_assisted": result.num_assisted,
                "stale_fraction": result.stale_fraction,
            }
            for mode, result, ratio in zip(job.modes, results, _ratios(job, results), strict=True)
        ],
    }


def trace(job: Job, results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Give the timelines of all modes in Chrome's trace event format: a process per mode, a thread per worker."""
    events: list[object] = []
    for process, (mode, result) in enumerate(zip(job.modes, results, strict=True), 1):
        events += trace_events(result.spans, result.workers, name=mode.name, process=process)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _read_job(sources: Sequence[Source]) -> Job:
    config = merge(sources, lambda name: None)
    check_names(config, _KEYS, (), "a key of the configuration of `digenrl simulate`")
    for key in ("cluster", "workload"):
        if config.get(key) is None:
            raise SettingError((key,), "is missing: a mapping; examples/simulate.yaml has one.")
    cluster = build(Cluster, config["cluster"], ("cluster",), sources)
    given = config["workload"]
    one_timestep_update_s = None
    if isinstance(given, dict) and isinstance(given.get("update_s"), dict):
        one_timestep_update_s, update_s = _update_costs(given["update_s"])
        given = {**given, "update_s": update_s}
    workload = build(Workload, given, ("workload",), sources)
    size = workload.micro_batch_groups * workload.group_size
    if size < cluster.trainers:
        raise SettingError(
            ("workload", "groups_per_micro_batch"),
            f"makes micro-batches of {size} samples, which cannot be split over {cluster.trainers} trainers; raise it.",
        )
    given = {} if config.get("policy") is None else config["policy"]
    given = _DEFAULT_POLICY | given if isinstance(given, dict) else given
    policy = build(SchedulingPolicy, given, ("policy",), sources)
    num_steps = convert(config.get("num_steps", 10), int, ("num_steps",))
    if num_steps < 1:
        raise SettingError(("num_steps",), f"counts optimizer steps and must be at least 1, got {num_steps}.")
    modes = ladder_modes(
        workload,
        one_timestep_update_s=one_timestep_update_s,
        trainer_assist=policy.trainer_assist,
        staleness=policy.staleness,
        staleness_mode=policy.staleness_mode,
    )
    return Job(cluster, modes, num_steps, convert(config.get("seed", 0), int, ("seed",)))


def _update_costs(given: dict[Any, Any]) -> tuple[float, float]:
    keys = ("workload", "update_s")
    by_size = {str(size): value for size, value in given.items()}
    check_names(by_size, ("1", "all"), keys, "a number of timesteps at a time")
    if len(by_size) != 2:
        raise SettingError(keys, "must give seconds for 1 timestep and for all at a time, {1: SECONDS, all: SECONDS}.")
    one_s, all_s = (convert(by_size[size], float, (*keys, size)) for size in ("1", "all"))
    for size, seconds in (("1", one_s), ("all", all_s)):
        if not seconds > 0:
            raise SettingError((*keys, size), f"is the cost of a sample and must be above 0, got {seconds}.")
    return one_s, all_s


def _ratios(job: Job, results: Sequence[SimulationResult]) -> list[float]:
    """Give the speed of each mode relative to the naive one."""
    naive_s = next(result.makespan_s for mode, result in zip(job.modes, results, strict=True) if mode.name == "naive")
    return [naive_s / result.makespan_s for result in results]


def _digits(value: float) -> str:
    """Write four digits, and all of a large number's."""
    return f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}"


def _cluster_text(cluster: Cluster) -> str:
    text = f"{cluster.generators} generators + {cluster.trainers} trainers"
    return f"{text} + {cluster.reward_workers} reward workers" if cluster.reward_workers else text


def _step_text(workload: Workload) -> str:
    return f"{workload.num_groups} groups of {workload.group_size} samples a step"


def _output(name: str, text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise UsageError(f"`--{name}` must be a file, `{path}` is a folder.")
    if not path.parent.is_dir():
        raise UsageError(f"`--{name}`: there is no folder `{path.parent}`.")
    return path


def _check_picture(path: Path) -> None:
    if path.suffix.lower() not in _PICTURES:
        raise UsageError(f"`--gantt` must end in {', '.join(_PICTURES)}, got {show(str(path))}.")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            "`--gantt` needs `matplotlib`, which is not installed: `pip install digenrl[plot]`."
        ) from error
