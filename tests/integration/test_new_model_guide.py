"""The guide's code runs as it stands there, and its family passes what every family must do."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.cli import main
from digenrl.cli.dry_run import build_on_meta, trace_policy
from digenrl.policies import PipelinePolicy, pipeline
from digenrl.policies.export import export_lora
from digenrl.policies.stored_weights import load_stored_weights
from tests.policies.family_checks import (
    Check,
    Family,
    checkpoint_has_what_is_trained,
    conditions_do_not_depend_on_batching,
    decoded_media_are_in_range,
    name_of,
    ode_equals_the_pipeline,
    recomputed_ratio_is_one,
    timesteps_are_those_that_were_stored,
)

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/new_model.md").read_text()
SETTINGS = {"height": 8, "width": 16, "max_sequence_length": 8}
CHECKS: list[Check] = [
    ode_equals_the_pipeline,
    partial(recomputed_ratio_is_one, mode="float32", lora_rank=2, scale=2.0),
    partial(recomputed_ratio_is_one, mode="bfloat16", lora_rank=None),
    partial(timesteps_are_those_that_were_stored, mode="bfloat16"),
    decoded_media_are_in_range,
    conditions_do_not_depend_on_batching,
    partial(checkpoint_has_what_is_trained, lora_rank=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's files, and nothing else."""
    folder = tmp_path_factory.mktemp("guide")
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", GUIDE, re.DOTALL):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return folder


@pytest.fixture(autouse=True)
def in_folder(restored_process: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(pipeline, "_FAMILIES", dict(pipeline._FAMILIES))
    yield
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


def family() -> Family:
    """The guide's, with its tiny pipeline."""
    runpy.run_path("tiny_aura_flow.py")
    return Family(
        policy=importlib.import_module("aura_flow").AuraFlowPolicy,
        pipeline="tiny_aura_flow",
        settings=SETTINGS,
        media_shape=(3, 8, 16),
        call={**SETTINGS, "guidance_scale": 1.0},
        guided_call={"guidance_scale": 2.0, "negative_prompt": ""},
        timestep_scale=1.0,
    )


def test_sharded_trainers_get_the_weights_of_a_run_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("check_unet.py", run_name="__main__")
    assert "largest change of a weight: " in capsys.readouterr().out


def test_weights_are_read_from_where_they_are_stored() -> None:
    made = importlib.import_module("my_unet").UNetPolicy()
    made.build()
    made.unet.save_pretrained("other_weights")
    stored = importlib.import_module("my_stored_unet").StoredUNetPolicy("other_weights")
    stored.build()
    assert all(parameter.is_meta for parameter in stored.parameters())
    load_stored_weights(stored)
    state = stored.state_dict()
    assert all(torch.equal(state[name], value) for name, value in made.state_dict().items())
    blocks = {parameter for block in stored.blocks() for parameter in block.parameters()}
    assert sum(parameter.numel() for parameter in blocks) > 0.5 * sum(p.numel() for p in stored.parameters())


def test_the_command_dry_runs_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    words = shlex.split(command)
    assert words[0] == "digenrl"
    assert main(words[1:]) == 0
    out = capsys.readouterr().out
    assert "FlowGRPO of StoredUNetPolicy: 1 generator + 2 trainers" in out
    assert "could not be traced" not in out


def test_the_check_of_the_family_passes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("check_aura_flow.py", run_name="__main__")
    assert "latents: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("double_shift=True", "double_shift=False"),
        ("timestep=sigma,", "timestep=sigma * 1000,"),
        ("self.height // factor, self.width // factor", "self.width // factor, self.height // factor"),
    ],
)
def test_the_check_of_the_family_finds_mistakes(right: str, wrong: str, folder: Path) -> None:
    text = (folder / "aura_flow.py").read_text()
    assert right in text
    (folder / "wrong_aura_flow.py").write_text(text.replace(right, wrong))
    sys.modules["aura_flow"] = importlib.import_module("wrong_aura_flow")
    with pytest.raises((AssertionError, ValueError)):
        runpy.run_path("check_aura_flow.py", run_name="__main__")


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_the_family_does_what_every_family_must(check: Check) -> None:
    check(family(), "tiny_aura_flow")


def test_a_dry_run_knows_what_the_family_takes() -> None:
    policy = family().make("tiny_aura_flow", lora_rank=2)
    build_on_meta(policy)
    costs = trace_policy(policy, ["a red cat"], bf16=True)
    assert costs.kept_bytes(1, checkpointing=False) > 0
    built = family().build("tiny_aura_flow")
    example, real = built.example_condition(["a red cat"]), built.encode(["a red cat"])
    assert [value.shape for _, value in example._tensors()] == [value.shape for _, value in real._tensors()]


def test_the_pipeline_loads_what_is_exported(tmp_path: Path) -> None:
    policy = family().build("tiny_aura_flow", lora_rank=2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * parameter.requires_grad)
    assert export_lora(policy, tmp_path).deviation <= 1e-6


def test_a_pipeline_without_a_family_is_told_how_to_get_one() -> None:
    runpy.run_path("tiny_aura_flow.py")
    with pytest.raises(ValueError, match=r"the pipeline class `AuraFlowPipeline`; known are .* Subclass"):
        PipelinePolicy.from_pretrained("tiny_aura_flow")
    policy: Any = importlib.import_module("aura_flow").AuraFlowPolicy
    assert type(PipelinePolicy.from_pretrained("tiny_aura_flow", **SETTINGS)) is policy


def test_the_tables_name_what_there_is() -> None:
    named = re.findall(r"^\| `(\w+)` \| ", GUIDE, re.MULTILINE)
    assert len(named) == 22
    assert [name for name in named if not hasattr(PipelinePolicy, name)] == []
