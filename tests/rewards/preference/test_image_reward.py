"""ImageReward against a forward of its BLIP written from its description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from digenrl.rewards import RewardError, compute_rewards, set_up_reward
from digenrl.rewards.preference.image_reward import ImageReward
from tests.rewards.preference.tiny_preference_models import (
    TEXTS,
    image_processor,
    image_reward_state,
    images,
    pil_images,
    prompts,
    save_bert_tokenizer,
)

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert_tokenizer(tmp_path_factory.mktemp("bert"))


def norm(state: State, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with heads of 64: [N, L, width] each."""
    split = (each.unflatten(-1, (-1, 64)).transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


def see(state: State, pixels: Tensor) -> Tensor:
    top = "blip.visual_encoder"
    weight, bias = state[f"{top}.patch_embed.proj.weight"], state[f"{top}.patch_embed.proj.bias"]
    patches = F.conv2d(pixels, weight, bias, stride=8).flatten(2).mT
    x = torch.cat([state[f"{top}.cls_token"].expand(len(pixels), -1, -1), patches], dim=1) + state[f"{top}.pos_embed"]
    for layer in range(2):
        block = f"{top}.blocks.{layer}"
        mixed = linear(state, f"{block}.attn.qkv", norm(state, f"{block}.norm1", x, 1e-6))
        x = x + linear(state, f"{block}.attn.proj", attend(*mixed.chunk(3, dim=-1)))
        hidden = F.gelu(linear(state, f"{block}.mlp.fc1", norm(state, f"{block}.norm2", x, 1e-6)))
        x = x + linear(state, f"{block}.mlp.fc2", hidden)
    return norm(state, f"{top}.norm", x, 1e-6)


def read(state: State, ids: Tensor, seen: Tensor) -> Tensor:
    top, eps = "blip.text_encoder", 1e-12
    words, places = (state[f"{top}.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
    x = norm(state, f"{top}.embeddings.LayerNorm", words[ids] + places[: ids.shape[1]], eps)
    for layer in range(2):
        block = f"{top}.encoder.layer.{layer}"
        for kind in ("attention", "crossattention"):
            source, name = x if kind == "attention" else seen, f"{block}.{kind}"
            key, value = (linear(state, f"{name}.self.{part}", source) for part in ("key", "value"))
            attended = attend(linear(state, f"{name}.self.query", x), key, value)
            x = norm(state, f"{name}.output.LayerNorm", x + linear(state, f"{name}.output.dense", attended), eps)
        hidden = F.gelu(linear(state, f"{block}.intermediate.dense", x))
        x = norm(state, f"{block}.output.LayerNorm", x + linear(state, f"{block}.output.dense", hidden), eps)
    return x


def expected_rewards(state: State, media: Tensor, ids: list[list[int]]) -> Tensor:
    seen = see(state, image_processor()(images=pil_images(media), return_tensors="pt")["pixel_values"])
    rows = [read(state, torch.tensor([row]), seen[[index]])[0, 0] for index, row in enumerate(ids)]  # no padding
    scores = torch.stack(rows)
    for index in (0, 2, 4, 6, 7):
        scores = linear(state, f"mlp.layers.{index}", scores)
    return (scores[:, 0] - 0.16717362830052426) / 1.0333394966054072


def test_image_reward_is_what_its_network_gives(tmp_path: Path, bert: Path) -> None:
    from transformers import BertTokenizer

    state = image_reward_state()
    torch.save(state, tmp_path / "ImageReward.pt")
    reward = ImageReward(str(tmp_path / "ImageReward.pt"), tokenizer=str(bert))
    set_up_reward(reward, torch.device("cpu"))
    texts = ["a red cat on a blue sofa " * 9, *TEXTS[1:]]  # the first has 65 tokens, of which 35 are read
    ids = BertTokenizer.from_pretrained(bert)(texts)["input_ids"]
    ids[0] = [*ids[0][:34], ids[0][-1]]
    expected = expected_rewards(state, images(), ids)
    torch.testing.assert_close(compute_rewards(reward, images(), prompts(texts)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("mlp.layers.7.bias"), "is no head of 5 linear layers"),
        (
            lambda state: state.pop("blip.visual_encoder.norm.bias"),
            "lacks 1 weights, the first is `post_layernorm.bias`",
        ),
        (
            lambda state: state.update({"blip.text_encoder.pooler.dense.bias": torch.ones(1)}),
            "has 1 weights too many, the first is `pooler.dense.bias`",
        ),
        (
            lambda state: [state.pop(name) for name in list(state) if name.startswith("blip.visual_encoder.")],
            "is none of ImageReward: it has no `blip.visual_encoder`",
        ),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path, bert: Path, change: object, message: str) -> None:
    state = image_reward_state()
    change(state)  # type: ignore[operator]
    torch.save(state, tmp_path / "ir.pt")
    with pytest.raises(RewardError, match=f"`ImageReward` cannot be set up: `checkpoint` .*{message}"):
        set_up_reward(ImageReward(str(tmp_path / "ir.pt"), tokenizer=str(bert)), torch.device("cpu"))
