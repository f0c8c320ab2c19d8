"""The throughput ladder on real processes: `python -m benchmarks.ladder` from the repository's root.

Two cores: one generator and one trainer process of one thread each, against two data-parallel ranks of one thread each.
All contestants of a job take turns in short rounds, so that what else the machine does strikes all alike; figures are
medians over rounds, ratios are taken within a round. Processes of the same code differ by some percent from start to
start, so all are started anew after some rounds. Set `OMP_NUM_THREADS=1`.

Contestants:
- naive, +GAP, +TSP, +TAG, +TCSS: digenrl on separate processes, each with one mechanism more than the one before.
- colocated: digenrl's module under Lightning's stock DDP strategy. It makes all samples of a rank in one batch of 32,
  as `training_step` does under any stock strategy, and trains one timestep at a time.
- loop, batched loop: the hand-written loop of `benchmarks/baselines`, with one timestep and with all at a time.

Jobs: `reference`; `generation-heavy`, where half of the samples are trained; `mixed-speed`, where one process does its
network work twice: the generator, or the second rank of the colocated run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import jobs
from benchmarks.contestants import NUM_RANKS, Contestant, Disaggregated, Round, StageCosts, TwoRanks
from benchmarks.jobs import Variant
from benchmarks.machine import OtherLoad
from digenrl.scheduling import SchedulingPolicy
from digenrl.scheduling.simulate import Cluster, Workload, fluid_bound_s, simulate

_NAIVE: dict[str, Any] = {"groups_per_micro_batch": "all", "timestep_batch_size": 1, "trainer_assist": "off"}
_GAP = {**_NAIVE, "groups_per_micro_batch": 1}
_TSP = {**_GAP, "timestep_batch_size": "all"}
_TAG = {**_TSP, "trainer_assist": "optimal"}
_TCSS = {**_TAG, "staleness": 0.25}

RUNGS: dict[str, dict[str, Any]] = {"naive": _NAIVE, "+GAP": _GAP, "+TSP": _TSP, "+TAG": _TAG, "+TCSS": _TCSS}
"""Settings of the strategy."""

TWO_RANKS = {"colocated": "colocated", "loop": "loop", "batched loop": "batched loop"}

_NUM_SIMULATED_STEPS = 20
_QUIET_SHARE = 0.05
"""Of the machine's processor time: a turn in which others take less is not repeated."""


@dataclass(frozen=True)
class Row:
    """A contestant's figures: medians over rounds."""

    contestant: str
    samples_per_s: float
    """By the wall clock."""
    lowest_samples_per_s: float
    """Of any round; a wide range means a busy machine."""
    highest_samples_per_s: float
    reported_samples_per_s: float | None
    """By the strategy's own `time/step_s`, which leaves out what happens between steps."""
    ratio_to_naive: float | None
    """Median of the ratios within rounds; so for the next two."""
    ratio_to_batched_loop: float | None
    ratio_to_colocated: float | None
    step_s: float
    """Wall clock of a step."""
    fluid_bound_s: float | None
    """Least seconds of a step on these workers, from this contestant's own stage costs: of the generator and trainer
    for digenrl, of two equal ranks without any waiting for the loops."""
    efficiency: float | None
    """Fluid bound over wall clock."""
    simulated_step_s: float | None
    """What the scheduler takes with these stage costs and no overhead between tasks."""
    bubbles: dict[str, float]
    """Share of the wall clock in which a worker has no task."""
    num_assisted: float
    """Micro-batches per step that the trainer made."""
    stale_fraction: float
    costs: StageCosts | None
    gaps_s: dict[str, float]
    """Median seconds between tasks of a worker, by kind."""
    others_cpu: float
    """Share of the machine's processor time that other processes took; the less, the better the figures."""


@dataclass(frozen=True)
class JobResult:
    """The ladder of one job."""

    variant: Variant
    size: str
    num_rounds: int
    num_steps: int
    """Measured steps of a round."""
    rows: tuple[Row, ...]


def measure_job(
    size: str,
    variant: Variant,
    *,
    num_steps: int,
    num_rounds: int,
    num_starts: int = 1,
    num_warm_up: int = 2,
    contestants: Sequence[str] = (*RUNGS, *TWO_RANKS),
    num_tries: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> JobResult:
    """Run the ladder of one job.

    Args:
        size: of the transformer.
        variant: of the job.
        num_steps: measured steps of a round.
        num_rounds: turns of each contestant from one start to the next.
        num_starts: how often all processes are started.
        num_warm_up: steps before the measured ones, in every round.
        contestants: names of those that take part.
        num_tries: how often a turn is repeated if others keep the machine busy; the quietest one counts.
        report: is told what is being done.
    """
    names = [name for name in contestants if variant != "mixed-speed" or "loop" not in name]
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    for start in range(num_starts):
        turn = f"{variant} {size}: start {start + 1} of {num_starts}"
        with ExitStack() as running:
            entered: list[Contestant] = []
            for name in names:
                report(f"{turn}, {name}")
                entered.append(running.enter_context(closing(_make(name, size, variant))))
                entered[-1].run(1, num_warm_up=1)  # processes, imports and memory
            for index in range(num_rounds):
                # Forwards and backwards in turn, so that no contestant always follows the same one.
                for contestant in entered if index % 2 == 0 else reversed(entered):
                    report(f"{turn}, round {index + 1} of {num_rounds}, {contestant.name}")
                    rounds[contestant.name].append(_run(contestant, num_steps, num_warm_up, num_tries))
    rows = tuple(summarize(name, variant, rounds) for name in names)
    return JobResult(variant, size, num_starts * num_rounds, num_steps, rows)


def _make(name: str, size: str, variant: Variant) -> Contestant:
    if name in RUNGS:
        return Disaggregated(name, size, variant, **RUNGS[name])
    return TwoRanks(name, TWO_RANKS[name], size, variant)


def _run(contestant: Contestant, num_steps: int, num_warm_up: int, num_tries: int) -> Round:
    tries: list[Round] = []
    while len(tries) < num_tries and (not tries or tries[-1].others_cpu > _QUIET_SHARE):
        load = OtherLoad()
        measured = contestant.run(num_steps, num_warm_up=num_warm_up)
        tries.append(replace(measured, others_cpu=load.share()))
    return min(tries, key=lambda entry: entry.others_cpu)


def summarize(name: str, variant: Variant, rounds: dict[str, list[Round]]) -> Row:
    """Take medians over a contestant's rounds, and ratios with others within rounds."""
    own = rounds[name]

    def ratio_to(other: str) -> float | None:
        if other not in rounds:
            return None
        pairs = zip(own, rounds[other], strict=True)
        return statistics.median(ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs)

    step_s = statistics.median(statistics.mean(entry.wall_s) for entry in own)
    bounds_s = [bound for entry in own if (bound := bound_s(name, entry)) is not None]
    simulated_s = [simulated_step_s(name, entry) for entry in own if name in RUNGS]
    throughputs = [entry.samples_per_s for entry in own]
    reported = [jobs.NUM_SAMPLES / statistics.mean(entry.reported_s) for entry in own if entry.reported_s]
    efficiencies = [bound / statistics.mean(entry.wall_s) for bound, entry in zip(bounds_s, own, strict=False)]
    costs = [entry.costs for entry in own if entry.costs is not None]
    return Row(
        contestant=name,
        samples_per_s=statistics.median(throughputs),
        lowest_samples_per_s=min(throughputs),
        highest_samples_per_s=max(throughputs),
        reported_samples_per_s=_median(reported),
        ratio_to_naive=ratio_to("naive"),
        ratio_to_batched_loop=ratio_to("batched loop"),
        ratio_to_colocated=ratio_to("colocated"),
        step_s=step_s,
        fluid_bound_s=_median(bounds_s),
        efficiency=_median(efficiencies),
        simulated_step_s=_median(simulated_s),
        bubbles=_medians([entry.bubbles for entry in own]),
        num_assisted=statistics.mean(entry.num_assisted for entry in own),
        stale_fraction=statistics.mean(entry.stale_fraction for entry in own),
        costs=_median_costs(costs) if costs else None,
        gaps_s=_medians([entry.gaps_s for entry in own]),
        others_cpu=statistics.median(entry.others_cpu for entry in own),
    )


def workload_of(name: str, costs: StageCosts) -> Workload:
    """Describe the job to the simulator."""
    return Workload(
        num_groups=len(jobs.PROMPTS),
        group_size=jobs.GROUP_SIZE,
        generate_s=costs.generate_s,
        score_s=costs.score_s,
        update_s=costs.update_s,
        assist_s=costs.assist_s,
        groups_per_micro_batch=RUNGS[name]["groups_per_micro_batch"] if name in RUNGS else 1,
        generation_batch_size=jobs.GENERATION_BATCH_SIZE,
        optimizer_s=costs.optimizer_s,
        publish_s=costs.publish_s,
        load_s=costs.load_s,
    )


def bound_s(name: str, measured: Round) -> float | None:
    """Give the least seconds of a step, by the stage costs that were measured in the round itself.

    For digenrl it is that of as many steps as the round has, without any waiting for weights, whether or not the rung
    may be stale. Workers' speeds are in the costs already.
    """
    if measured.costs is None:
        return None
    if name not in RUNGS:
        per_sample_s = measured.costs.generate_s + measured.costs.update_s
        return per_sample_s * jobs.NUM_SAMPLES / NUM_RANKS + measured.costs.optimizer_s
    num_steps = len(measured.wall_s)
    workload = workload_of(name, measured.costs)
    return fluid_bound_s(Cluster(generators=1, trainers=1), workload, num_steps=num_steps) / num_steps


def simulated_step_s(name: str, measured: Round) -> float:
    """Give the seconds of a step of a rung if nothing but its stages took time."""
    assert measured.costs is not None, "rungs measure their stages"
    settings = RUNGS[name]
    policy = SchedulingPolicy(settings["trainer_assist"], settings.get("staleness", 0.0))
    cluster, workload = Cluster(generators=1, trainers=1), workload_of(name, measured.costs)
    return statistics.median(
        simulate(cluster, workload, policy, num_steps=_NUM_SIMULATED_STEPS, record_spans=False).step_s
    )


def table_of(result: JobResult) -> Table:
    """Lay a job's ladder out for people."""
    table = Table(
        title=f"{result.variant} {result.size}: medians of {result.num_rounds} rounds of {result.num_steps} steps",
        caption=(
            "samples/s by the wall clock (range over rounds); ratios within rounds; eff: fluid bound / wall clock; "
            "gen, assist, update: ms of 8 samples; others: share of the processors that other processes took"
        ),
    )
    for header in (
        "", "samples/s", "range", "x naive", "x loop", "x coloc", "step ms", "bound ms", "eff", "simul ms",
        "bubbles g/t", "assisted", "stale", "gen", "assist", "update", "opt+sync", "others",
    ):  # fmt: skip
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for row in result.rows:
        costs = row.costs
        table.add_row(
            row.contestant,
            f"{row.samples_per_s:.1f}",
            f"{row.lowest_samples_per_s:.0f}-{row.highest_samples_per_s:.0f}",
            _show(row.ratio_to_naive, ".2f"),
            _show(row.ratio_to_batched_loop, ".2f"),
            _show(row.ratio_to_colocated, ".2f"),
            f"{row.step_s * 1e3:.0f}",
            _show(row.fluid_bound_s, ".0f", 1e3),
            _show(row.efficiency, ".2f"),
            _show(row.simulated_step_s, ".0f", 1e3),
            "/".join(f"{share:.2f}" for share in row.bubbles.values()),
            f"{row.num_assisted:.1f}" if row.contestant in RUNGS else "",
            f"{row.stale_fraction:.2f}" if row.contestant in RUNGS else "",
            # Milliseconds of 8 samples.
            _show(costs.generate_s if costs else None, ".1f", 1e3 * jobs.GROUP_SIZE),
            _show(costs.assist_s if costs else None, ".1f", 1e3 * jobs.GROUP_SIZE),
            _show(costs.update_s if costs else None, ".1f", 1e3 * jobs.GROUP_SIZE),
            _show(costs.optimizer_s + costs.publish_s if costs else None, ".1f", 1e3),
            f"{row.others_cpu:.2f}",
        )
    return table


def as_json(results: Sequence[JobResult]) -> dict[str, Any]:
    """Give all figures, with what the machine was doing."""
    return {
        "machine": {"num_cpus": os.cpu_count(), "load_average": os.getloadavg(), "torch": torch.__version__},
        "job": {
            "num_samples": jobs.NUM_SAMPLES,
            "group_size": jobs.GROUP_SIZE,
            "num_steps": jobs.NUM_STEPS,
            "num_trained_timesteps": jobs.NUM_TRAINED_TIMESTEPS,
            "generation_batch_size": jobs.GENERATION_BATCH_SIZE,
        },
        "results": [asdict(result) for result in results],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ladder, print a table per job and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=jobs.SIZES, default=list(jobs.SIZES), help="of the transformer")
    parser.add_argument(
        "--variants", nargs="+", choices=get_args(Variant), default=list(get_args(Variant)), help="of the job"
    )
    parser.add_argument("--contestants", nargs="+", choices=(*RUNGS, *TWO_RANKS), default=[*RUNGS, *TWO_RANKS])
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant from one start to the next")
    parser.add_argument("--starts", type=int, default=3, help="how often all processes are started anew")
    parser.add_argument("--tries", type=int, default=3, help="repeat a turn if others keep the machine busy")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--quick", action="store_true", help="one size, the reference job, one start, two short rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.variants = options.sizes[:1], ["reference"]
        options.steps, options.rounds, options.starts = 2, 2, 1
    if min(options.steps, options.rounds, options.starts, options.tries) < 1:
        parser.error("`--steps`, `--rounds`, `--starts` and `--tries` are counts and must be at least 1")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 200)
    status = Console(stderr=True)
    results = []
    for variant in options.variants:
        for size in options.sizes:
            result = measure_job(
                size,
                variant,
                num_steps=options.steps,
                num_rounds=options.rounds,
                num_starts=options.starts,
                contestants=options.contestants,
                num_tries=options.tries,
                report=lambda text: status.print(text, style="dim", highlight=False),
            )
            results.append(result)
            console.print(table_of(result))
            console.print("load average", *(f"{load:.1f}" for load in os.getloadavg()), highlight=False)
            if options.json is not None:
                options.json.write_text(json.dumps(as_json(results), indent=1) + "\n")


def _show(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _medians(entries: Sequence[dict[str, float]]) -> dict[str, float]:
    """Take the median of each key's values, over the entries that have it."""
    keys = dict.fromkeys(key for entry in entries for key in entry)
    return {key: statistics.median(entry[key] for entry in entries if key in entry) for key in keys}


def _median_costs(costs: Sequence[StageCosts]) -> StageCosts:
    assisted = [entry.assist_s for entry in costs if entry.assist_s is not None]
    return StageCosts(
        generate_s=statistics.median(entry.generate_s for entry in costs),
        score_s=statistics.median(entry.score_s for entry in costs),
        update_s=statistics.median(entry.update_s for entry in costs),
        assist_s=_median(assisted),
        optimizer_s=statistics.median(entry.optimizer_s for entry in costs),
        publish_s=statistics.median(entry.publish_s for entry in costs),
        load_s=statistics.median(entry.load_s for entry in costs),
    )


if __name__ == "__main__":
    main()
