from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.policies import PipelinePolicy, WanImageToVideoPolicy
from digenrl.policies.transformer_inputs import call_transformer
from tests.integration.toy_runs import relative_difference
from tests.policies.family_checks import checkpoint_has_what_is_trained, module_of, step_gradient
from tests.policies.image_prompts import batch_of, prompts_of, ratio_is_one, save_image, save_prompts
from tests.policies.test_wan import FAMILY as TEXT_FAMILY
from tests.policies.test_wan import euler_of
from tests.policies.tiny_pipelines import PROMPTS

FAMILY = replace(TEXT_FAMILY, policy=WanImageToVideoPolicy, pipeline="wan_image")
"""Wan 2.2's, with two transformers."""
TOLD = replace(FAMILY, pipeline="wan_image_told", settings={**FAMILY.settings, "max_sequence_length": 512})
"""Wan 2.1's, which CLIP tells of the image."""
TWO_TOLD = replace(TOLD, pipeline="wan_two_images_told")


@pytest.fixture
def ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline needs it, though it is an extra; it changes nothing in the texts of these tests."""
    from diffusers.pipelines.wan import pipeline_wan_i2v
    from diffusers.utils import is_ftfy_available

    if not is_ftfy_available():
        monkeypatch.setattr(pipeline_wan_i2v, "ftfy", SimpleNamespace(fix_text=str), raising=False)


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    return [save_image(tmp_path / f"{seed}.png", 16, 32, seed) for seed in range(4)]


def metadata_of(images: Sequence[str], num_images: int) -> list[Mapping[str, Any]]:
    if num_images == 1:
        return [{"image": images[0]}, {"image": images[1]}]
    return [{"images": list(images[:2])}, {"images": list(images[2:])}]


@pytest.mark.usefixtures("ftfy")
@pytest.mark.parametrize(
    ("family", "num_images", "scale"), [(FAMILY, 1, 2.0), (FAMILY, 2, 1.0), (TOLD, 1, 2.0), (TWO_TOLD, 2, 1.0)]
)
def test_ode_equals_the_pipeline(
    tiny_pipeline: Callable[[str], str], images: list[str], family: Any, num_images: int, scale: float
) -> None:
    from diffusers import DiffusionPipeline

    path, metadata = tiny_pipeline(family.pipeline), metadata_of(images, num_images)
    module = module_of(family, path, lora_rank=None, guidance_scale=scale)
    module.configure_model()
    policy, noise = module.policy, module.policy.initial_latents([1, 2])
    with torch.no_grad():
        ours = module._solve(policy, noise, policy.encode_batch(batch_of(metadata)), policy.sigmas(4), "euler")
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = euler_of(pipeline.scheduler, 4)
    for row, entry in enumerate(metadata):
        opened = [Image.open(file) for file in entry.get("images", [entry.get("image")])]
        theirs = pipeline(
            image=opened[0],
            last_image=opened[1] if num_images == 2 else None,
            prompt=PROMPTS[row],
            negative_prompt="",
            latents=noise[row : row + 1],
            num_inference_steps=4,
            output_type="latent",
            **{**family.call, "max_sequence_length": policy.max_sequence_length, "guidance_scale": scale},
        )[0]
        assert (ours[row] - theirs[0]).abs().max() <= 1e-5
    assert (ours - noise).abs().max() > 0.1


@pytest.mark.parametrize(("family", "num_images"), [(FAMILY, 1), (TWO_TOLD, 2)])
def test_recomputed_ratio_is_one(
    tiny_pipeline: Callable[[str], str], images: list[str], family: Any, num_images: int
) -> None:
    module = module_of(family, tiny_pipeline(family.pipeline), timestep_fraction=1.0)
    ratio_is_one(module, "float32", metadata_of(images, num_images))


def test_trainers_have_the_images(tiny_pipeline: Callable[[str], str], images: list[str], tmp_path: Path) -> None:
    path = tiny_pipeline("wan_image")
    files = [save_prompts(tmp_path / f"{name}.jsonl", metadata_of(images, name)) for name in (1, 2)]
    strategy = DisaggregatedStrategy(1, 1, engine="inline", groups_per_micro_batch=2, trainer_assist="off")
    disaggregated, colocated, other = (
        step_gradient(FAMILY, path, how, data=PromptData(file, prompts_per_step=2, seed=0))
        for how, file in ((strategy, files[0]), ("auto", files[0]), ("auto", files[1]))
    )
    assert relative_difference(disaggregated, colocated) <= 1e-6
    assert relative_difference(other, colocated) > 1e-3


def test_checkpoint_has_what_is_trained(tiny_pipeline: Callable[[str], str]) -> None:
    """Its velocities are those without an image, which the export of weights asks for as well."""
    for family in (FAMILY, TWO_TOLD):
        partial(checkpoint_has_what_is_trained, lora_rank=2)(family, tiny_pipeline(family.pipeline))


@pytest.mark.parametrize("family", [FAMILY, TOLD, TWO_TOLD])
def test_inputs_of_zeros_have_the_shapes_of_real_ones(
    tiny_pipeline: Callable[[str], str], images: list[str], family: Any
) -> None:
    policy = family.build(tiny_pipeline(family.pipeline))
    received: list[dict[str, Any]] = []
    policy.transformer.register_forward_pre_hook(lambda _, args, kwargs: received.append(kwargs), with_kwargs=True)
    condition = policy.encode_batch(batch_of(metadata_of(images, 2 if family is TWO_TOLD else 1)))
    with torch.no_grad():
        policy.velocity(policy.initial_latents([1, 2]), torch.ones(2), condition)
        call_transformer(policy.transformer, policy, 2)
    real, zeros = ({name: value.shape for name, value in call.items() if name != "return_dict"} for call in received)
    assert real == zeros


def test_images_that_do_not_suit_are_refused(tiny_pipeline: Callable[[str], str], images: list[str]) -> None:
    for family, num_images, message in (
        (FAMILY, 0, "takes 1 or 2 images with a prompt, but 'a red cat' has 0"),
        (TOLD, 2, "takes 1 images with a prompt, but 'a red cat' has 2"),
        (TWO_TOLD, 1, "takes 2 images with a prompt, but 'a red cat' has 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            family.make(tiny_pipeline(family.pipeline)).check_prompts(prompts_of([{"images": images[:num_images]}]))


def test_an_encoder_of_images_must_stay(tiny_pipeline: Callable[[str], str], images: list[str]) -> None:
    policy = TOLD.make(tiny_pipeline("wan_image_told"), text_encoders="free")
    with pytest.raises(ValueError, match="`text_encoders` must be offload or keep for Wan 2.1 with images, got free"):
        policy.check_prompts(prompts_of([{"image": images[0]}]))
    FAMILY.make(tiny_pipeline("wan_image"), text_encoders="free").check_prompts(prompts_of([{"image": images[0]}]))


@pytest.mark.parametrize(
    ("pipeline", "settings", "message"),
    [
        ("wan_image_told", {"max_sequence_length": 16}, "`max_sequence_length` must be 512 .* got 16"),
        ("wan_image", {"image_height": 32}, "`image_height` and `image_width` must be left out .* got 32 x 32"),
        ("wan_image", {"height": 24}, "`height` must be a multiple of 16 .*, got 24"),
    ],
)
def test_unsuitable_settings_are_refused(
    tiny_pipeline: Callable[[str], str], pipeline: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TOLD.make(tiny_pipeline(pipeline), **settings)


def test_family_is_found(tiny_pipeline: Callable[[str], str]) -> None:
    assert isinstance(PipelinePolicy.from_pretrained(tiny_pipeline("wan_image")), WanImageToVideoPolicy)
