"""Ray knows the options that docs/guide/cluster.md and its Slurm script give it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/cluster.md").read_text()
SLURM = ROOT / "examples/cluster/slurm.sh"


def test_ray_knows_the_options() -> None:
    pytest.importorskip("ray")
    ray = Path(sys.executable).with_name("ray")
    used: dict[str, set[str]] = {"start": set(), "job submit": set()}
    shell = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for text in (*shell, SLURM.read_text()):
        for line in re.sub(r"\\\n", " ", text).splitlines():
            match = re.search(r"ray (start|job submit)(.*?)(?: -- |&?$)", line)
            if match is not None and not line.startswith("#"):
                used[match[1]] |= set(re.findall(r"--[a-z-]+", match[2]))
    assert used["start"] >= {"--head", "--address", "--block"}
    for command, options in used.items():
        shown = subprocess.run([str(ray), *command.split(), "--help"], capture_output=True, text=True).stdout
        assert options <= set(re.findall(r"--[a-z-]+", shown)), command


SRUN = """#!/bin/bash
while [ $# -gt 0 ]; do
    case "$1" in
    --nodes | --ntasks | --nodelist | --exclude) shift 2 ;;
    --overlap) shift ;;
    *) break ;;
    esac
done
exec "$@"
"""
"""Stands in for Slurm's: every host is this one."""


@pytest.mark.timeout(600)
def test_the_slurm_script_runs_a_command_on_a_cluster_and_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:  # a port below those that Ray gives to workers
        port = next(port for port in range(6400, 6500) if free.connect_ex(("127.0.0.1", port)) != 0)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_PORT": str(port),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "hosts",
        "SLURM_JOB_NUM_NODES": "2",
    }
    count = "import ray; ray.init(address='auto', log_to_driver=False); print('hosts:', len(ray.nodes()))"
    done = subprocess.run(
        ["bash", str(SLURM), sys.executable, "-c", count], env=env, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    assert "hosts: 2" in done.stdout
    temp_dir = f"ray-{os.getpid()}"
    assert not Path("/tmp", temp_dir).exists()
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if temp_dir in " ".join(process.info["cmdline"] or [])
    ]
