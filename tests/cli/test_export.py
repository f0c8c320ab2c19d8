"""`digenrl export`: from the checkpoint of a run to what diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.cli.commands import Digenrl
from tests.policies.family_checks import module_of
from tests.policies.test_flux import FAMILY as FLUX
from tests.policies.test_wan_image_to_video import TOLD as WAN_TOLD
from tests.policies.tiny_pipelines import save_tiny_pipeline

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_pipeline("flux", tmp_path_factory.mktemp("base") / "flux"))


def configuration(base: str, **policy: Any) -> dict[str, Any]:
    settings = {**FLUX.settings, "path": base, "lora_rank": 2, "lora_alpha": 6, **policy}
    arguments = {
        "policy": {"class_path": "FluxPolicy", "init_args": settings},
        "reward": "tests.cli.toy_rewards.red",
        "group_size": 4,
        "num_steps": 3,
        "lr": 0.05,
        "ema_decay": 0.5,
        "ema_interval": 1,
        "seed": 0,
    }
    return {
        "model": {"class_path": "FlowGRPO", "init_args": arguments},
        "data": {"prompts": ["a red cat", "a green dog"], "prompts_per_step": 2},
        "trainer": {
            "strategy": {"class_path": "DisaggregatedStrategy", "init_args": {"engine": "inline"}},
            "max_steps": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }


@pytest.fixture
def checkpoint(digenrl: Digenrl, folder: Path, base: str) -> Path:
    """Of a run that has trained a LoRA for two steps."""
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration(base)))
    result = digenrl("fit", "--config", "run.yaml")
    assert result.code == 0, result.err
    return Path("runs/version_0/checkpoints/step=2.ckpt")


def write_checkpoint(path: Path, module: Any) -> Path:
    """What a run of the module would have left, for tests that train nothing."""
    module.configure_model()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    torch.save({"state_dict": state, "global_step": 7, "hyper_parameters": {}}, path)
    return path


def exported_lora(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter, by the names of a checkpoint."""
    named = {}
    for key, value in load_file(folder / LORA).items():
        named[key.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")] = value
    return named


def test_a_run_is_exported_with_its_weights_or_their_average(digenrl: Digenrl, checkpoint: Path, folder: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    average = {
        name.replace("weight_copies.ema.weights.", "policy."): value
        for name, value in state.items()
        if name.startswith("weight_copies.ema.weights.")
    }
    for name, words, expected in (("last", [], state), ("mean", ["--ema"], average)):
        result = digenrl("export", "--checkpoint", "last", "--output", name, *words)
        assert (result.code, result.err) == (0, [])
        assert result.out.startswith(f"{name}: a LoRA in diffusers' format, {LORA} and README.md\n")
        found = exported_lora(folder / name)
        assert all(torch.equal(value, expected[f"policy.{key}"]) for key, value in found.items())
        assert f"policy.{next(iter(found))}" in average
    assert any(not torch.equal(value, state[name]) for name, value in average.items())
    assert not list(folder.glob("*.partial"))


def test_the_model_card_has_the_recipe(digenrl: Digenrl, checkpoint: Path, folder: Path, base: str) -> None:
    words = ["--checkpoint", str(checkpoint), "--output", "out", "--merge", "--base_model", "owner/model"]
    assert digenrl("export", *words).code == 0
    _, header, text = (folder / "out/README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert metadata["base_model"] == "owner/model"
    assert metadata["base_model_relation"] == "finetune"
    assert (metadata["library_name"], metadata["pipeline_tag"]) == ("diffusers", "text-to-image")
    assert "license" not in metadata
    for fact in ("FlowGRPO", "optimizer steps: 2", "reward: red", "lr: 0.05", "lora_alpha: 6", "LoRA merged"):
        assert fact in text
    assert base not in text, "a folder of this machine is nobody's business"
    assert (folder / "out/model_index.json").is_file()
    assert not (folder / "out" / LORA).exists()


def test_all_weights_of_a_run_that_trained_them_are_a_pipeline(digenrl: Digenrl, folder: Path, base: str) -> None:
    from diffusers import FluxPipeline

    given = configuration(base, lora_rank=None, lora_alpha=None)
    (folder / "run.yaml").write_text(yaml.safe_dump(given))
    checkpoint = write_checkpoint(folder / "a.ckpt", module_of(FLUX, base, lora_rank=None))
    words = ["--checkpoint", str(checkpoint), "--config", "run.yaml", "--output", "out", "--dtype", "bfloat16"]
    result = digenrl("export", *words)
    assert result.code == 0
    assert result.err == []
    assert "rounding to bfloat16 alone changes them by" in result.out
    saved = FluxPipeline.from_pretrained(folder / "out", torch_dtype=torch.bfloat16).transformer.state_dict()
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[f"policy.transformer.{name}"].bfloat16()) for name, value in saved.items())
    merged = digenrl("export", "--checkpoint", str(checkpoint), "--config", "run.yaml", "--output", "b", "--merge")
    assert "`--merge` is for a LoRA, and this policy was trained whole" in merged.error
    averaged = digenrl("export", "--checkpoint", str(checkpoint), "--config", "run.yaml", "--output", "b", "--ema")
    assert "has none: its run was without `ema_decay`" in averaged.error


def test_a_model_that_is_given_images_is_exported(digenrl: Digenrl, folder: Path) -> None:
    """Wan 2.1's, whose encoder of images must stay in memory during a run, but not here."""
    path = str(save_tiny_pipeline("wan_image_told", folder / "base"))
    write_checkpoint(folder / "a.ckpt", module_of(WAN_TOLD, path))
    policy = {"class_path": "WanImageToVideoPolicy", "init_args": {**WAN_TOLD.settings, "path": path, "lora_rank": 2}}
    policy["init_args"] |= {"schedule": "dance", "schedule_shift": 3.0}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"class_path": "FlowGRPO", "policy": policy}}))
    result = digenrl("export", "--checkpoint", "a.ckpt", "--output", "out")
    assert (result.code, result.err) == (0, [])
    card = (folder / "out/README.md").read_text()
    assert "pipeline_tag: image-to-video" in card
    assert "schedule: dance\nschedule_shift: 3.0" in card


def test_a_base_model_that_has_moved_is_named(digenrl: Digenrl, folder: Path, base: str) -> None:
    write_checkpoint(folder / "a.ckpt", module_of(FLUX, base))
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration("/nowhere/flux", lora_alpha=None)))
    words = ["export", "--checkpoint", "a.ckpt", "--output", "out"]
    assert "`path` must be the folder of a diffusers pipeline" in digenrl(*words).error
    assert digenrl(*words, "--model.policy.path", base).code == 0
    assert (folder / "out" / LORA).is_file()


def test_the_policy_of_ones_own_is_exported_as_its_state(digenrl: Digenrl, folder: Path) -> None:
    assert digenrl("fit", "--config", "toy.yaml").code == 0
    result = digenrl("export", "--checkpoint", "last", "--output", "out")
    assert "the state of `ToyPolicy`, which is no pipeline that others know" in result.out
    saved = load_file(folder / "out/policy.safetensors")
    state = torch.load("runs/version_0/checkpoints/step=2.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[f"policy.{name}"]) for name, value in saved.items())
    refused = digenrl("export", "--checkpoint", "last", "--output", "b", "--merge")
    assert "`--merge` is for policies of diffusers' pipelines, which `ToyPolicy` is not" in refused.error


def test_a_checkpoint_of_another_policy_is_refused(digenrl: Digenrl, folder: Path, base: str) -> None:
    write_checkpoint(folder / "a.ckpt", module_of(FLUX, base))
    for settings, message in (
        ({"lora_rank": 3}, "has shape [2, 32], but the policy's has [3, 32]; give the `--config` of its run"),
        ({"lora_rank": None, "lora_alpha": None}, "of its weights have no place (transformer."),
    ):
        (folder / "run.yaml").write_text(yaml.safe_dump(configuration(base, **settings)))
        result = digenrl("export", "--checkpoint", "a.ckpt", "--config", "run.yaml", "--output", "out")
        assert "`a.ckpt` is not of this FluxPolicy: " in result.error
        assert message in result.error
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "out"], "`--checkpoint` is missing"),
        (["--checkpoint", "a.ckpt"], "`--output` is missing"),
        (["--checkpoint", "b.ckpt", "--output", "out"], "`--checkpoint` is `b.ckpt`, which does not exist; did you"),
        (["--checkpoint", "last", "--output", "out"], "`--checkpoint` is `last`, but no run folder in `runs` has"),
        (["--checkpoint", "toy.yaml", "--output", "out"], "which is not a checkpoint, or was cut off"),
        (["--checkpoint", "empty.ckpt", "--output", "out"], "has no weights of a policy"),
        (["--checkpoint", "full", "--output", "out"], "must be a file, and `full` is a folder"),
        (["--checkpoint", "a.ckpt", "--output", "."], "`--output` must be a folder with a name, got '.'"),
        (["--checkpoint", "a.ckpt", "--output", "full"], "must be an empty folder, or none yet, and `full` has"),
        (["--checkpoint", "a.ckpt", "--output", "out"], "there is no config.yaml beside `a.ckpt`, or in the folder"),
        (["--checkpoint", "a.ckpt", "--output", "out", "--dtype", "float16"], "must be float32 or bfloat16, got"),
        (["--checkpoint", "a.ckpt", "--output", "out", "--merge=yes"], "`--merge` takes no value, got 'yes'"),
        (["--checkpoint", "a.ckpt", "--output", "out", "--model.lr", "1"], "`--model.lr` is not an option of"),
        (["--checkpoint", "a.ckpt", "--output", "out", "--model.policy.dtype", "x"], "cannot be chosen: what"),
        (
            ["--checkpoint", "a.ckpt", "--output", "out", "--config", "toy.yaml"],
            "`a.ckpt` is not of this ToyPolicy: 1 of its weights have no place (x) and ",
        ),
        (["--checkpoint", "a.ckpt", "--output", "out", "--config", "none.yaml"], "`model.policy` is missing in the"),
    ],
)
def test_wrong_calls_are_one_line(words: list[str], message: str, digenrl: Digenrl, folder: Path) -> None:
    torch.save({"state_dict": {"policy.x": torch.zeros(1)}}, folder / "a.ckpt")
    torch.save({"state_dict": {}}, folder / "empty.ckpt")
    (folder / "none.yaml").write_text("model: {class_path: FlowGRPO}")
    (folder / "full").mkdir()
    (folder / "full/file").touch()
    assert message in digenrl("export", *words).error
    assert not (folder / "out").exists()
    assert not list(folder.glob("*.partial"))
