"""Weights of open_clip as those of a `CLIPModel` of transformers: the same network under other names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

_PARTS = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # so spelt there
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}

_PROJECTIONS = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""Stored [width, D] here and [D, width] there."""

_BLOCK_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}

_BLOCK = re.compile(
    r"(?P<tower>visual\.)?transformer\.resblocks\.(?P<index>\d+)\.(?P<part>.+)[._](?P<kind>weight|bias)"
)


def clip_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of an open_clip model of two transformers.

    Names are those of `src/open_clip/model.py` and `transformer.py` of github.com/mlfoundations/open_clip. The buffer
    `attn_mask`, which old checkpoints hold, is left out: transformers makes the causal mask itself.

    Raises:
        KeyError: a weight that such a model does not have.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name != "attn_mask":
            converted.update(_renamed(name, tensor))
    return converted


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name in _PARTS:
        yield _PARTS[name], tensor
        return
    if name in _PROJECTIONS:
        yield _PROJECTIONS[name], tensor.T.contiguous()
        return
    block = _BLOCK.fullmatch(name)
    if block is None:
        raise KeyError(name)
    tower = "vision_model" if block["tower"] else "text_model"
    layer, part, kind = f"{tower}.encoder.layers.{block['index']}", block["part"], block["kind"]
    if part == "attn.in_proj":
        for letter, third in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{layer}.self_attn.{letter}_proj.{kind}", third.contiguous()
    elif part in _BLOCK_PARTS:
        yield f"{layer}.{_BLOCK_PARTS[part]}.{kind}", tensor
    else:
        raise KeyError(name)
