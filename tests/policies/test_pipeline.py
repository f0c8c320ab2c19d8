from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from digenrl.policies import FluxPolicy, PipelinePolicy, StableDiffusion3Policy
from digenrl.policies.pipeline import find_family
from digenrl.policies.stored_weights import load_stored_weights
from tests.policies.tiny_pipelines import PROMPTS

SMALL: dict[str, Any] = {"height": 8, "width": 8, "max_sequence_length": 16, "dtype": "float32"}

Tiny = Callable[[str], str]


def changed_copy(source: str, target: Path, part: str, **values: Any) -> str:
    """Copy a pipeline with other entries in the configuration of a part, None for none."""
    shutil.copytree(source, target)
    name = "scheduler_config.json" if part == "scheduler" else "model_index.json" if not part else "config.json"
    path = target / part / name
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(target)


def test_the_family_is_found_by_the_pipelines_class(tiny_pipeline: Tiny) -> None:
    policy = PipelinePolicy.from_pretrained(tiny_pipeline("flux"), **SMALL, guidance=2.0)
    assert isinstance(policy, FluxPolicy)
    assert isinstance(StableDiffusion3Policy.from_pretrained(tiny_pipeline("sd3"), **SMALL), StableDiffusion3Policy)


def test_a_pipeline_of_another_family_is_refused(tiny_pipeline: Tiny) -> None:
    with pytest.raises(ValueError, match=r"StableDiffusion3Pipeline, which `StableDiffusion3Policy` is for"):
        FluxPolicy.from_pretrained(tiny_pipeline("sd3"), **SMALL)
    with pytest.raises(ValueError, match=r"`FluxPolicy` is for FluxPipeline, but .* is a StableDiffusion3Pipeline"):
        FluxPolicy(tiny_pipeline("sd3"), **SMALL)


def test_an_unknown_pipeline_is_refused_with_the_known_ones(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    path = changed_copy(tiny_pipeline("flux"), tmp_path / "x", "", _class_name="SanaPipeline")
    with pytest.raises(ValueError, match=r"for the pipeline class `SanaPipeline`; known are .*FluxPipeline.*new_model"):
        PipelinePolicy.from_pretrained(path)


def test_a_users_family_registers_itself(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    class Own(StableDiffusion3Policy):
        pipeline_classes = ("OwnPipeline",)

    path = changed_copy(tiny_pipeline("sd3"), tmp_path / "x", "", _class_name="OwnPipeline")
    assert isinstance(PipelinePolicy.from_pretrained(path, **SMALL), Own)
    assert find_family("StableDiffusion3Pipeline") is StableDiffusion3Policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 7}, r"`height` must be a multiple of 2 for this model, got 7; near are 6 and 8"),
        ({"width": 0}, r"`width` must be at least 1, got 0"),
        ({"dtype": "half"}, r"`dtype` must be bfloat16 or float32, got 'half'"),
        ({"text_encoders": "drop"}, r"`text_encoders` must be free, offload or keep, got 'drop'"),
        ({"lora_rank": 0}, r"`lora_rank` must be at least 1, got 0; None trains all weights"),
        ({"lora_rank": 2, "lora_alpha": -1.0}, r"`lora_alpha` must be positive and finite, got -1.0"),
        ({"lora_alpha": 2.0}, r"`lora_alpha` and `lora_targets` need a `lora_rank`"),
        ({"lora_init": "kaiming"}, r"`lora_init` must be left out without a `lora_rank`, .* got 'kaiming'"),
        ({"revision": "main"}, r"`revision` is of a repository on the hub"),
        ({"max_sequence_length": 600}, r"`max_sequence_length` must be at most 512 for FLUX.1, got 600"),
        ({"guidance": -1.0}, r"`guidance` must be at least 0, got -1.0"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any], message: str, tiny_pipeline: Tiny) -> None:
    with pytest.raises(ValueError, match=message):
        FluxPolicy(tiny_pipeline("flux"), **{**SMALL, **settings})


def test_guidance_of_a_model_without_a_place_for_it_is_refused(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    path = changed_copy(tiny_pipeline("flux"), tmp_path / "x", "transformer", guidance_embeds=False)
    with pytest.raises(ValueError, match=r"`guidance` is for models that are told it, which this one is not.* got 3.5"):
        FluxPolicy(path, **SMALL, guidance=3.5)
    assert FluxPolicy(path, **SMALL).latent_shape == (16, 4)


def test_a_size_beyond_the_position_table_is_refused(tiny_pipeline: Tiny) -> None:
    with pytest.raises(ValueError, match=r"`height` must be at most 32 for this model, got 64"):
        StableDiffusion3Policy(tiny_pipeline("sd3"), **{**SMALL, "height": 64})


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no model_index.json"):
        FluxPolicy(str(tmp_path), **SMALL)
    with pytest.raises(FileNotFoundError, match=r"folder of a diffusers pipeline or its hub id, got '/no/such/folder'"):
        FluxPolicy("/no/such/folder", **SMALL)


def test_a_hub_id_is_not_asked_for_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    policy = FluxPolicy("nobody/nothing", **SMALL)
    with pytest.raises(RuntimeError, match=r"the sizes of 'nobody/nothing', which is on the hub, are known once it is"):
        policy.sigmas(4)


def test_a_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"`path` 'nobody/nothing' is no folder here .* HF_HUB_OFFLINE"
    ) as caught:
        FluxPolicy("nobody/nothing", **SMALL)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    policy = FluxPolicy("nobody/nothing", **SMALL)

    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise OSError("cannot connect\nto the hub")

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"cannot be had from the hub \(cannot connect\)") as caught:
        policy.build()
    assert "\n" not in str(caught.value)


def test_a_downloaded_repository_is_known_at_construction(
    tiny_pipeline: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--nobody--flux"
    shutil.copytree(tiny_pipeline("flux"), repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert FluxPolicy("nobody/flux", **SMALL).latent_shape == (16, 4)


def test_a_schedule_without_a_formula_is_refused(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    for name in ("use_karras_sigmas", "use_dynamic_shifting"):
        path = changed_copy(tiny_pipeline("sd3"), tmp_path / name, "scheduler", **{name: True})
        with pytest.raises(ValueError, match=f"the pipeline's scheduler has {name}, which there is no schedule for"):
            StableDiffusion3Policy(path, **SMALL)


@pytest.mark.parametrize(
    ("pipeline", "changes"),
    [
        ("sd3", {"shift": 5.0}),
        ("flux", {"base_shift": 0.4, "max_shift": 1.3}),
        ("flux", {"shift_terminal": 0.1}),
        ("flux", {"use_dynamic_shifting": False, "shift": 1.0}),
    ],
)
def test_schedules_equal_the_schedulers(
    pipeline: str, changes: dict[str, Any], tiny_pipeline: Tiny, tmp_path: Path
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    path = changed_copy(tiny_pipeline(pipeline), tmp_path / "x", "scheduler", **changes)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler")
    if pipeline == "sd3":
        scheduler.set_timesteps(10)
    else:
        config = scheduler.config
        mu = calculate_shift(
            16, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        scheduler.set_timesteps(sigmas=[1 - step / 10 for step in range(10)], mu=mu)
    ours = PipelinePolicy.from_pretrained(path, **SMALL).sigmas(10)
    assert torch.allclose(ours, scheduler.sigmas, atol=1e-6, rtol=0)


def test_a_pipeline_without_t5_has_zeros_in_its_place(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    path = changed_copy(tiny_pipeline("sd3"), tmp_path / "x", "", text_encoder_3=[None, None], tokenizer_3=[None, None])
    policy, whole = (StableDiffusion3Policy(folder, **SMALL) for folder in (path, tiny_pipeline("sd3")))
    for entry in (policy, whole):
        entry.build()
        load_stored_weights(entry)
    without, with_t5 = (entry.encode(PROMPTS[:1]).embeddings for entry in (policy, whole))
    assert torch.equal(without[:, :77], with_t5[:, :77])
    assert torch.equal(without[:, 77:], torch.zeros(1, 16, 32))


def test_frozen_weights_have_the_dtype_and_trained_ones_are_float32(tiny_pipeline: Tiny) -> None:
    policy = StableDiffusion3Policy(tiny_pipeline("sd3"), **{**SMALL, "dtype": "bfloat16"}, lora_rank=2)
    policy.build()
    load_stored_weights(policy)
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    whole = StableDiffusion3Policy(tiny_pipeline("sd3"), **{**SMALL, "dtype": "bfloat16"})
    whole.build()
    load_stored_weights(whole)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    assert whole.encode(PROMPTS[:1]).embeddings.dtype == torch.bfloat16


def test_weights_equal_the_pipelines(tiny_pipeline: Tiny) -> None:
    from diffusers import SD3Transformer2DModel

    policy = StableDiffusion3Policy(tiny_pipeline("sd3"), **SMALL, lora_rank=2)
    policy.build()
    assert all(parameter.is_meta != parameter.requires_grad for parameter in policy.parameters())
    load_stored_weights(policy)
    theirs = SD3Transformer2DModel.from_pretrained(tiny_pipeline("sd3"), subfolder="transformer").state_dict()
    ours: dict[str, Tensor] = nn.Module.state_dict(policy.transformer)
    assert {name.replace(".base_layer", ""): 0 for name in ours if "lora" not in name} == dict.fromkeys(theirs, 0)
    for name, value in ours.items():
        if "lora" not in name:
            assert torch.equal(value, theirs[name.replace(".base_layer", "")])


@pytest.mark.parametrize(("after", "num_loads"), [("free", 2), ("offload", 1), ("keep", 1)])
def test_text_encoders_are_loaded_as_often_as_they_are_freed(
    after: Any, num_loads: int, tiny_pipeline: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = FluxPolicy(tiny_pipeline("flux"), **SMALL, text_encoders=after)
    policy.build()
    load_stored_weights(policy)
    loads = []
    load = policy._text_encoding._load
    monkeypatch.setattr(policy._text_encoding, "_load", lambda: (loads.append(0), load())[1])
    first = policy.encode(PROMPTS[:2])
    policy.encode(PROMPTS[:2])  # these are known
    policy.encode(PROMPTS[2:3])
    assert len(loads) == num_loads
    assert not any("text_encoder" in name or "vae" in name for name, _ in policy.named_modules())
    with torch.inference_mode():
        policy.encode(PROMPTS[3:4])
    kept = [value for entry in policy._embeddings._kept.values() for value in entry.values()]
    assert not any(value.is_inference() for value in kept), "they are also trained with"
    assert first.embeddings.requires_grad is False
