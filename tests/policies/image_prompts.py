"""Prompts with images, for policies that are given such."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from digenrl.diffusion import FlowSDE
from digenrl.types import Prompt, PromptBatch, Trajectory
from tests.policies.family_checks import TOLERANCE, Mode, _rows, autocast
from tests.policies.tiny_pipelines import PROMPTS


def save_image(path: Path, height: int, width: int, seed: int = 0) -> str:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(levels).save(path)
    return str(path)


def prompts_of(metadata: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    return [Prompt(text, uid, metadata=row) for uid, (text, row) in enumerate(zip(PROMPTS, metadata, strict=False))]


def batch_of(metadata: Sequence[Mapping[str, Any]]) -> PromptBatch:
    return PromptBatch.for_validation(prompts_of(metadata), seed=0)


def save_prompts(path: Path, metadata: Sequence[Mapping[str, Any]]) -> Path:
    rows = [{"prompt": prompt.text, **prompt.metadata} for prompt in prompts_of(metadata)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def ratio_is_one(module: Any, mode: Mode, metadata: Sequence[Mapping[str, Any]]) -> None:
    """As for families without images: recomputed, and in other batches."""
    module.configure_model()
    prompts = PromptBatch.for_step(prompts_of(metadata), step=0, group_size=2, seed=0)
    with torch.inference_mode(), autocast(mode):
        module.policy.encode_batch(prompts)  # a cache that was filled so must do for training
    with torch.no_grad(), autocast(mode):
        trajectory: Trajectory = module.sample_trajectory(prompts, FlowSDE(0.7))
    steps = list(range(module.num_steps))
    for samples, timesteps, limit in ((slice(None), [1], 0.0), (slice(1, 2), steps, TOLERANCE[mode])):
        rows = _rows(trajectory, samples, timesteps)
        with autocast(mode):
            log_probs = module.log_probs(rows)
        assert (torch.exp(log_probs - rows.old_log_probs) - 1).abs().max() <= limit
    log_probs.sum().backward()
