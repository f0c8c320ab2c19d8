from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.policies import FluxKontextPolicy, PipelinePolicy
from digenrl.policies.transformer_inputs import call_transformer
from tests.integration.toy_runs import relative_difference
from tests.policies.family_checks import (
    Check,
    Family,
    Mode,
    a_policy_that_was_used_can_be_sent,
    checkpoint_has_what_is_trained,
    module_of,
    name_of,
    ode_equals_the_pipeline,
    step_gradient,
)
from tests.policies.image_prompts import batch_of, prompts_of, ratio_is_one, save_image, save_prompts
from tests.policies.tiny_pipelines import PROMPTS

CALL = {"height": 8, "width": 16, "max_area": 128, "max_sequence_length": 16, "guidance_scale": 3.5}
FAMILY = Family(
    policy=FluxKontextPolicy,
    pipeline="kontext",
    settings={"height": 8, "width": 16, "image_height": 12, "image_width": 10, "max_sequence_length": 16},
    media_shape=(3, 8, 16),
    call=CALL,
    timestep_scale=1.0,
)
WITHOUT_IMAGES: list[Check] = [
    ode_equals_the_pipeline,
    partial(checkpoint_has_what_is_trained, lora_rank=2),
    a_policy_that_was_used_can_be_sent,
]


@pytest.mark.parametrize("check", WITHOUT_IMAGES, ids=name_of)
def test_family(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(FAMILY, tiny_pipeline(FAMILY.pipeline))


@pytest.fixture
def path(tiny_pipeline: Callable[[str], str]) -> str:
    return tiny_pipeline("kontext")


@pytest.fixture
def metadata(tmp_path: Path) -> list[Mapping[str, Any]]:
    return [
        {"image": save_image(tmp_path / "a.png", 12, 10)},
        {"image": save_image(tmp_path / "b.png", 24, 20, seed=1)},
    ]


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_ode_with_an_image_equals_the_pipeline(path: str, metadata: list[Mapping[str, Any]], scale: float) -> None:
    from diffusers import DiffusionPipeline

    module = module_of(FAMILY, path, lora_rank=None, guidance_scale=scale)
    module.configure_model()
    policy, noise = module.policy, module.policy.initial_latents([1, 2])
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    guided: dict[str, Any] = {}
    if scale > 1:
        guided = {"true_cfg_scale": scale, "negative_prompt": "a dark dog"}
        metadata = [{**row, "negative_prompt": "a dark dog"} for row in metadata]
    theirs = [
        pipeline(
            image=pipeline.image_processor.resize(Image.open(metadata[row]["image"]), 12, 10),
            prompt=PROMPTS[row],
            latents=noise[row : row + 1],
            num_inference_steps=4,
            output_type="latent",
            _auto_resize=False,
            **CALL,
            **guided,
        )[0]
        for row in range(2)
    ]
    with torch.no_grad():
        condition = policy.encode_batch(batch_of(metadata))
        assert condition.image_latents.shape == (2, 6 * 5, 4)
        ours = module._solve(policy, noise, condition, policy.sigmas(4), "euler")
        without = module._solve(policy, noise, policy.encode(PROMPTS[:2]), policy.sigmas(4), "euler")
    assert (ours - torch.cat(theirs)).abs().max() <= 1e-5
    assert (ours - without).abs().max() > 1e-3


@pytest.mark.parametrize(("mode", "scale"), [("float32", 2.0), ("bfloat16", 1.0)])
def test_recomputed_ratio_is_one(path: str, metadata: list[Mapping[str, Any]], mode: Mode, scale: float) -> None:
    module = module_of(FAMILY, path, mode, timestep_fraction=1.0, guidance_scale=scale)
    ratio_is_one(module, mode, metadata)


def test_trainers_have_the_images(path: str, metadata: list[Mapping[str, Any]], tmp_path: Path) -> None:
    file = save_prompts(tmp_path / "prompts.jsonl", [{"image": Path(row["image"]).name} for row in metadata])
    strategy = DisaggregatedStrategy(1, 1, engine="inline", groups_per_micro_batch=2, trainer_assist="off")
    disaggregated, colocated, without = (
        step_gradient(FAMILY, path, how, data=PromptData(prompts, prompts_per_step=2, seed=0))
        for how, prompts in ((strategy, file), ("auto", file), ("auto", PROMPTS[:2]))
    )
    assert relative_difference(disaggregated, colocated) <= 1e-6
    assert relative_difference(without, colocated) > 1e-3


def test_inputs_of_zeros_have_the_shapes_of_real_ones(path: str, metadata: list[Mapping[str, Any]]) -> None:
    policy = FAMILY.build(path)
    received: list[dict[str, Any]] = []
    policy.transformer.register_forward_pre_hook(lambda _, args, kwargs: received.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        policy.velocity(policy.initial_latents([1, 2]), torch.ones(2), policy.encode_batch(batch_of(metadata)))
        call_transformer(policy.transformer, policy, 2)
    real, zeros = ({name: value.shape for name, value in call.items() if name != "return_dict"} for call in received)
    assert real == zeros


def test_an_image_is_encoded_once(path: str, metadata: list[Mapping[str, Any]]) -> None:
    policy = FAMILY.build(path)
    calls: list[int] = []
    encode = policy._encode_images
    policy._encode_images = lambda images, device: calls.append(len(images)) or encode(images, device)  # type: ignore
    batch = batch_of([metadata[0], metadata[1], metadata[0]])
    first, second = policy.encode_batch(batch), policy.encode_batch(batch)
    assert calls == [1, 1]
    assert torch.equal(first.image_latents, second.image_latents)
    assert torch.equal(first.image_latents[0], first.image_latents[2])


def test_images_that_do_not_suit_are_refused(path: str, tmp_path: Path) -> None:
    policy = FAMILY.make(path)
    wide = {"image": save_image(tmp_path / "wide.png", 12, 24)}
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    whole = Path(save_image(tmp_path / "whole.png", 12, 10)).read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full((12, 10), 4096, dtype=np.uint16)).save(tmp_path / "deep.png")
    for metadata, message in (
        (wide, "is 24 x 12 and would be stretched to 10 x 12: cut it to that shape"),
        ({"image": str(tmp_path / "text.png")}, "cannot be read as an image"),
        ({"image": str(tmp_path / "gone.png")}, "gone.png` is not there"),
        ({"image": str(tmp_path / "half.png")}, "half.png` cannot be read as an image: image file is truncated"),
        (
            {"image": str(tmp_path / "deep.png")},
            "deep.png` has more than 8 bits a channel (I;16), which would be cut off",
        ),
        ({"images": [wide["image"]] * 2}, "takes 0 or 1 images with a prompt, but 'a red cat' has 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            policy.check_prompts(prompts_of([metadata]))
    cropping = FAMILY.build(path, crop_images=True)
    cropping.check_prompts(prompts_of([wide]))
    cut = save_image(tmp_path / "cut.png", 12, 24)
    Image.open(cut).crop((7, 0, 17, 12)).save(cut)
    ours, theirs = (cropping.encode_batch(batch_of([{"image": file}])) for file in (wide["image"], cut))
    assert torch.equal(ours.image_latents, theirs.image_latents)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_height": 11}, "`image_height` must be a multiple of 2 .*, got 11"),
        ({"image_width": 0}, "`image_width` must be at least 1, got 0"),
    ],
)
def test_unsuitable_sizes_are_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILY.make(path, **settings)


def test_family_is_found(path: str) -> None:
    assert isinstance(PipelinePolicy.from_pretrained(path, **FAMILY.settings), FluxKontextPolicy)
