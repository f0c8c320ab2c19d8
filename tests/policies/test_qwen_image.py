from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.algorithms import FlowGRPO
from digenrl.policies import QwenImagePolicy
from tests.integration.toy_runs import fit
from tests.policies.family_checks import (
    CHECKS,
    Check,
    Family,
    by_index,
    guided_ode_equals_the_pipeline,
    name_of,
)
from tests.policies.tiny_pipelines import PROMPTS

FAMILY = Family(
    policy=QwenImagePolicy,
    pipeline="qwen",
    settings={"height": 16, "width": 32, "max_sequence_length": 16},
    media_shape=(3, 16, 32),
    call={"height": 16, "width": 32, "max_sequence_length": 16, "true_cfg_scale": 1.0},
    guided_call={"true_cfg_scale": 2.0, "negative_prompt": " "},
    guidance_rescale="norm",
    timestep_scale=1.0,
)


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_family(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(FAMILY, tiny_pipeline(FAMILY.pipeline))


@pytest.fixture
def path(tiny_pipeline: Callable[[str], str]) -> str:
    return tiny_pipeline("qwen")


def load_pipeline(path: str) -> Any:
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_strong_guidance_away_from_another_prompt_equals_the_pipeline(path: str) -> None:
    negative = "a photo of a blue sofa"
    family = replace(
        FAMILY,
        settings={**FAMILY.settings, "negative_prompt": negative},
        guided_call={"true_cfg_scale": 4.0, "negative_prompt": [negative, negative]},
    )
    guided_ode_equals_the_pipeline(family, path, scale=4.0)


def test_images_are_those_of_the_pipeline(path: str) -> None:
    policy, pipeline = FAMILY.build(path), load_pipeline(path)
    settings = {"prompt": PROMPTS[:2], "latents": policy.initial_latents([1, 2]), "num_inference_steps": 2}
    images, latents = (
        pipeline(**settings, **FAMILY.call, output_type=kind, return_dict=False)[0] for kind in ("pt", "latent")
    )
    assert (policy.decode(latents) - images).abs().max() <= 1e-5


def test_embeddings_leave_out_the_template_and_are_padded(path: str) -> None:
    prompts = ["a red cat", "a photo of a blue sofa", "digit 7"]
    after_prompt = 5  # <|im_end|>, a line end, <|im_start|>, assistant, a line end
    condition: Any = FAMILY.build(path).encode(prompts)
    assert condition.mask.sum(1).tolist() == [3 + after_prompt, 6 + after_prompt, 2 + after_prompt]
    expected, mask = load_pipeline(path).encode_prompt(prompts, device=torch.device("cpu"))
    longest = mask.shape[1]
    assert condition.embeddings.shape == (3, 16, 16)
    assert torch.equal(condition.mask[:, :longest], mask.bool())
    assert not condition.mask[:, longest:].any()
    assert (condition.embeddings[:, :longest] - expected).abs().max() <= 1e-5
    assert not condition.embeddings[~condition.mask].any()


def test_padding_changes_nothing(path: str) -> None:
    latents, sigma = FAMILY.build(path).initial_latents([1]), torch.tensor([0.5])
    velocities = []
    for length in (8, 64):
        policy = FAMILY.build(path, max_sequence_length=length)
        with torch.no_grad():
            velocities.append(policy.velocity(latents, sigma, policy.encode(["a red cat"])))
    assert (velocities[0] - velocities[1]).abs().max() <= 1e-6


def test_a_backward_follows_inference_mode(path: str) -> None:
    policy = FAMILY.build(path)
    latents, condition = policy.initial_latents([1]), policy.encode(PROMPTS[:1])
    policy.to("meta")  # stands for a device that position embeddings are first moved to
    inputs = latents.to("meta"), torch.full((1,), 0.5, device="meta"), condition.to("meta")
    with torch.inference_mode():
        policy.velocity(*inputs)
    policy.velocity(*inputs).sum().backward()
    assert any(parameter.grad is not None for parameter in policy.parameters())


LAST_BLOCK = "policy.transformer.transformer_blocks.1."
WITHOUT_GRADIENT: dict[int | None, set[str]] = {
    None: {
        f"{LAST_BLOCK}{layer}.{part}"
        for layer in ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        for part in ("weight", "bias")
    },
    2: {
        *(f"{LAST_BLOCK}attn.to_add_out.lora_{factor}.default.weight" for factor in "AB"),
        f"{LAST_BLOCK}attn.add_q_proj.lora_B.default.weight",  # starts at 0 and has a gradient of 0
    },
}
"""For all weights, and for a LoRA of rank 2."""


def train_with_decay(path: str, strategy: Any, lora_rank: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give what is trained before and after two steps of an optimizer that also makes weights smaller."""
    module, start = (
        FlowGRPO(
            FAMILY.make(path, lora_rank=lora_rank),
            by_index,
            group_size=2,
            num_steps=4,
            seed=0,
            lr=1e-2,
            weight_decay=0.5,
            guidance_scale=2.0,
            guidance_rescale="norm",
            ema_decay=0.5,
            ema_interval=1,
        )
        for _ in range(2)
    )
    start.configure_model()
    before = {name: value.clone() for name, value in start.state_dict().items()}
    data = PromptData(PROMPTS[:2], prompts_per_step=2, seed=0)
    _, _, after = fit(strategy, module=module, data=data, max_steps=2, gradient_clip_val=1.0)
    return before, after


def check_what_has_no_gradient(before: dict[str, Tensor], after: dict[str, Tensor], lora_rank: int | None) -> None:
    still = WITHOUT_GRADIENT[lora_rank]
    averaged = {name.replace("policy.", "weight_copies.ema.weights.", 1) for name in still}
    assert {name for name in before if torch.equal(before[name], after[name])} == still | averaged


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("is_disaggregated", [False, True], ids=["colocated", "disaggregated"])
def test_what_has_no_gradient_stays_as_it_is(path: str, is_disaggregated: bool, lora_rank: int | None) -> None:
    disaggregated = DisaggregatedStrategy(1, 1, engine="inline", trainer_assist="off")
    before, after = train_with_decay(path, disaggregated if is_disaggregated else "auto", lora_rank)
    check_what_has_no_gradient(before, after, lora_rank)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 20}, r"`height` must be a multiple of 8 for this model, got 20; near are 16 and 24"),
        ({"max_sequence_length": 1025}, r"`max_sequence_length` must be at most 1024 for Qwen-Image, got 1025"),
    ],
)
def test_unsuitable_settings_are_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILY.make(path, **settings)
