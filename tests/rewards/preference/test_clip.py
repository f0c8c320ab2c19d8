"""PickScore, CLIPScore and AestheticScore against transformers' own CLIP, called by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel, CLIPProcessor

from digenrl.rewards import RewardError, compute_rewards, set_up_reward
from digenrl.rewards.preference.aesthetic import AestheticScore
from digenrl.rewards.preference.clip_score import CLIPScore
from digenrl.rewards.preference.pick_score import PickScore
from tests.rewards.preference.tiny_preference_models import (
    TEXTS,
    head_state,
    image_processor,
    images,
    pil_images,
    prompts,
    save_clip,
)

LONG = ["a photo of " + "a red cat " * 60, *TEXTS[1:]]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_clip(tmp_path_factory.mktemp("clip")))


@torch.no_grad()
def direct(folder: str, media: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Give the logits of each image and its prompt, and unit image vectors, from the model's own forward."""
    model, processor = (
        CLIPModel.from_pretrained(folder).eval(),
        CLIPProcessor(image_processor(), AutoTokenizer.from_pretrained(folder)),
    )
    inputs = processor(
        images=pil_images(media), text=texts, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    output = model(**{name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")})
    return output.logits_per_image.diagonal(), output.image_embeds


def test_pick_score_is_the_models_own_logit(clip: str) -> None:
    reward, divided = (PickScore(clip, processor=clip, divisor=divisor) for divisor in (1.0, 26.0))
    for each in (reward, divided):
        set_up_reward(each, torch.device("cpu"))
    logits, _ = direct(clip, images(), LONG)
    scores = compute_rewards(reward, images(), prompts(LONG))
    torch.testing.assert_close(scores, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(compute_rewards(divided, images(), prompts(LONG)), logits / 26, atol=1e-5, rtol=0)


def test_clip_score_is_the_logit_without_the_models_scale(clip: str) -> None:
    reward = CLIPScore(clip, scale=2.5)
    set_up_reward(reward, torch.device("cpu"))
    logits, _ = direct(clip, images(3, 64, 32), LONG[:3])
    scores = compute_rewards(reward, images(3, 64, 32), prompts(LONG[:3]))
    torch.testing.assert_close(scores, 2.5 * logits / torch.tensor(2.5).exp(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_aesthetic_score_is_the_head_on_the_unit_vector(clip: str, tmp_path: Path, kind: str) -> None:
    state, file = head_state(16), tmp_path / f"head.{kind}"
    save_file(state, file) if kind == "safetensors" else torch.save(state, file)
    reward = AestheticScore(str(file), model=clip)
    set_up_reward(reward, torch.device("cpu"))
    _, expected = direct(clip, images(), TEXTS)
    for index in (0, 2, 4, 6, 7):
        expected = expected @ state[f"layers.{index}.weight"].T + state[f"layers.{index}.bias"]
    torch.testing.assert_close(compute_rewards(reward, images(), prompts()), expected[:, 0], atol=1e-5, rtol=0)


def test_a_head_of_another_clip_is_refused(clip: str, tmp_path: Path) -> None:
    torch.save(head_state(24), tmp_path / "head.pth")
    reward = AestheticScore(str(tmp_path / "head.pth"), model=clip)
    with pytest.raises(RewardError, match=f"head.pth wants vectors of 24, but `model` {clip} gives 16"):
        set_up_reward(reward, torch.device("cpu"))


def test_a_model_that_lacks_weights_is_refused_instead_of_filled_with_random_ones(tmp_path: Path) -> None:
    folder = save_clip(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights.pop("text_projection.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"`model` .* lacks 1 weights, the first is `text_projection.weight`"):
        set_up_reward(CLIPScore(str(folder)), torch.device("cpu"))


@pytest.mark.parametrize("name", ["divisor", "scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_turns_or_hides_preferences_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be positive and finite, got {value}"):
        PickScore(divisor=value) if name == "divisor" else CLIPScore(scale=value)
