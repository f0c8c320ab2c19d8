"""Wan 2.1 and 2.2; their pipelines' solver is UniPC, so they are compared with one that makes Euler's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms import FlowGRPO
from digenrl.policies import PipelinePolicy, WanPolicy
from tests.policies.family_checks import (
    CHECKS,
    Check,
    Family,
    Mode,
    autocast,
    checkpoint_has_what_is_trained,
    guided_ode_equals_the_pipeline,
    name_of,
    ode_equals_the_pipeline,
    recomputed_ratio_is_one,
)
from tests.policies.tiny_pipelines import PROMPTS
from tests.toy import level_reward


def euler_of(scheduler: Any, num_steps: int) -> Any:
    """A scheduler that makes Euler's steps on the sigmas of a UniPC one."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler.set_timesteps(num_steps)
    sigmas = scheduler.sigmas[:-1].tolist()
    sigmas[0] = 1.0  # UniPC begins 1e-6 below it, since it takes the logarithm of 1 - sigma

    class Euler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
        def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
            super().set_timesteps(sigmas=sigmas, device=device)

    return Euler(shift=1.0)


FAMILY = Family(
    policy=WanPolicy,
    pipeline="wan",
    settings={"height": 16, "width": 32, "num_frames": 5, "max_sequence_length": 16},
    media_shape=(5, 3, 16, 32),
    call={"height": 16, "width": 32, "num_frames": 5, "max_sequence_length": 16, "guidance_scale": 1.0},
    guided_call={"guidance_scale": 2.0, "negative_prompt": ""},
    euler_of=euler_of,
)
TWO = replace(FAMILY, pipeline="wan_two_transformers")
"""Of its 4 steps, at sigmas 1, 0.9, 0.75 and 0.5, the first two are those of high noise."""


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_family(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(FAMILY, tiny_pipeline(FAMILY.pipeline))


TWO_CHECKS: list[Check] = [  # steps are compared in tests/scale
    ode_equals_the_pipeline,
    guided_ode_equals_the_pipeline,
    partial(recomputed_ratio_is_one, mode="float32", lora_rank=2),
    partial(recomputed_ratio_is_one, mode="bfloat16", lora_rank=2),
    partial(checkpoint_has_what_is_trained, lora_rank=None),
]


@pytest.mark.parametrize("check", TWO_CHECKS, ids=name_of)
def test_two_transformers(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(TWO, tiny_pipeline(TWO.pipeline))


def test_the_second_transformer_has_a_guidance_of_its_own(path_of_two: str) -> None:
    settings = {**TWO.settings, "guidance_scale_2": 3.5}
    guided_call = {"guidance_scale": 2.0, "negative_prompt": "", "guidance_scale_2": 3.5}
    family = replace(TWO, settings=settings, guided_call=guided_call)
    guided_ode_equals_the_pipeline(family, path_of_two)
    recomputed_ratio_is_one(family, path_of_two, "float32", 2, 2.0)
    with pytest.raises(AssertionError):
        guided_ode_equals_the_pipeline(replace(family, settings=TWO.settings), path_of_two)
    message = "`guidance_scale_2` must be left out with `guidance_scale` 1, where it changes nothing, got 3.5"
    with pytest.raises(ValueError, match=message):
        FlowGRPO(family.make(path_of_two), level_reward)


@pytest.fixture
def path(tiny_pipeline: Callable[[str], str]) -> str:
    return tiny_pipeline("wan")


@pytest.fixture
def path_of_two(tiny_pipeline: Callable[[str], str]) -> str:
    return tiny_pipeline("wan_two_transformers")


def spy(policy: Any) -> dict[str, list[Tensor]]:
    """Note the timesteps that each transformer is called with."""
    received: dict[str, list[Tensor]] = {part: [] for part in policy.transformers}
    for part, calls in received.items():
        policy.get_submodule(part).register_forward_pre_hook(
            lambda _, args, kwargs, calls=calls: calls.append(kwargs["timestep"]), with_kwargs=True
        )
    return received


def test_each_row_goes_through_the_transformer_for_its_noise(path_of_two: str) -> None:
    policy = TWO.build(path_of_two)
    latents, condition = policy.initial_latents([1, 2, 3, 4, 5]), policy.encode([*PROMPTS, PROMPTS[0]])
    sigma = torch.tensor([0.5, 1.0, 0.875, 0.8749, 0.9])
    rows = [slice(row, row + 1) for row in range(5)]
    with torch.no_grad():
        alone = [policy.velocity(latents[row], sigma[row], condition.select(row)) for row in rows]
        received = spy(policy)
        together = policy.velocity(latents, sigma, condition)
    assert (together - torch.cat(alone)).abs().max() <= 1e-6
    assert [timestep.tolist() for timestep in received["transformer"]] == [(sigma[[1, 2, 4]] * 1000).tolist()]
    assert [timestep.tolist() for timestep in received["transformer_2"]] == [(sigma[[0, 3]] * 1000).tolist()]


def test_ranks_that_share_blocks_call_both_transformers(path_of_two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without rows for one of them must take part in gathering its blocks; that row has no effect."""
    policy = TWO.build(path_of_two)
    latents, condition = policy.initial_latents([1, 2]), policy.encode(PROMPTS[:2])
    for sigma in (torch.tensor([0.9, 1.0]), torch.tensor([0.5, 0.2])):
        outputs, gradients = [], []
        for is_shared in (False, True):
            monkeypatch.setattr(WanPolicy, "_is_shared", is_shared)
            received = spy(policy)
            output = policy.velocity(latents, sigma, condition)
            output.square().sum().backward()
            assert [len(calls) for calls in received.values()].count(1) == 1 + is_shared
            outputs.append(output)
            gradients.append(
                {name: p.grad for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
            )
            policy.zero_grad()
        assert torch.equal(*outputs)
        assert gradients[0].keys() == gradients[1].keys()
        assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


@pytest.mark.parametrize("lora_rank", [2, None])
def test_one_of_two_transformers_is_trained(path_of_two: str, lora_rank: int | None) -> None:
    policy = TWO.build(path_of_two, "bfloat16", lora_rank=lora_rank, trained_transformers=["transformer_2"])
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[0] for name in trained} == {"transformer_2"}
    assert set(policy.state_dict()) == set(trained)
    assert policy.get_parameter("transformer.proj_out.weight").dtype == torch.bfloat16
    assert all(policy.get_parameter(name).dtype == torch.float32 for name in trained)
    inputs = policy.initial_latents([1, 2]), torch.tensor([1.0, 0.2]), policy.encode(PROMPTS[:2])
    modes: tuple[Mode, ...] = ("float32", "bfloat16")
    for mode in modes:  # the one that stays is in bfloat16 without autocast as well
        with torch.no_grad(), autocast(mode):
            assert policy.velocity(*inputs).isfinite().all()


def save_adapters(path: str, folder: Path) -> list[str]:
    """Two LoRAs as the ecosystem saves them, with random numbers in both factors and other scales."""
    from diffusers import WanPipeline, WanTransformer3DModel
    from peft import LoraConfig, get_peft_model_state_dict

    for part, alpha in (("transformer", 4), ("transformer_2", 6)):
        transformer = WanTransformer3DModel.from_pretrained(path, subfolder=part)
        config = LoraConfig(r=2, lora_alpha=alpha, target_modules=["to_q", "to_v"], init_lora_weights=False)
        transformer.add_adapter(config)
        layers = get_peft_model_state_dict(transformer)
        WanPipeline.save_lora_weights(
            folder / part, transformer_lora_layers=layers, transformer_lora_adapter_metadata=config.to_dict()
        )
    return [str(folder / part) for part in ("transformer", "transformer_2")]


def test_each_transformer_starts_from_an_adapter_of_its_own(path_of_two: str, tmp_path: Path) -> None:
    from diffusers import WanPipeline

    first, second = save_adapters(path_of_two, tmp_path)
    pipeline = WanPipeline.from_pretrained(path_of_two)
    pipeline.load_lora_weights(first)
    pipeline.load_lora_weights(second, load_into_transformer_2=True)
    policy = TWO.build(path_of_two, adapter=first, adapter_2=second)
    latents, sigma, condition = policy.initial_latents([1, 2]), torch.tensor([1.0, 0.2]), policy.encode(PROMPTS[:2])
    with torch.no_grad():
        ours = policy.velocity(latents, sigma, condition)
        theirs = [
            transformer(latents[row], sigma[row] * 1000, condition.select(row).embeddings, return_dict=False)[0]
            for transformer, row in ((pipeline.transformer, slice(0, 1)), (pipeline.transformer_2, slice(1, 2)))
        ]
    assert (ours - torch.cat(theirs)).abs().max() <= 1e-6
    message = r"give one for each that is trained \(transformer, transformer_2\), got some for transformer_2"
    with pytest.raises(ValueError, match=message):
        TWO.make(path_of_two, adapter_2=second)
    with pytest.raises(FileNotFoundError, match="`adapter_2` '.*nothing' is not there"):
        TWO.make(path_of_two, adapter=first, adapter_2=str(tmp_path / "nothing"))
    TWO.make(path_of_two, adapter_2=second, trained_transformers=["transformer_2"])


def test_weights_that_stay_in_float32_are_those_of_diffusers(path: str) -> None:
    from diffusers import WanTransformer3DModel

    expected = WanTransformer3DModel.from_pretrained(path, subfolder="transformer", torch_dtype=torch.bfloat16)
    policy = FAMILY.build(path, "bfloat16", lora_rank=2)
    own = {
        name.removeprefix("transformer.").replace(".base_layer.", "."): parameter
        for name, parameter in policy.named_parameters()
        if not parameter.requires_grad
    }
    assert {parameter.dtype for parameter in own.values()} == {torch.bfloat16, torch.float32}
    for name, parameter in expected.named_parameters():
        assert own[name].dtype == parameter.dtype, name
        assert torch.equal(own[name], parameter), name


def test_a_pipeline_with_a_timestep_for_each_token(tiny_pipeline: Callable[[str], str]) -> None:
    """Wan 2.2 5B; for text to video the timesteps are equal."""
    ode_equals_the_pipeline(FAMILY, tiny_pipeline("wan_token_timesteps"))


def test_videos_are_those_of_the_pipeline(path: str) -> None:
    from diffusers import DiffusionPipeline

    policy = FAMILY.build(path)
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    settings = {"prompt": PROMPTS[:2], "latents": policy.initial_latents([1, 2]), "num_inference_steps": 2}
    videos, latents = (pipeline(**settings, **FAMILY.call, output_type=kind)[0] for kind in ("pt", "latent"))
    assert (policy.decode(latents) - videos).abs().max() <= 1e-6


def test_schedule_is_that_of_the_scheduler(path: str, tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    for shift, settings in ((3.0, {}), (5.0, {"flow_shift": 5.0})):
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
        scheduler.set_timesteps(10)
        actual = FAMILY.make(path, **settings).sigmas(10)
        torch.testing.assert_close(actual, scheduler.sigmas, atol=1.1e-6, rtol=0)
    copy = str(copytree(path, tmp_path / "pipeline"))
    FlowMatchEulerDiscreteScheduler(shift=4.0).save_pretrained(f"{copy}/scheduler")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=4.0)
    scheduler.set_timesteps(10)
    torch.testing.assert_close(FAMILY.make(copy).sigmas(10), scheduler.sigmas, atol=1e-6, rtol=0)
    UniPCMultistepScheduler(use_karras_sigmas=True, use_flow_sigmas=True).save_pretrained(f"{copy}/scheduler")
    with pytest.raises(ValueError, match="UniPCMultistepScheduler with use_karras_sigmas"):
        FAMILY.make(copy).sigmas(10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 24}, "`height` must be a multiple of 16 .*, got 24; near are 16 and 32"),
        ({"num_frames": 7}, "`num_frames` must be one more than a multiple of 4 .*, got 7; near are 5 and 9"),
        ({"num_frames": 0}, "`num_frames` must be at least 1, got 0"),
        ({"flow_shift": 0.0}, "`flow_shift` must be positive and finite, got 0.0"),
        ({"guidance_scale_2": 0.5}, "`guidance_scale_2` must be at least 1, .* got 0.5"),
        ({"guidance_scale_2": 2.0}, "`guidance_scale_2` is for models with two transformers, got 2.0"),
        (
            {"trained_transformers": ["transformer_2"]},
            "`trained_transformers` must be of transformer, .* got transformer_2",
        ),
    ],
)
def test_unsuitable_settings_are_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILY.make(path, **settings)


def test_family_is_found(path: str) -> None:
    assert isinstance(PipelinePolicy.from_pretrained(path, **FAMILY.settings), WanPolicy)
