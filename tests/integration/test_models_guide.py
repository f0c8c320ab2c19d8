"""What docs/guide/models.md says of the families is so, and its code constructs what it says."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from PIL import Image

from digenrl import policies
from digenrl.algorithms import FlowGRPO
from digenrl.algorithms.reverse_process import ReverseProcessModule
from digenrl.cli.check import check
from digenrl.cli.classes import accepted_names
from digenrl.cli.dry_run import build_on_meta
from digenrl.cli.merge import merge
from digenrl.cli.published_models import PUBLISHED, write_published
from digenrl.cli.sources import read_config
from digenrl.data.prompts import read_prompts
from digenrl.policies import PipelinePolicy, StableDiffusion3Policy, WanPolicy
from digenrl.policies.pipeline_schedule import Schedule
from tests.test_recipes import COMPLETE, rows
from tests.toy import level_reward

GUIDE = (Path(__file__).parents[2] / "docs/guide/models.md").read_text()
SD3, WAN = "stabilityai/stable-diffusion-3.5-medium", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
FAMILIES = {
    "StableDiffusion3Policy": SD3,
    "FluxPolicy": "black-forest-labs/FLUX.1-dev",
    "QwenImagePolicy": "Qwen/Qwen-Image",
    "WanPolicy": WAN,
    "HunyuanVideoPolicy": "hunyuanvideo-community/HunyuanVideo",
    "FluxKontextPolicy": "FLUX.1-Kontext-dev",
    "WanImageToVideoPolicy": "Wan2.1-I2V-14B",
}
# What differs of models that are given images from those that are not, as published.
_WITH_IMAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "FLUX.1-Kontext-dev": ("black-forest-labs/FLUX.1-dev", "FluxKontextPipeline", {}),
    "Wan2.1-I2V-14B": (
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "WanImageToVideoPipeline",
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
}


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return str(text)


def table(header: str) -> list[list[str]]:
    """The rows below a table's header, as cells."""
    lines = GUIDE[GUIDE.index(header) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def published(name: str, folder: Path) -> str:
    """A folder with a published pipeline's configurations, and no weights."""
    if not folder.exists():
        base, pipeline, changes = _WITH_IMAGES.get(name, (name, None, {}))
        write_published(base, folder)
        if pipeline is not None:
            _change(folder / "model_index.json", {"_class_name": pipeline})
            _change(folder / "transformer/config.json", changes)
    return str(folder)


def _change(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_python_code_makes_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    published(SD3, tmp_path / "models/stable-diffusion-3.5-medium")
    names: dict[str, Any] = {}
    exec(block("python"), names)
    policy = names["policy"]
    assert type(policy) is StableDiffusion3Policy
    assert policy.latent_shape == (16, 64, 64)
    assert policy.lora is not None
    assert (policy.lora.rank, policy.lora.alpha) == (32, 64)


def test_the_yaml_is_a_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(block("yaml") + "data: {prompts: [a sign], prompts_per_step: 1}\n")
    model = check(merge([read_config(str(file))], accepted_names), "fit")["model"]
    settings = yaml.safe_load(block("yaml"))["model"]["init_args"]
    assert model["class_path"].endswith("FlowGRPO")
    assert settings["policy"]["class_path"] == "WanPolicy"
    assert settings["policy"]["init_args"]["path"] in PUBLISHED
    policy = WanPolicy(**{**settings["policy"]["init_args"], "path": published(WAN, tmp_path / "wan")})
    assert policy.latent_shape == (16, 9, 30, 52)
    assert policy.lora is not None
    assert policy.lora.alpha == 64
    module = FlowGRPO(**{**settings, "policy": policy, "reward": level_reward})
    assert module.guidance_scale == 4.5


def test_the_line_of_a_prompt_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images/cat.png")
    (tmp_path / "prompts.jsonl").write_text(block("json"))
    (prompt,) = read_prompts(tmp_path / "prompts.jsonl")
    assert prompt.metadata["image"] == str(tmp_path / "images/cat.png")
    for name in re.findall(r"`(\w+Policy)`", GUIDE[GUIDE.index("## Images as prompts") :]):
        assert {"image", "images", "negative_prompt"} <= set(getattr(policies, name).prompt_fields)


def test_every_family_is_there_with_its_number_of_parameters(tmp_path: Path) -> None:
    listed = {cells[0].strip("`"): cells for cells in table("| policy | models |")}
    assert listed.keys() == FAMILIES.keys()
    billions = {row["policy"]: row["parameters"] for row in rows(COMPLETE)}
    for name in ("FluxKontextPolicy", "WanImageToVideoPolicy"):
        policy = getattr(policies, name)(published(FAMILIES[name], tmp_path / name))
        build_on_meta(policy)
        billions[name] = f"{sum(parameter.numel() for parameter in policy.parameters()) / 1e9:.1f}"
    for name, cells in listed.items():
        assert cells[2].endswith(f"{billions[name]} billion")


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_must_be_multiples_of_16(name: str, tmp_path: Path) -> None:
    family, path = getattr(policies, name), published(FAMILIES[name], tmp_path / "model")
    video: dict[str, Any] = {"num_frames": 9} if "frames" in " ".join(_row(name)) else {}
    assert "multiples of 16" in _row(name)[3]
    assert family(path, height=240, width=272, **video).latent_shape
    with pytest.raises(ValueError, match="`width` must be a multiple of 16"):
        family(path, height=240, width=264, **video)
    if video:
        with pytest.raises(ValueError, match="one more than a multiple of 4"):
            family(path, num_frames=8)


def _row(name: str) -> list[str]:
    return next(cells for cells in table("| policy | models |") if cells[0] == f"`{name}`")


@pytest.mark.parametrize("name", FAMILIES)
def test_guidance_goes_where_the_table_says(name: str, tmp_path: Path) -> None:
    family, path = getattr(policies, name), published(FAMILIES[name], tmp_path / "model")
    scales = dict(re.findall(r"`(\w+): ([\w.]+)`", _row(name)[5]))
    assert scales or _row(name)[5] == "none known"
    assert not scales or ("told" in _row(name)[4]) == ("guidance" in scales)
    policy_settings = {"guidance": float(scales.pop("guidance"))} if "guidance" in scales else {}
    policy = family(path, **policy_settings)
    FlowGRPO(policy, level_reward, **yaml.safe_load(str({key: _number(value) for key, value in scales.items()})))
    if "told" not in _row(name)[4]:
        assert "guidance" not in inspect.signature(family.__init__).parameters


def _number(text: str) -> float | str:
    return text if text.isalpha() else float(text)


def test_default_targets_are_those_of_the_classes() -> None:
    listed = {
        name: tuple(re.findall(r"`([\w.]+)`", targets))
        for targets, names in table("| `lora_targets` by default |")
        for name in re.findall(r"`(\w+Policy)`", names)
    }
    assert listed == {name: getattr(policies, name).default_lora_targets for name in FAMILIES}


def test_settings_that_it_names_are_there() -> None:
    known = set(inspect.signature(PipelinePolicy.__init__).parameters)
    listed = {cells[0].strip("`") for cells in table("| setting | what it does |")}
    assert len(listed) == 5
    assert listed | {"embedding_cache", "negative_prompt", "max_sequence_length", "revision", "adapter"} <= known
    assert {"schedule", "schedule_shift"} <= known
    schedules = [cells[0] for cells in table("| `schedule` | sigmas |")]
    assert schedules[:3] == [f"`{name}`" for name in get_args(get_args(Schedule)[0])]
    assert {"adapter_2", "trained_transformers", "guidance_scale_2"} <= set(
        inspect.signature(WanPolicy.__init__).parameters
    )
    assert "train_guidance" in inspect.signature(ReverseProcessModule.__init__).parameters
