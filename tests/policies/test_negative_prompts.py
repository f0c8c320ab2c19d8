from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.types import Prompt, PromptBatch
from tests.integration.toy_runs import relative_difference
from tests.policies.family_checks import module_of, step_gradient
from tests.policies.test_qwen_image import FAMILY, load_pipeline
from tests.policies.tiny_pipelines import PROMPTS

METADATA: list[Mapping[str, str]] = [{"negative_prompt": "a green dog"}, {}]


def requests(metadata: list[Mapping[str, str]]) -> PromptBatch:
    prompts = [
        Prompt(text, uid, metadata=entry) for uid, (text, entry) in enumerate(zip(PROMPTS, metadata, strict=False))
    ]
    return PromptBatch.for_validation(prompts, seed=0)


def test_each_prompt_is_led_away_from_its_own(tiny_pipeline: Callable[[str], str]) -> None:
    path = tiny_pipeline("qwen")
    module = module_of(FAMILY, path, lora_rank=None, guidance_scale=4.0, validation_steps=4)
    module.configure_model()
    prompts = requests(METADATA)
    noise = module.policy.initial_latents(prompts.seeds)
    images = load_pipeline(path)(
        prompt=PROMPTS[:2],
        negative_prompt=["a green dog", " "],
        latents=noise,
        num_inference_steps=4,
        output_type="pt",
        **{**FAMILY.call, "true_cfg_scale": 4.0},
    )[0]
    assert (module.sample(prompts) - images).abs().max() <= 1e-4
    without = module.sample(requests([{}, {}]))
    assert (without[0] - images[0]).abs().max() > 1e-3


def test_trainers_have_the_generators_negative_prompts(tiny_pipeline: Callable[[str], str], tmp_path: Path) -> None:
    path, file = tiny_pipeline("qwen"), tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, **entry} for text, entry in zip(PROMPTS, METADATA, strict=False)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    strategy = DisaggregatedStrategy(
        1, 1, engine="inline", groups_per_micro_batch=2, timestep_batch_size=1, trainer_assist="off"
    )
    disaggregated, colocated, without = (
        step_gradient(FAMILY, path, how, data=PromptData(prompts, prompts_per_step=2, seed=0), guidance_scale=4.0)
        for how, prompts in ((strategy, file), ("auto", file), ("auto", PROMPTS[:2]))
    )
    assert relative_difference(disaggregated, colocated) <= 1e-6
    assert relative_difference(without, colocated) > 1e-3
