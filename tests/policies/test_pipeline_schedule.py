"""The schedule is the scheduler's own or the one that was asked for, wherever a policy is asked for sigmas."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.algorithms import DGPO, FlowGRPO
from digenrl.module import DiffusionRLModule
from digenrl.policies import FluxPolicy, PipelinePolicy, StableDiffusion3Policy, WanPolicy
from digenrl.types import Prompt, PromptBatch
from tests.policies.test_pipeline import SMALL, changed_copy
from tests.toy import level_reward

Tiny = Callable[[str], str]


def bent(even: Any, shift: float) -> Any:
    return shift * even / (1 + (shift - 1) * even)


def test_schedules_are_the_published_ones(tiny_pipeline: Tiny) -> None:
    for name, even in {"dance": np.linspace(1, 0, 11), "dpm": np.linspace(0.999, 0, 11)}.items():
        policy = FluxPolicy(tiny_pipeline("flux"), **SMALL, schedule=name, schedule_shift=3.0)  # type: ignore[arg-type]
        np.testing.assert_allclose(policy.sigmas(10).numpy(), bent(even, 3.0), atol=1e-7)
        own = FluxPolicy(tiny_pipeline("flux"), **SMALL)
        assert torch.equal(policy.pipeline_sigmas(10), own.sigmas(10))
    policy = FluxPolicy(tiny_pipeline("flux"), **SMALL, schedule=[0.9, 0.5, 0])
    assert policy.sigmas(2).tolist() == [np.float32(0.9), 0.5, 0.0]


def test_dpm_is_what_diffusers_solver_has(tiny_pipeline: Tiny) -> None:
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    scheduler.set_timesteps(10)
    policy = StableDiffusion3Policy(tiny_pipeline("sd3"), **SMALL, schedule="dpm", schedule_shift=3.0)
    assert torch.allclose(policy.sigmas(10), scheduler.sigmas, atol=1e-6, rtol=0)


def test_rollout_and_training_have_the_chosen_schedule(tiny_pipeline: Tiny) -> None:
    sigmas = [1.0, 0.8, 0.4, 0.0]
    policy = StableDiffusion3Policy(tiny_pipeline("sd3"), **SMALL, schedule=sigmas)
    module = FlowGRPO(policy, level_reward, group_size=2, num_steps=3, timestep_fraction=1.0, seed=0)
    module.configure_model()
    received: list[float] = []
    policy.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: received.append(float(kwargs["timestep"][0])), with_kwargs=True
    )
    prompts = PromptBatch.for_step([Prompt("a red cat", 0)], step=0, group_size=2, seed=0)
    with torch.no_grad():
        trajectory = module.rollout(prompts)
    assert torch.equal(trajectory.sigmas, torch.tensor(sigmas))
    assert received == pytest.approx([1000, 800, 400])
    module.sample(prompts)
    assert received[3:] == received[:3], "validation has it, too"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "danse"}, "`schedule` must be one of pipeline, dance, dpm, or a list of sigmas, got 'danse'"),
        ({"schedule": "dance"}, "`schedule` dance needs a `schedule_shift`: published runs have 3, and 5 for"),
        ({"schedule_shift": 3.0}, "`schedule_shift` is for a `schedule` of dance or dpm, got 3.0: leave it out"),
        ({"schedule": [1.0, 0.0], "schedule_shift": 3.0}, "`schedule_shift` is for a `schedule` of dance or dpm"),
        ({"schedule": "dpm", "schedule_shift": 0.0}, "`schedule_shift` must be positive and finite, got 0.0"),
        ({"schedule": [1.0, 0.5]}, "`schedule` must list sigmas that fall from at most 1 to 0, got [1.0, 0.5]"),
        ({"schedule": [1.0, 0.5, 0.5, 0.0]}, "`schedule` must list sigmas that fall"),
        ({"schedule": [1000.0, 500.0, 0.0]}, "`schedule` must list sigmas that fall"),
        ({"schedule": []}, "`schedule` must list sigmas that fall"),
    ],
)
def test_a_wrong_schedule_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FluxPolicy("somebody/something", **SMALL, **settings)


def test_wans_own_shift_is_of_the_pipelines_schedule(tiny_pipeline: Tiny) -> None:
    settings: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 5, "schedule": "dance", "schedule_shift": 3.0}
    assert WanPolicy(tiny_pipeline("wan"), **settings).sigmas(2).tolist() == pytest.approx([1, 0.75, 0])
    with pytest.raises(ValueError, match="`flow_shift` is of the pipeline's own schedule, got 5.0 with another"):
        WanPolicy(tiny_pipeline("wan"), flow_shift=5.0, **settings)


@pytest.mark.parametrize(
    ("algorithm", "steps"), [(FlowGRPO, {"num_steps": 4}), (DGPO, {"num_steps": 2, "validation_steps": 5})]
)
def test_a_list_of_sigmas_must_have_the_steps_of_rollouts_and_validation(
    algorithm: Callable[..., DiffusionRLModule], steps: dict[str, int], tiny_pipeline: Tiny
) -> None:
    policy = FluxPolicy(tiny_pipeline("flux"), **SMALL, schedule=[1.0, 0.5, 0.0])
    others = {"num_trained_timesteps": 1} if algorithm is DGPO else {}
    message = f"`schedule` lists the 3 sigmas of 2 steps, and {max(steps.values())} are asked for"
    with pytest.raises(ValueError, match=message):
        algorithm(policy, level_reward, **steps, **others)
    assert algorithm(policy, level_reward, num_steps=2, **others).num_steps == 2


@pytest.mark.parametrize(
    ("pipeline", "changes", "message"),
    [
        ("sd3", {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}, "is a UniPCMultistepScheduler and no"),
        ("hunyuan", {"_class_name": "FlowMatchHeunDiscreteScheduler"}, "is a FlowMatchHeunDiscreteScheduler and no"),
        ("sd3", {"shift_terminal": 0.1}, "has shift_terminal, which there is no schedule for: set `schedule`"),
        ("flux", {"use_dynamic_shifting": False, "shift_terminal": 0.1}, "has shift_terminal, which there is no"),
        ("flux", {"time_shift_type": "linear"}, "has time_shift_type, which there is no"),
        ("wan", {"final_sigmas_type": "sigma_min"}, "UniPCMultistepScheduler with final_sigmas_type"),
    ],
)
def test_a_scheduler_without_a_formula_is_refused_at_once(
    pipeline: str, changes: dict[str, Any], message: str, tiny_pipeline: Tiny, tmp_path: Path
) -> None:
    video = {} if pipeline in ("sd3", "flux") else {"num_frames": 5, "height": 16, "width": 16}
    path = changed_copy(tiny_pipeline(pipeline), tmp_path / "x", "scheduler", **changes)
    with pytest.raises(ValueError, match=message):
        PipelinePolicy.from_pretrained(path, **{**SMALL, **video})
    other = PipelinePolicy.from_pretrained(path, **{**SMALL, **video}, schedule="dance", schedule_shift=1.0)
    assert other.sigmas(4).tolist() == [1, 0.75, 0.5, 0.25, 0]
