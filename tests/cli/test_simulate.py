from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Digenrl

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulate.yaml"

JOB = """\
cluster:
  generators: 2
  trainers: 2
workload:
  num_groups: 4
  group_size: 2
  generate_s: 1.0
  update_s: {1: 1.5, all: 1.0}
  optimizer_s: 0.5
policy:
  staleness: 0.5
num_steps: 3
"""

NAMES = ["colocated", "colocated +TSP", "naive", "+GAP", "+TSP", "+TAG", "+TCSS"]


@pytest.fixture(autouse=True)
def job(folder: Path) -> Path:
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def test_table_has_a_row_for_each_mode(digenrl: Digenrl) -> None:
    result = digenrl("simulate", "--config", "job.yaml")
    assert (result.code, result.err) == (0, [])
    rows = [line.split("  ")[0].strip() for line in result.out.splitlines() if line.startswith((" c", " n", " +"))]
    assert rows == NAMES
    assert "…" not in result.out


def test_json_has_the_figures_of_each_mode(digenrl: Digenrl) -> None:
    result = digenrl("simulate", "--config", "job.yaml", "--format", "json")
    content = json.loads(result.out)
    assert [mode["name"] for mode in content["modes"]] == NAMES
    naive = content["modes"][2]
    # Of 8 samples each worker makes or trains 4.
    assert naive["step_s"] == pytest.approx([4 * 1.0 + 4 * 1.5 + 0.5] * 3)
    assert naive["ratio_to_naive"] == 1.0
    assert naive["utilization"] == pytest.approx({"generators": 4 / 10.5, "trainers": 6.5 / 10.5})
    assert all(0 < mode["efficiency"] <= 1 for mode in content["modes"])


def test_options_win_over_the_file(digenrl: Digenrl) -> None:
    words = ("--format=json", "--num_steps", "1", "--workload.update_s", "2", "--policy.trainer_assist", "off")
    content = json.loads(digenrl("simulate", "--config", "job.yaml", *words, "--policy.staleness", "0").out)
    assert [mode["name"] for mode in content["modes"]] == ["colocated", "naive", "+GAP"]
    assert content["modes"][1]["step_s"] == pytest.approx([4 * 1.0 + 4 * 2.0 + 0.5])


def test_lists_are_given_as_yaml(digenrl: Digenrl) -> None:
    words = ("--cluster.generator_speeds", "[1, 0.5]", "--cluster.failures", "[[2.5, generator-1]]")
    content = json.loads(digenrl("simulate", "--config", "job.yaml", "--format", "json", *words).out)
    assert content["modes"][2]["makespan_s"] > 3 * 10.5


def test_timeline_has_a_process_for_each_mode_and_a_thread_for_each_worker(digenrl: Digenrl, folder: Path) -> None:
    assert digenrl("simulate", "--config", "job.yaml", "--timeline", "out.json").code == 0
    events = json.loads((folder / "out.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == NAMES
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 3]
    assert threads == ["generator-0", "generator-1", "trainer-0", "trainer-1"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"generate", "update", "optimizer", "assist"}


def test_gantt_is_a_picture(digenrl: Digenrl, folder: Path) -> None:
    assert digenrl("simulate", "--config", "job.yaml", "--gantt", "out.png").code == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def test_example_runs_and_each_mechanism_gains(digenrl: Digenrl) -> None:
    content = json.loads(digenrl("simulate", "--config", str(EXAMPLE), "--format", "json").out)
    ratios = [mode["ratio_to_naive"] for mode in content["modes"]][2:]
    assert ratios == sorted(ratios)


def test_help_names_all_settings(digenrl: Digenrl) -> None:
    from dataclasses import fields

    from digenrl.scheduling import Cluster, SchedulingPolicy

    out = digenrl("simulate", "--help").out
    for part, cls in (("cluster", Cluster), ("policy", SchedulingPolicy)):
        for field in fields(cls):
            assert f"--{part}.{field.name}" in out


def test_neither_torch_nor_lightning_is_imported() -> None:
    code = (
        "import sys; from digenrl.cli import main;"
        f"code = main(['simulate', '--config', {str(EXAMPLE)!r}, '--num_steps', '1']);"
        "print(code, [name for name in ('torch', 'lightning', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []"


WRONG = [
    ("--cluster.generatos 2", "`--cluster.generatos` is not a setting of Cluster; did you mean `generators`?"),
    ("--workload.grop_size 2", "`--workload.grop_size` is not a setting of Workload; did you mean `group_size`?"),
    (
        "--worklod.group_size 2",
        "`worklod` is not a key of the configuration of `digenrl simulate`; did you mean `workl",
    ),
    ("--num_step 2", "`--num_step` is not a key of the configuration of `digenrl simulate`; did you mean `num_steps`?"),
    ("--cluster.generators two", "`--cluster.generators` must be a whole number, got 'two'."),
    ("--cluster.generators 0", "--cluster.generators: `generators` counts workers that make samples and must be at"),
    ("--workload.generate_s -1", "--workload.generate_s: `generate_s` is the cost of a sample and must be above 0"),
    ("--workload.groups_per_micro_batch 3", "`groups_per_micro_batch` must divide the 4 groups of a step, got 3; the"),
    ("--cluster.trainers 3", "makes micro-batches of 2 samples, which cannot be split over 3 trainers; raise it."),
    (
        '--workload.update_s {"3":1,"all":1}',
        "`workload.update_s.3` is not a number of timesteps at a time; known: 1, all",
    ),
    ('--workload.update_s {"1":0,"all":1}', "`workload.update_s.1` is the cost of a sample and must be above 0, got 0"),
    ("--policy.trainer_assist optmal", "`trainer_assist` must be one of off, static:K, search, optimal, got 'optmal'"),
    (
        "--policy.staleness 1.5",
        "--policy.staleness: `staleness` is the largest stale fraction of a step and must be in",
    ),
    ("--policy.staleness_mode capp", "`--policy.staleness_mode` must be `cap` or `exact`, got 'capp'."),
    ("--num_steps 0", "`--num_steps` counts optimizer steps and must be at least 1, got 0."),
    ("--format jsn", "`--format` must be table or json, got `jsn`; did you mean `json`?"),
    ("--gantt out.gif", "`--gantt` must end in .png, .pdf, .svg, got 'out.gif'."),
    ("--gantt absent/out.png", "`--gantt`: there is no folder `absent`."),
    ("--timeline .", "`--timeline` must be a file, `.` is a folder."),
    ("--print_config", "`--print_config` is not an option of `digenrl simulate`"),
    ("--config jib.yaml", "`--config`: there is no file `jib.yaml`; did you mean `job.yaml`?"),
    ("--cluster 3", "`--cluster` must be a mapping of settings of Cluster, got '3'."),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_options_are_refused_on_one_line(digenrl: Digenrl, words: str, message: str) -> None:
    assert message in digenrl("simulate", "--config", "job.yaml", *words.split()).error


FILES = [
    ("generators: 2", "generator: 2", "job.yaml:2: `cluster.generator` is not a setting of Cluster; did you mean `gen"),
    ("group_size: 2", "group_size: few", "job.yaml:6: `workload.group_size` must be a whole number, got 'few'."),
    ("optimizer_s: 0.5", "optimizer_s: -1", "job.yaml:9: `optimizer_s` is the cost and must be at least 0, got -1"),
    ("1: 1.5", "3: 1.5", "job.yaml:8: `workload.update_s.3` is not a number of timesteps at a time; known: 1, all."),
    ("  generate_s: 1.0\n", "", "job.yaml:4: `workload.generate_s` is missing: a number."),
    (
        "staleness: 0.5",
        "trainer_assist: off",
        "`trainer_assist` must be one of off, static:K, search, optimal, got Fal",
    ),
    (
        "cluster:",
        "clusters:",
        "job.yaml:1: `clusters` is not a key of the configuration of `digenrl simulate`; did you",
    ),
    ("policy:\n  staleness: 0.5", "policy: fast", "job.yaml:10: `policy` must be a mapping of settings of "),
]


@pytest.mark.parametrize(("old", "new", "message"), FILES)
def test_wrong_files_are_refused_with_their_line(digenrl: Digenrl, job: Path, old: str, new: str, message: str) -> None:
    assert JOB.count(old) == 1
    job.write_text(JOB.replace(old, new))
    assert message in digenrl("simulate", "--config", "job.yaml").error


def test_without_a_configuration_the_example_is_named(digenrl: Digenrl) -> None:
    assert "`--config FILE` is missing; examples/simulate.yaml is one." in digenrl("simulate").error
