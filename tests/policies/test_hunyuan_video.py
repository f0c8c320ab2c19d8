from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from digenrl.policies import HunyuanVideoPolicy, PipelinePolicy
from tests.policies.family_checks import CHECKS, Check, Family, name_of
from tests.policies.tiny_pipelines import PROMPTS

TEMPLATE = {"template": "a {}", "crop_start": 1}
SIZES = {"height": 16, "width": 32, "num_frames": 5, "max_sequence_length": 16, "prompt_template": TEMPLATE}

FAMILY = Family(
    policy=HunyuanVideoPolicy,
    pipeline="hunyuan",
    settings={**SIZES, "guidance": 4.5},
    media_shape=(5, 3, 16, 32),
    call={**SIZES, "guidance_scale": 4.5},
    guided_call={"true_cfg_scale": 2.0, "negative_prompt": ""},
)


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_family(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(FAMILY, tiny_pipeline(FAMILY.pipeline))


@pytest.fixture
def path(tiny_pipeline: Callable[[str], str]) -> str:
    return tiny_pipeline("hunyuan")


def load_pipeline(path: str) -> Any:
    from diffusers import HunyuanVideoPipeline

    pipeline = HunyuanVideoPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_videos_are_those_of_the_pipeline(path: str) -> None:
    policy, pipeline = FAMILY.build(path), load_pipeline(path)
    settings = {"prompt": PROMPTS[:2], "latents": policy.initial_latents([1, 2]), "num_inference_steps": 2}
    videos, latents = (pipeline(**settings, **FAMILY.call, output_type=kind)[0] for kind in ("pt", "latent"))
    assert (policy.decode(latents) - videos).abs().max() <= 1e-5


@pytest.mark.parametrize("settings", [{"prompt_template": TEMPLATE}, {}])
def test_embeddings_are_those_of_the_pipeline_with_its_template_or_another(path: str, settings: dict[str, Any]) -> None:
    sizes = {"prompt_template": None, "max_sequence_length": 256}
    condition: Any = FAMILY.build(path, **{**sizes, **settings}).encode(PROMPTS)
    embeddings, pooled, mask = load_pipeline(path).encode_prompt(PROMPTS, device=torch.device("cpu"), **settings)
    assert condition.mask.dtype == torch.bool
    assert torch.equal(condition.mask, mask.bool())
    assert (condition.embeddings - embeddings).abs().max() <= 1e-5
    assert (condition.pooled - pooled).abs().max() <= 1e-5
    assert condition.mask.sum(1).unique().numel() > 1, "the prompts differ in length"


def test_guidance_is_told_times_1000_and_six_by_default(path: str) -> None:
    for settings, expected in (({"guidance": None}, 6000.0), ({"guidance": 6.018}, 6018.0)):
        policy = FAMILY.build(path, **settings)
        told: list[Any] = []
        policy.transformer.register_forward_pre_hook(
            lambda _, args, kwargs, told=told: told.append(kwargs["guidance"]), with_kwargs=True
        )
        with torch.no_grad():
            policy.velocity(policy.initial_latents([1, 2]), torch.tensor([1.0, 0.5]), policy.encode(PROMPTS[:2]))
        assert told[0].dtype == torch.float32
        assert told[0].tolist() == pytest.approx([expected, expected], rel=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 20}, "`width` must be a multiple of 8 .*, got 20; near are 16 and 24"),
        ({"num_frames": 6}, "`num_frames` must be one more than a multiple of 4 .*, got 6; near are 5 and 9"),
        ({"guidance": -1.0}, "`guidance` must be at least 0, got -1.0"),
        ({"prompt_template": {"template": "a {}"}}, "`prompt_template` must have a `template` with {} .* `crop_start`"),
    ],
)
def test_unsuitable_settings_are_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILY.make(path, **settings)


def test_family_is_found(path: str) -> None:
    assert isinstance(PipelinePolicy.from_pretrained(path, **FAMILY.settings), HunyuanVideoPolicy)
