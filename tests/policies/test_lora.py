from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from digenrl.averaging import NoUpdates
from digenrl.policies import FluxPolicy, WeightCopy
from digenrl.policies.lora import LoRASettings, add_lora
from digenrl.policies.stored_weights import load_stored_weights
from tests.policies.tiny_pipelines import PROMPTS

SMALL: dict[str, Any] = {"height": 8, "width": 8, "max_sequence_length": 16, "dtype": "float32"}
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]

Tiny = Callable[[str], str]


def built(path: str, *, seed: int = 0, **settings: Any) -> FluxPolicy:
    policy = FluxPolicy(path, **{**SMALL, **settings})
    torch.manual_seed(seed)
    policy.build()
    load_stored_weights(policy)
    return policy


@torch.no_grad()
def velocity(policy: Any, condition: Any) -> Tensor:
    latents = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
    return policy(latents, torch.tensor([0.9, 0.3]), condition)


@torch.no_grad()
def move(policy: nn.Module) -> None:
    rng = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))


def saved_adapter(
    path: str, folder: Path, *, with_metadata: bool, rank: int = 4, alpha: float = 8, **others: Any
) -> Path:
    """A LoRA as the ecosystem saves it, with random numbers in both factors."""
    from diffusers import FluxPipeline, FluxTransformer2DModel
    from peft import LoraConfig, get_peft_model_state_dict

    transformer = FluxTransformer2DModel.from_pretrained(path, subfolder="transformer")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, init_lora_weights=False, **others)
    torch.manual_seed(2)
    transformer.add_adapter(config)
    FluxPipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=config.to_dict() if with_metadata else None,
    )
    return folder


def test_a_new_adapter_changes_nothing_and_alone_is_trained(tiny_pipeline: Tiny) -> None:
    base, adapted = built(tiny_pipeline("flux")), built(tiny_pipeline("flux"), lora_rank=4)
    condition = base.encode(PROMPTS[:2])
    assert torch.equal(velocity(adapted, condition), velocity(base, condition))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name in trained)
    assert len(trained) == 2 * (8 + 3), "q, k, v, out and their four for the prompt; the single block has no out"
    assert {parameter.shape[0] for name, parameter in adapted.named_parameters() if "lora_A" in name} == {4}
    move(adapted)
    assert not torch.equal(velocity(adapted, condition), velocity(base, condition))


@pytest.mark.parametrize(("init", "std"), [("gaussian", 1 / 4), ("kaiming", 1 / (3 * 32) ** 0.5)])
def test_adapters_are_equal_wherever_the_seed_is_equal(init: Any, std: float, tiny_pipeline: Tiny) -> None:
    first, again = (built(tiny_pipeline("flux"), lora_rank=4, lora_init=init) for _ in range(2))
    other = built(tiny_pipeline("flux"), lora_rank=4, lora_init=init, seed=1)
    state = first.state_dict()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in state.items())
    drawn = {name: value for name, value in state.items() if "lora_A" in name}
    assert not any(torch.equal(value, other.state_dict()[name]) for name, value in drawn.items())
    assert torch.cat([value.flatten() for value in drawn.values()]).std() == pytest.approx(std, rel=0.1)
    assert all(not value.any() for name, value in state.items() if "lora_B" in name)


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **tensors}, file)


def alphas_of(folder: Path, value: float) -> dict[str, Tensor]:
    """A tensor for each layer, which some programs write in place of metadata."""
    (file,) = folder.glob("*.safetensors")
    return {f"{key.split('.lora_')[0]}.alpha": torch.tensor(value) for key in load_file(file)}


@pytest.mark.parametrize(("noted", "alpha"), [("metadata", 8), ("tensors", 8), ("nowhere", 4)])
def test_training_starts_from_an_adapter_as_the_ecosystem_loads_it(
    noted: str, alpha: float, tiny_pipeline: Tiny, tmp_path: Path
) -> None:
    from diffusers import FluxPipeline

    path = tiny_pipeline("flux")
    folder = saved_adapter(path, tmp_path / "lora", with_metadata=noted == "metadata")
    if noted == "tensors":
        add_tensors(folder, alphas_of(folder, 8.0))
    policy = built(path, adapter=str(folder))
    pipeline = FluxPipeline.from_pretrained(path)
    pipeline.load_lora_weights(folder)
    reference = built(path)
    reference.transformer = pipeline.transformer
    condition = policy.encode(PROMPTS[:2])
    assert (velocity(policy, condition) - velocity(reference, condition)).abs().max() <= 1e-6
    assert (velocity(policy, condition) - velocity(built(path), condition)).abs().max() > 1e-2
    assert policy.lora is not None
    assert policy.lora.alpha == alpha, "without a note, the scale is 1"


@pytest.mark.parametrize("others", [{"use_rslora": True}, {"alpha_pattern": {"attn.to_q": 2}}])
def test_an_adapter_of_another_scale_is_refused(others: dict[str, Any], tiny_pipeline: Tiny, tmp_path: Path) -> None:
    folder = saved_adapter(tiny_pipeline("flux"), tmp_path / "lora", with_metadata=True, **others)
    with pytest.raises(ValueError, match=f"one scale, .* was saved with {next(iter(others))}: merge it into"):
        built(tiny_pipeline("flux"), adapter=str(folder))


def test_an_adapter_of_a_text_encoder_is_not_left_out_in_silence(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    folder = saved_adapter(tiny_pipeline("flux"), tmp_path / "lora", with_metadata=True)
    add_tensors(folder, {"text_encoder.layer.lora_A.weight": torch.zeros(4, 2)})
    message = r"layers of `transformer` only, .* got 1 others \(text_encoder.layer.lora_A.weight\)"
    with pytest.raises(ValueError, match=message):
        built(tiny_pipeline("flux"), adapter=str(folder))


def test_a_reference_is_the_adapter_that_training_started_from(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    folder = saved_adapter(tiny_pipeline("flux"), tmp_path / "lora", with_metadata=True)
    policy = built(tiny_pipeline("flux"), adapter=str(folder))
    reference = WeightCopy(policy, NoUpdates())
    condition = policy.encode(PROMPTS[:2])
    start = velocity(policy, condition)
    move(policy)
    assert torch.equal(velocity(reference, condition), start)
    assert not torch.equal(velocity(policy, condition), start)
    assert sum(value.numel() for value in reference.weights.buffers()) < 3_000, "as small as the adapter"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 8}, r"has rank 4 and alpha 8.0, but `lora_rank` is 8"),
        ({"lora_alpha": 4.0}, r"and `lora_alpha` 4.0: leave them out"),
        ({"lora_targets": ["to_q"]}, r"`lora_targets` are those of `adapter`"),
    ],
)
def test_settings_that_contradict_the_adapter_are_refused(
    settings: dict[str, Any], message: str, tiny_pipeline: Tiny, tmp_path: Path
) -> None:
    folder = saved_adapter(tiny_pipeline("flux"), tmp_path / "lora", with_metadata=True)
    with pytest.raises(ValueError, match=message):
        FluxPolicy(tiny_pipeline("flux"), **SMALL, adapter=str(folder), **settings).prepare()


def test_an_adapter_that_is_not_there_is_refused(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`adapter` '.*nothing' is not there"):
        FluxPolicy(tiny_pipeline("flux"), **SMALL, adapter=str(tmp_path / "nothing"))


def test_targets_that_match_nothing_are_refused_with_both_lists(tiny_pipeline: Tiny) -> None:
    with pytest.raises(ValueError, match=r"`lora_targets` 'attn.query' matches no .*end in .*attn.to_q.*proj_out"):
        FluxPolicy(tiny_pipeline("flux"), **SMALL, lora_rank=2, lora_targets=["attn.to_q", "attn.query"]).prepare()
    with pytest.raises(ValueError, match=r"`lora_targets` 'to_q' matches no linear layer"):
        FluxPolicy(tiny_pipeline("flux"), **SMALL, lora_rank=2, lora_targets="to_q").prepare()


def test_a_check_before_workers_start_leaves_no_trace(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    folder = saved_adapter(tiny_pipeline("flux"), tmp_path / "lora", with_metadata=True)
    checked, other = (FluxPolicy(tiny_pipeline("flux"), **SMALL, adapter=str(folder)) for _ in range(2))
    torch.manual_seed(5)
    checked.prepare()
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert not list(checked.parameters())
    assert checked.state_dict() == {}
    for policy in (checked, other):
        torch.manual_seed(0)
        policy.build()
        load_stored_weights(policy)
    condition = other.encode(PROMPTS[:2])
    assert torch.equal(velocity(checked, condition), velocity(other, condition))


def test_a_regular_expression_chooses_layers_by_their_whole_path(tiny_pipeline: Tiny) -> None:
    policy = FluxPolicy(
        tiny_pipeline("flux"), **SMALL, lora_rank=2, lora_targets=r"single_transformer_blocks\..*to_[qk]"
    )
    policy.build()
    layers = {name.split(".lora_")[0] for name, value in policy.named_parameters() if value.requires_grad}
    assert layers == {f"transformer.single_transformer_blocks.0.attn.to_{end}" for end in "qk"}


def test_weights_of_another_form_are_refused() -> None:
    settings = LoRASettings(rank=2, alpha=4, targets=["0"])
    factors = {"0.lora_A.weight": torch.zeros(2, 3), "0.lora_B.weight": torch.zeros(5, 2)}
    model = nn.Sequential(nn.Linear(3, 5))
    assert add_lora(model, settings, factors) == ["0"]
    with pytest.raises(
        ValueError, match=r"1 of its tensors have no place \(1.lora_A.weight\) and 0 are missing \(none\)"
    ):
        add_lora(nn.Sequential(nn.Linear(3, 5)), settings, {**factors, "1.lora_A.weight": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"`0.lora_A.weight` of `adapter` has shape \[3, 3\], but .* has \[2, 3\]"):
        add_lora(nn.Sequential(nn.Linear(3, 5)), settings, {**factors, "0.lora_A.weight": torch.zeros(3, 3)})
