"""The check of GPUs from end to end, with everything on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import gpu_check
from benchmarks.ladder import RUNGS


def test_all_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    code = gpu_check.main(["--device", "cpu", "--size", "tiny", "--steps", "1", "--json", str(path)])
    figures = json.loads(path.read_text())
    assert {check["name"]: check["verdict"] for check in figures["checks"]} == dict.fromkeys(
        (
            "gradient",
            "gradient, fsdp",
            "weights: shared_memory",
            "weights: object_store",
            "weights: collective",
            "ladder",
        ),
        "ok",
    )
    assert code == 0
    assert [rung["name"] for rung in figures["ladder"]] == list(RUNGS)
    assert all(rung["samples_per_s"] > 0 for rung in figures["ladder"])
