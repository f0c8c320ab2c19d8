"""What each algorithm makes of the digits: `python -m benchmarks.algorithms` from the repository's root.

Runs the configurations of `examples/digits` as a user would, one after the other, each in a run folder of its own that
is removed afterwards, and says how many steps the validation reward took to 0.95. A validation every 10 steps. Rewards
and steps depend on the seed only, seconds on the machine: one generator and one trainer process, so two quiet cores.
Set `OMP_NUM_THREADS=1`.

Needs the base policy: `python examples/digits/pretrain.py --output runs/digits/base.safetensors`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "digits"
DOCS = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Lines of the document between which the measured table stands."""

TARGET = 0.95
VALIDATION_INTERVAL = 10
HEADERS = ("algorithm", "paper", f"steps to {TARGET}", "steps", "seconds", "reward at start", "at the end")


@dataclass(frozen=True)
class Algorithm:
    """A configuration's algorithm, for people."""

    title: str
    paper: str
    """Its number on arXiv."""


ALGORITHMS = {
    "flow_grpo": Algorithm("Flow-GRPO", "2505.05470"),
    "flow_grpo_fast": Algorithm("Flow-GRPO-Fast", "2505.05470"),
    "flow_cps": Algorithm("Flow-CPS", "2509.05952"),
    "dance_grpo": Algorithm("DanceGRPO", "2505.07818"),
    "mix_grpo": Algorithm("MixGRPO", "2507.21802"),
    "grpo_guard": Algorithm("GRPO-Guard", "2510.22319"),
    "dgpo": Algorithm("DGPO", "2510.08425"),
    "diffusion_nft": Algorithm("DiffusionNFT", "2509.16117"),
    "awm": Algorithm("AWM", "2509.25050"),
    "crd": Algorithm("CRD", "2603.14128"),
    "online_dpo": Algorithm("Online DPO", "2311.12908"),
}
"""By the name of the configuration in `examples/digits`."""


@dataclass(frozen=True)
class Run:
    """One run of a configuration."""

    seed: int
    rewards: tuple[tuple[int, float], ...]
    """Validation rewards, each after how many steps."""
    wall_s: float
    """Of the whole command."""

    @property
    def num_steps_to_target(self) -> int | None:
        """Steps at the first validation that reached the target; None if none did."""
        return next((step for step, reward in self.rewards if reward >= TARGET), None)


@dataclass(frozen=True)
class Row:
    """A configuration's figures: the worst of its runs, but for the seconds."""

    name: str
    title: str
    paper: str
    num_steps_to_target: int | None
    """Most of any run; None if a run did not reach it."""
    num_steps: int
    wall_s: float
    """Of the quickest run: others on the machine slow the rest down."""
    first_reward: float
    last_reward: float
    """Lowest of any run."""
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, name: str, runs: Sequence[Run]) -> Row:
        """Summarize the runs of a configuration."""
        steps = [run.num_steps_to_target for run in runs]
        reached = [count for count in steps if count is not None]
        return cls(
            name=name,
            title=ALGORITHMS[name].title,
            paper=ALGORITHMS[name].paper,
            num_steps_to_target=max(reached) if len(reached) == len(steps) else None,
            num_steps=max(run.rewards[-1][0] for run in runs),
            wall_s=min(run.wall_s for run in runs),
            first_reward=min(run.rewards[0][1] for run in runs),
            last_reward=min(run.rewards[-1][1] for run in runs),
            runs=tuple(runs),
        )

    def cells(self, paper: str) -> tuple[str, ...]:
        """Give the cells of its line in a table, with the paper as it is shown there."""
        return (
            self.title,
            paper,
            "not reached" if self.num_steps_to_target is None else str(self.num_steps_to_target),
            str(self.num_steps),
            f"{self.wall_s:.0f}",
            f"{self.first_reward:.3f}",
            f"{self.last_reward:.3f}",
        )


def measure(name: str, seed: int, *, options: Sequence[str] = ()) -> Run:
    """Run a configuration of `examples/digits`.

    Args:
        name: of the configuration.
        seed: of the noise and of the prompts' order.
        options: more of the command line.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="digenrl-") as folder:
        command = [
            *(sys.executable, "-m", "digenrl", "fit", "--config", str(EXAMPLES / f"{name}.yaml")),
            *("--model.seed", str(seed), "--data.seed", str(seed), "--trainer.default_root_dir", folder),
            *("--trainer.val_check_interval", str(VALIDATION_INTERVAL), *options),
        ]
        start_s = time.monotonic()
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        wall_s = time.monotonic() - start_s
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command[1:])} gave {result.returncode}:\n{result.stderr.strip()[-2000:]}")
        return Run(seed, read_rewards(Path(folder) / "version_0" / "metrics.csv"), wall_s)


def read_rewards(metrics: Path) -> tuple[tuple[int, float], ...]:
    """Read the validation rewards of a run that validates first, each after how many steps."""
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/reward/mean")]
    # The logged step is the index of the last one that was made: 0 is both before the first and after it.
    return tuple(
        (int(row["step"]) + 1 if index > 0 else 0, float(row["val/reward/mean"])) for index, row in enumerate(rows)
    )


def table_of(rows: Sequence[Row]) -> Table:
    """Lay the figures out for people."""
    seeds = " and ".join(str(run.seed) for run in rows[0].runs)
    table = Table(
        title=f"digits, seed {seeds}", caption="steps and rewards are the worst of the seeds, seconds the least"
    )
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("algorithm", "paper") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells(f"arXiv:{row.paper}"))
    return table


def write_docs(rows: Sequence[Row], document: Path = DOCS) -> None:
    """Put the figures into the document's table; lines of algorithms that were not measured stay as they are.

    Raises:
        ValueError: the document has no place for the table.
    """
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} must have the lines {BEGIN} and {END}, between which the table is written.")
    lines = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("|")}
    lines.update((row.title, _line(row.cells(f"[{row.paper}](https://arxiv.org/abs/{row.paper})"))) for row in rows)
    titles = [algorithm.title for algorithm in ALGORITHMS.values() if algorithm.title in lines]
    rule = "|---|---|" + "---:|" * (len(HEADERS) - 2)
    table = [_line(HEADERS), rule, *(lines[title] for title in titles)]
    document.write_text("\n".join([before + begin, *table, end + after]))


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Give all figures, with what the machine was doing."""
    return {
        "machine": {"num_cpus": os.cpu_count(), "load_average": os.getloadavg(), "torch": torch.__version__},
        "target": TARGET,
        "results": [asdict(row) for row in rows],
    }


def measure_seeds(name: str, seeds: Sequence[int], report: Callable[[str], None]) -> Row:
    """Run a configuration with each seed; `report` is told what is being done."""
    runs = []
    for seed in seeds:
        report(f"{name}, seed {seed}")
        runs.append(measure(name, seed))
        report(f"  {runs[-1].wall_s:.0f} s: " + ", ".join(f"{reward:.3f}" for _, reward in runs[-1].rewards))
    return Row.of(name, runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the configurations, print a table and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="a run of each configuration for each")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--write-docs", action="store_true", help=f"put the figures into {DOCS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    status = Console(stderr=True)
    rows: list[Row] = []
    for name in options.algorithms:
        rows.append(
            measure_seeds(
                name, options.seeds, lambda text: status.print(text, style="dim", highlight=False, soft_wrap=True)
            )
        )
        if options.json is not None:
            options.json.write_text(json.dumps(as_json(rows), indent=1) + "\n")
    console.print(table_of(rows))
    console.print("load average", *(f"{load:.1f}" for load in os.getloadavg()), highlight=False)
    if options.write_docs:
        write_docs(rows)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
