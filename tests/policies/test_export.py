from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from digenrl.policies import PipelinePolicy
from digenrl.policies.export import (
    Exported,
    ExportError,
    difference,
    export_lora,
    export_pipeline,
    export_state,
    probe,
)
from tests.policies.export_checks import case_of, largest_difference, load_in_a_fresh_process, spied_calls
from tests.policies.family_checks import Family, module_of
from tests.policies.test_flux import FAMILY as FLUX
from tests.policies.test_stable_diffusion3 import FAMILY as SD3
from tests.policies.test_wan import TWO as WAN_OF_TWO
from tests.policies.tiny_pipelines import PROMPTS
from tests.toy import ToyPolicy

FORMS = ("lora", "merged", "full")

Tiny = Callable[[str], str]


@torch.no_grad()
def move(policy: torch.nn.Module) -> None:
    """What training does, but more."""
    rng = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))


def trained(family: Family, path: str, **settings: Any) -> PipelinePolicy:
    policy = family.build(path, **settings)
    move(policy)
    return policy


def export(policy: PipelinePolicy, folder: Path, form: str) -> Exported:
    folder.mkdir(parents=True)
    return export_lora(policy, folder) if form == "lora" else export_pipeline(policy, folder)


def lora_metadata(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as opened:
        noted: dict[str, Any] = json.loads(opened.metadata()["lora_adapter_metadata"])
    return noted


def export_with_latents(family: Family, path: str, folder: Path, form: str) -> tuple[dict[str, Any], Tensor | None]:
    """Export trained weights; gives what a fresh process is to load, and the latents that its pipeline is to give."""
    lora = {"lora_rank": None} if form == "full" else {}
    module = module_of(family, path, **lora)
    module.configure_model()
    policy = module.policy
    if form != "full":
        assert policy.lora.alpha != policy.lora.rank, "a scale of 1 would not be missed"
    move(policy)
    noise, calls = policy.initial_latents([1, 2]), spied_calls(policy)
    with torch.no_grad():
        sigmas = policy.sigmas(family.num_steps)
        latents = module._solve(policy, noise, policy.encode(PROMPTS[:2]), sigmas, "euler")
    whole = {"prompt": PROMPTS[:2], "num_inference_steps": family.num_steps, **family.call}
    whole["latents"] = family.to_pipeline(policy, noise)
    if family.pipeline.startswith("wan"):  # its pipeline has a solver of its own
        whole, latents = None, None
    exported = export(policy, folder, form)
    weights = exported.weights if form == "lora" else None
    return case_of(path if form == "lora" else folder, folder, weights, calls, whole), latents


def exports_load_elsewhere(families: list[Family], tiny_pipeline: Tiny, folder: Path) -> None:
    """A fresh process with diffusers alone computes what the policies did."""
    keys = [(family, form) for family in families for form in FORMS]
    made = [
        export_with_latents(family, tiny_pipeline(family.pipeline), folder / family.pipeline / form, form)
        for family, form in keys
    ]
    loaded = load_in_a_fresh_process([case for case, _ in made], folder)
    for (family, form), case, (_, latents) in zip(keys, loaded, made, strict=True):
        assert largest_difference(case) <= 1e-6, (family.pipeline, form)
        if latents is not None:
            policy = family.make(tiny_pipeline(family.pipeline))
            found = family.from_pipeline(policy, case["latents"])
            assert (found - latents).abs().max() <= 1e-5, (family.pipeline, form)


def test_what_was_exported_computes_the_same_in_a_process_of_diffusers_alone(
    tiny_pipeline: Tiny, tmp_path: Path
) -> None:
    exports_load_elsewhere([SD3, FLUX], tiny_pipeline, tmp_path)


def test_an_adapters_scale_is_noted_in_its_file(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    policy = trained(FLUX, tiny_pipeline("flux"), lora_rank=2, lora_alpha=5.0)
    exported = export(policy, tmp_path / "lora", "lora")
    noted = lora_metadata(tmp_path / "lora" / exported.weights["transformer"])
    assert (noted["transformer.r"], noted["transformer.lora_alpha"]) == (2, 5.0)
    assert exported.deviation == 0.0


def test_an_exported_adapter_can_be_trained_on(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    path = tiny_pipeline("wan_two_transformers")
    policy = trained(WAN_OF_TWO, path, lora_rank=2, lora_alpha=3.0)
    before = probe(policy)
    exported = export(policy, tmp_path / "lora", "lora")
    second = tmp_path / "lora" / exported.weights["transformer_2"]
    again = WAN_OF_TWO.build(path, adapter=str(tmp_path / "lora"), adapter_2=str(second))
    assert difference(before, probe(again)) <= 1e-6
    assert again.lora is not None
    assert again.lora.alpha == 3.0


def test_only_the_transformer_that_was_trained_has_an_adapter(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    policy = trained(
        WAN_OF_TWO, tiny_pipeline("wan_two_transformers"), lora_rank=2, trained_transformers=["transformer_2"]
    )
    exported = export(policy, tmp_path / "lora", "lora")
    assert list(exported.weights) == ["transformer_2"]
    assert [path.name for path in (tmp_path / "lora").iterdir()] == ["transformer_2_lora_weights.safetensors"]


def test_parts_that_were_not_trained_are_copied_as_they_are(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    base = Path(tiny_pipeline("wan_two_transformers"))
    policy = trained(WAN_OF_TWO, str(base), trained_transformers=["transformer"])
    exported = export(policy, tmp_path / "full", "full")
    assert list(exported.weights) == ["transformer"]
    files = [path.relative_to(base) for path in base.rglob("*") if path.is_file()]
    changed = [file for file in files if not filecmp.cmp(base / file, tmp_path / "full" / file, shallow=False)]
    assert {file.parts[0] for file in changed} == {"transformer"}


def test_rounding_is_told_apart_from_a_wrong_export(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    policy = trained(FLUX, tiny_pipeline("flux"), lora_rank=2)
    exact = probe(policy)
    exported = export_pipeline(policy, tmp_path, dtype=torch.bfloat16)
    assert exported.deviation <= 1e-6
    assert exported.rounding == difference(exact, probe(policy))
    assert 1e-4 < exported.rounding < 2e-2, "bfloat16 has 8 bits"
    with safe_open(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


@pytest.mark.parametrize("form", ["lora", "merged"])
def test_a_file_that_was_written_wrongly_is_noticed(
    form: str, tiny_pipeline: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    policy = trained(FLUX, tiny_pipeline("flux"), lora_rank=2)
    if form == "lora":  # its scale is lost without the note
        save = FluxPipeline.save_lora_weights

        def without_note(folder: Path, **arguments: Any) -> None:
            save(folder, **{**arguments, "transformer_lora_adapter_metadata": None})

        monkeypatch.setattr(FluxPipeline, "save_lora_weights", without_note)
    else:
        monkeypatch.setattr(FluxTransformer2DModel, "fuse_lora", lambda self: None)
    with pytest.raises(ExportError, match=r"computes other velocities .* differ by \d"):
        export(policy, tmp_path / form, form)


def test_a_policy_in_half_precision_or_without_an_adapter_is_refused(tiny_pipeline: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`dtype` of a policy must be float32"):
        export_lora(FLUX.build(tiny_pipeline("flux"), "bfloat16", lora_rank=2), tmp_path)
    with pytest.raises(ValueError, match=r"was trained whole: there is no adapter"):
        export_lora(FLUX.build(tiny_pipeline("flux")), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_state_of_a_policy_of_ones_own_is_written_as_it_is(tmp_path: Path) -> None:
    policy = ToyPolicy()
    policy.build()
    move(policy)
    exported = export_state(policy, tmp_path)
    with safe_open(tmp_path / exported.weights["policy"], framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert stored.keys() == policy.state_dict().keys()
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in stored.items())
