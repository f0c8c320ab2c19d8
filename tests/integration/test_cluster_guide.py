"""The commands and files of docs/guide/cluster.md are ones that digenrl, Ray and the shell accept."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl import DisaggregatedStrategy
from digenrl.cli.arguments import read_arguments
from digenrl.cli.check import check
from digenrl.cli.classes import accepted_names
from digenrl.cli.merge import merge

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/cluster.md").read_text()
SLURM = ROOT / "examples/cluster/slurm.sh"
KUBERAY = yaml.safe_load((ROOT / "examples/cluster/kuberay.yaml").read_text())


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def commands() -> list[list[str]]:
    """All commands of the guide, and that of the RayJob, as words."""
    return [
        shlex.split(line) for line in "\n".join([*blocks("bash"), KUBERAY["spec"]["entrypoint"]]).splitlines() if line
    ]


def fit_commands() -> list[list[str]]:
    """What follows `digenrl fit`, wherever a command has it."""
    return [words[words.index("fit") + 1 :] for words in commands() if "fit" in words]


def settings_of(words: list[str]) -> dict[str, Any]:
    return check(merge(read_arguments(words).sources, accepted_names), "fit")


def test_every_step_of_the_guide_has_its_command() -> None:
    assert [words[0] for words in commands()] == (
        ["digenrl"] * 5 + ["ray"] * 2 + ["digenrl", "ray", "sbatch", "kubectl", "digenrl"]
    )
    assert len(fit_commands()) == 8
    for words in commands():
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), word


def test_the_guide_says_what_has_not_been_run() -> None:
    assert "**Not yet run: GPUs, clusters of real hosts, Slurm itself, and the KubeRay file.**" in GUIDE


@pytest.mark.parametrize("words", fit_commands())
def test_digenrl_accepts_the_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    trainer = settings_of(words)["trainer"]
    if trainer["strategy"] == "auto":
        assert trainer["devices"] == "1"
        return
    # LightningCLI makes values of an option's text.
    given = {name: yaml.safe_load(str(value)) for name, value in trainer["strategy"]["init_args"].items()}
    strategy = DisaggregatedStrategy(**given)
    num_workers = (strategy.generators + strategy.trainers) // strategy.workers_per_device
    num_nodes = int(trainer.get("num_nodes", 1))
    assert num_workers == num_nodes * int(trainer.get("devices", 8))
    samples = strategy.groups_per_micro_batch * 8  # the example's group size
    assert samples >= strategy.trainers
    if num_nodes > 1:
        strategy.num_nodes = num_nodes
        assert strategy._engine_name == "ray"


def test_settings_for_mixed_hardware_are_accepted() -> None:
    (text,) = blocks("yaml")
    given = yaml.safe_load(text)["trainer"]["strategy"]
    assert given["class_path"] == "DisaggregatedStrategy"
    assert DisaggregatedStrategy(**given["init_args"]).resources["trainer"]["GPU"] == 1


def test_the_table_of_choices_names_options_that_there_are() -> None:
    options = inspect.signature(DisaggregatedStrategy.__init__).parameters
    named = re.findall(r"^\| `(\w+)` \| ", GUIDE, re.MULTILINE)
    assert len(named) == 6
    assert set(named) <= set(options)


def test_the_slurm_script_is_one_and_says_how_it_is_used() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)]).returncode == 0
    done = subprocess.run(["bash", str(SLURM)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch")


def test_the_ray_job_has_what_a_run_needs() -> None:
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayJob")
    cluster = KUBERAY["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    entrypoint = shlex.split(KUBERAY["spec"]["entrypoint"])
    counts = {
        name: int(entrypoint[entrypoint.index(f"--trainer.{name}") + 1])
        for name in ("strategy.generators", "strategy.trainers", "num_nodes")
    }
    assert counts["strategy.generators"] + counts["strategy.trainers"] == int(gpus) * workers["replicas"]
    assert counts["num_nodes"] <= workers["replicas"] + 1
    for group in (cluster["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
