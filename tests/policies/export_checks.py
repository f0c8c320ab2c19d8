"""Loading what was exported in a process that has diffusers and nothing of digenrl."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from digenrl.policies import PipelinePolicy
from digenrl.policies.export import probe

_LOADER = """
import sys
import torch
from diffusers import DiffusionPipeline

for case in torch.load(sys.argv[1], weights_only=False):
    pipeline = DiffusionPipeline.from_pretrained(case["base"])
    for arguments in case["adapters"]:
        pipeline.load_lora_weights(case["folder"], **arguments)
    with torch.no_grad():
        for call in case["calls"]:
            call["output"] = getattr(pipeline, call["part"])(**call["inputs"])[0]
    if case["whole"] is not None:
        pipeline.set_progress_bar_config(disable=True)
        case["latents"] = pipeline(output_type="latent", **case["whole"])[0]
    torch.save(case, case["folder"] + "/computed.pt")
assert "digenrl" not in sys.modules
"""


def spied_calls(policy: PipelinePolicy) -> list[dict[str, Any]]:
    """What a policy's transformers are given and give, for some prompts."""
    calls: list[dict[str, Any]] = []
    hooks = [
        policy.get_submodule(part).register_forward_hook(
            lambda _, args, inputs, output, part=part: calls.append(
                {"part": part, "inputs": dict(inputs), "expected": output[0]}
            ),
            with_kwargs=True,
        )
        for part in policy.transformers
    ]
    probe(policy)
    for hook in hooks:
        hook.remove()
    return calls


def case_of(
    base: str | Path,
    folder: Path,
    weights: Mapping[str, str] | None,
    calls: list[dict[str, Any]],
    whole: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe what is to be loaded.

    Args:
        base: the pipeline that adapters are for; what was exported itself, where it is one.
        folder: that was written.
        weights: the adapters' files by the transformer; None for a whole pipeline.
        calls: of `spied_calls`.
        whole: arguments of the pipeline.
    """
    second = {"transformer": {}, "transformer_2": {"load_into_transformer_2": True}}
    return {
        "base": str(base),
        "folder": str(folder),
        "adapters": [{"weight_name": file, **second[part]} for part, file in (weights or {}).items()],
        "calls": calls,
        "whole": whole,
    }


def load_in_a_fresh_process(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Give the cases with what the pipelines compute."""
    torch.save(cases, folder / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, str(folder / "cases.pt")],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{case['folder']}/computed.pt", weights_only=False) for case in cases]


def largest_difference(case: Mapping[str, Any]) -> float:
    """Between what a loaded pipeline's transformers give and what the policy's gave."""
    differences: list[Tensor] = [(call["output"] - call["expected"]).abs().max() for call in case["calls"]]
    assert differences
    return max(difference.item() for difference in differences)
