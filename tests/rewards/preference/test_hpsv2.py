"""HPS v2 against a forward of open_clip's network written from its description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from digenrl.rewards import RewardError, compute_rewards, set_up_reward
from digenrl.rewards.preference.hpsv2 import HPSv2, PaddedPreprocess
from tests.rewards.preference.tiny_preference_models import (
    SIZE,
    TEXTS,
    images,
    open_clip_state,
    prompts,
    save_clip,
)

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_clip(tmp_path_factory.mktemp("base"))
    (folder / "model.safetensors").unlink()  # weights of the base are not needed
    return folder


def norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def transformer(state: State, name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """Apply two blocks to x, [L, N, width]: pre-norm, attention by torch's own multi-head function, exact GELU."""
    for layer in range(2):
        block = f"{name}.resblocks.{layer}"
        y, attention = norm(state, f"{block}.ln_1", x), f"{block}.attn"
        attended, _ = F.multi_head_attention_forward(
            *(y, y, y, x.shape[-1], 2, state[f"{attention}.in_proj_weight"], state[f"{attention}.in_proj_bias"]),
            *(None, None, False, 0.0, state[f"{attention}.out_proj.weight"], state[f"{attention}.out_proj.bias"]),
            need_weights=False,
            attn_mask=mask,
        )
        x = x + attended
        hidden = F.gelu(linear(state, f"{block}.mlp.c_fc", norm(state, f"{block}.ln_2", x)))
        x = x + linear(state, f"{block}.mlp.c_proj", hidden)
    return x


def open_clip_cosines(state: State, pixels: Tensor, rows_of_ids: list[list[int]]) -> Tensor:
    patches = F.conv2d(pixels, state["visual.conv1.weight"], stride=8).flatten(2).mT
    classes = state["visual.class_embedding"].expand(len(pixels), 1, -1)
    x = norm(state, "visual.ln_pre", torch.cat([classes, patches], dim=1) + state["visual.positional_embedding"])
    x = transformer(state, "visual.transformer", x.transpose(0, 1), None)[0]
    image = norm(state, "visual.ln_post", x) @ state["visual.proj"]

    rows = []
    for ids in rows_of_ids:  # one at a time: no padding
        x = state["token_embedding.weight"][torch.tensor(ids)] + state["positional_embedding"][: len(ids)]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
        rows.append(norm(state, "ln_final", transformer(state, "transformer", x[:, None], mask))[-1, 0])
    return F.cosine_similarity(image, torch.stack(rows) @ state["text_projection"])


@pytest.mark.parametrize("nested", [True, False])
def test_hpsv2_is_the_cosine_that_open_clips_network_gives(tmp_path: Path, base: Path, nested: bool) -> None:
    state = open_clip_state()
    torch.save({"state_dict": state, "iteration": 4000} if nested else state, tmp_path / "hps.pt")
    reward = HPSv2(str(tmp_path / "hps.pt"), base=str(base), scale=100.0)
    set_up_reward(reward, torch.device("cpu"))
    media = (images(4, SIZE, SIZE) * 255).round() / 255
    ids = AutoTokenizer.from_pretrained(base)(TEXTS)["input_ids"]
    expected = 100 * open_clip_cosines(state, (media - MEAN) / STD, ids)
    torch.testing.assert_close(compute_rewards(reward, media, prompts()), expected, atol=1e-3, rtol=0)


def test_images_are_padded_with_black_and_not_cropped() -> None:
    preprocess = PaddedPreprocess(SIZE, MEAN.flatten().tolist(), STD.flatten().tolist())
    wide = preprocess(torch.ones(2, 3, 32, 128)) * STD + MEAN
    expected = torch.zeros(2, 3, SIZE, SIZE)
    expected[:, :, 12:20] = 1.0
    torch.testing.assert_close(wide, expected, atol=1e-5, rtol=0)
    tall = preprocess(torch.ones(1, 3, 33, 11)) * STD + MEAN
    assert tall.round().sum((0, 1, 2)).tolist() == [0.0] * 10 + [96.0] * 11 + [0.0] * 11  # 21 columns: 10 and 11


def test_the_longer_side_is_resized_with_antialiasing() -> None:
    stripes = (torch.arange(96) % 2).float().expand(1, 3, 96, 96)  # finer than the small image can show
    small = PaddedPreprocess(SIZE, [0.0] * 3, [1.0] * 3)(stripes)
    torch.testing.assert_close(small[..., 4:-4], torch.full_like(small[..., 4:-4], 0.5), atol=0.2, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("visual.proj"), "lacks 1 weights, the first is `visual_projection.weight`"),
        (lambda state: state.update({"text.ln_9.weight": torch.ones(1)}), "is no CLIP of open_clip: it has 'text.ln_9"),
        (lambda state: state.update({"visual.proj": torch.ones(32, 17)}), "does not fit"),
        (
            lambda state: state.update({"transformer.resblocks.2.ln_1.bias": torch.ones(24)}),
            "has 1 weights too many, the first is `text_model.encoder.layers.2.layer_norm1.bias`",
        ),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path, base: Path, change: object, message: str) -> None:
    state = open_clip_state()
    change(state)  # type: ignore[operator]
    torch.save({"state_dict": state}, tmp_path / "hps.pt")
    with pytest.raises(RewardError, match=f"`HPSv2` cannot be set up: `checkpoint` .*{message}"):
        set_up_reward(HPSv2(str(tmp_path / "hps.pt"), base=str(base)), torch.device("cpu"))
