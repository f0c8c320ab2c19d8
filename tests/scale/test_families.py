"""Every model family on workers of their own: what `tests/policies` checks in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl import DisaggregatedStrategy, PromptData
from tests.integration.toy_runs import fit, relative_difference
from tests.policies.family_checks import (
    ALGORITHMS,
    TOLERANCE,
    Family,
    module_of,
    step_equals_the_colocated_one,
    step_gradient,
    weights_without_a_gradient_are_left_alone,
)
from tests.policies.test_flux import FAMILY as FLUX
from tests.policies.test_hunyuan_video import FAMILY as HUNYUAN_VIDEO
from tests.policies.test_qwen_image import FAMILY as QWEN_IMAGE
from tests.policies.test_stable_diffusion3 import FAMILY as SD3
from tests.policies.test_wan import FAMILY as WAN
from tests.policies.test_wan import TWO as WAN_OF_TWO
from tests.policies.tiny_pipelines import PROMPTS, save_tiny_pipeline

FAMILIES = [SD3, FLUX, QWEN_IMAGE, WAN, WAN_OF_TWO, HUNYUAN_VIDEO]

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.pipeline)


@pytest.fixture
def path(family: Family, tmp_path: Path) -> str:
    return str(save_tiny_pipeline(family.pipeline, tmp_path / family.pipeline))


@EVERY_FAMILY
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_rollout_in_one_process_and_training_in_another(family: Family, path: str, algorithm: str) -> None:
    step_equals_the_colocated_one(family, path, algorithm, engine="local")


@EVERY_FAMILY
@pytest.mark.parametrize("lora_rank", [2, None])
def test_sharded_trainers_and_generators_have_the_colocated_gradient(
    family: Family, path: str, lora_rank: int | None
) -> None:
    strategy = DisaggregatedStrategy(1, 2, devices_per_generator=2, sharding="fsdp", trainer_assist="off")
    sharded = step_gradient(family, path, strategy, lora_rank=lora_rank)
    assert relative_difference(sharded, step_gradient(family, path, "auto", lora_rank=lora_rank)) <= 1e-6


@EVERY_FAMILY
def test_sharded_blocks_of_frozen_bfloat16_and_trained_float32_weights_score_as_the_generators_did(
    family: Family, path: str
) -> None:
    strategy = DisaggregatedStrategy(1, 2, devices_per_generator=2, sharding="fsdp", trainer_assist="off")
    module = module_of(family, path, "bfloat16")
    data = PromptData(PROMPTS[:2], prompts_per_step=2, seed=0)
    trainer, _, after = fit(strategy, module=module, data=data, precision="bf16-mixed")
    assert trainer.callback_metrics["ratio/max_abs_dev"] <= TOLERANCE["bfloat16"]
    assert all(value.dtype.itemsize == 4 and value.isfinite().all() for value in after.values())
    assert any(value.any() for name, value in after.items() if ".lora_B." in name), "it starts at 0"


@EVERY_FAMILY
def test_two_trainers_clip_and_average_what_has_no_gradient(family: Family, path: str) -> None:
    weights_without_a_gradient_are_left_alone(family, path, engine="local", num_trainers=2)
