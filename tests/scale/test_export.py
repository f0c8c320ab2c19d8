"""Exports of every model family, loaded in a process that has diffusers and nothing of digenrl."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.test_export import LORA, configuration
from tests.policies.export_checks import case_of, largest_difference, load_in_a_fresh_process, spied_calls
from tests.policies.family_checks import Family
from tests.policies.test_export import exports_load_elsewhere
from tests.policies.test_flux import FAMILY as FLUX
from tests.policies.test_hunyuan_video import FAMILY as HUNYUAN_VIDEO
from tests.policies.test_qwen_image import FAMILY as QWEN_IMAGE
from tests.policies.test_stable_diffusion3 import FAMILY as SD3
from tests.policies.test_wan import FAMILY as WAN
from tests.policies.test_wan import TWO as WAN_OF_TWO
from tests.policies.tiny_pipelines import save_tiny_pipeline

FAMILIES = [SD3, FLUX, QWEN_IMAGE, WAN, WAN_OF_TWO, HUNYUAN_VIDEO]


@pytest.fixture
def tiny_pipeline(tmp_path: Path) -> Callable[[str], str]:
    def folder(name: str) -> str:
        path = tmp_path / "pipelines" / name
        return str(path if path.is_dir() else save_tiny_pipeline(name, path))

    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.pipeline)
def test_what_was_exported_computes_the_same_in_a_process_of_diffusers_alone(
    family: Family, tiny_pipeline: Callable[[str], str], tmp_path: Path
) -> None:
    exports_load_elsewhere([family], tiny_pipeline, tmp_path)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_a_run_its_export_and_who_loads_it_are_processes_of_their_own(
    tiny_pipeline: Callable[[str], str], tmp_path: Path
) -> None:
    base = tiny_pipeline("flux")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration(base)))
    export = ["export", "--checkpoint", "last", "--output"]
    for words in (["fit", "--config", "run.yaml"], [*export, "last"], [*export, "mean", "--ema"]):
        command = [sys.executable, "-m", "digenrl", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "runs/version_0/checkpoints/step=2.ckpt", weights_only=True)["state_dict"]
    cases = []
    for name, prefix in (("last", "policy."), ("mean", "weight_copies.ema.weights.")):
        policy = FLUX.build(base, lora_rank=2, lora_alpha=6)
        policy.load_state_dict({key: state[f"{prefix}{key}"] for key in policy.state_dict()})
        cases.append(case_of(base, tmp_path / name, {"transformer": LORA}, spied_calls(policy)))
    last, mean = load_in_a_fresh_process(cases, tmp_path)
    assert largest_difference(last) <= 1e-6
    assert largest_difference(mean) <= 1e-6
    assert (last["calls"][0]["output"] - mean["calls"][0]["output"]).abs().max() > 1e-4
