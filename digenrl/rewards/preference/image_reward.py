"""ImageReward: which image people prefer for a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from digenrl.rewards.frames import FrameReward
from digenrl.rewards.preference.clip import ProcessorPreprocess, clip_image_processor, load_tokenizer
from digenrl.rewards.preference.score_head import ScoreHead
from digenrl.rewards.preference.tokens import PromptTokenizer
from digenrl.rewards.preference.weights import DType, as_dtype, check_file, check_folder, load_state, model_from_state
from digenrl.rewards.reward import RewardError, reward_name
from digenrl.types import PromptBatch

_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
"""Of scores on its data; rewards are given in these deviations from the mean (`ImageReward/ImageReward.py`)."""

_MAX_TOKENS = 35
"""Of a prompt, [CLS] and [SEP] included (`ImageReward/ImageReward.py`)."""

_HEAD_WIDTH = 64
"""Of an attention head, in BLIP's ViT-B, ViT-L and text encoder (`models/blip.py` and the med config)."""


class ImageReward(FrameReward):
    """ImageReward (arXiv:2304.05977): BLIP reads the prompt while it looks at the image, and a head scores that.

    Of github.com/THUDM/ImageReward: a ViT-L/16 at 224 pixels, a BERT encoder with cross-attention to it, the vector of
    [CLS] into `ScoreHead`, normalized to mean 0 and deviation 1 on its data. An image is prepared as by CLIP. The
    prompt is read up to 35 tokens only. The published checkpoint is renamed to transformers' BLIP on loading.
    """

    needs: ClassVar[str] = "ImageReward.pt of zai-org/ImageReward and the tokenizer of bert-base-uncased"

    def __init__(
        self,
        checkpoint: str = "zai-org/ImageReward/ImageReward.pt",
        *,
        tokenizer: str = "google-bert/bert-base-uncased",
        dtype: DType = "float32",
        **settings: Any,
    ) -> None:
        """Say where the weights are; `setup` loads them.

        Args:
            checkpoint: the published file, or one of the hub as owner/name/file. All sizes are read from it.
            tokenizer: a folder with BERT's tokenizer, or its id on the hub.
            dtype: in which BLIP computes; the head computes in float32.
            settings: `frames`, `num_frames`, `batch_size` and `offload` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(**settings)
        check_file("checkpoint", checkpoint)
        check_folder("tokenizer", tokenizer)
        as_dtype(dtype)
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.dtype: DType = dtype
        self._blip: BlipReader | None = None
        self._head: ScoreHead | None = None

    def setup(self, device: torch.device) -> None:
        """Load BLIP and the head.

        Raises:
            RewardError: they cannot be loaded.
        """
        super().setup(device)
        state = load_state("checkpoint", self.checkpoint)
        head = ScoreHead.from_state("checkpoint", self.checkpoint, _below("mlp.", state))
        tokenizer = load_tokenizer("tokenizer", self.tokenizer, _MAX_TOKENS, reward_name(self))
        self._blip = BlipReader(self.checkpoint, state, tokenizer).to(device, as_dtype(self.dtype))
        self._head = head.to(device)

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Score N images: [N]."""
        if self._blip is None or self._head is None:
            raise RewardError("`setup(device)` of reward `ImageReward` must be called before it can judge.")
        scores: Tensor = self._head(self._blip(images, prompts.texts).float())
        return (scores - _MEAN) / _STD


class BlipReader(nn.Module):
    """Image and text encoder of BLIP: a vector of what a prompt means in sight of an image."""

    def __init__(self, source: str, state: Mapping[str, Tensor], tokenizer: PromptTokenizer) -> None:
        """Make both encoders from the weights under `blip.` of an ImageReward checkpoint.

        Raises:
            RewardError: the weights are others.
        """
        from transformers import BlipTextModel, BlipVisionModel

        super().__init__()
        vision = vision_state(_below("blip.visual_encoder.", state))
        text = _below("blip.text_encoder.", state)
        for name, part in (("visual_encoder", vision), ("text_encoder", text)):
            if not part:
                raise RewardError(f"`checkpoint` {source} is none of ImageReward: it has no `blip.{name}`.")
        config = vision_config(vision)
        self.vision = model_from_state("checkpoint", source, BlipVisionModel, config, vision)
        reading = text_config(text, config.hidden_size)
        self.text = model_from_state("checkpoint", source, BlipTextModel, reading, text, add_pooling_layer=False)
        self.requires_grad_(False)
        self.tokenizer = tokenizer
        self.preprocess = ProcessorPreprocess(
            clip_image_processor()(
                size={"shortest_edge": config.image_size},
                crop_size={"height": config.image_size, "width": config.image_size},
            )
        )

    def forward(self, images: Tensor, texts: tuple[str, ...]) -> Tensor:
        """Read N prompts in sight of N images: [N, width]."""
        pixels = self.preprocess(images).to(self.vision.device, self.vision.dtype)
        seen = self.vision(pixel_values=pixels).last_hidden_state
        tokens = {name: ids.to(self.text.device) for name, ids in self.tokenizer(texts).items()}
        read: Tensor = self.text(**tokens, encoder_hidden_states=seen, is_decoder=False).last_hidden_state
        return read[:, 0]


_VISION_PARTS = (
    (r"cls_token", "embeddings.class_embedding"),
    (r"pos_embed", "embeddings.position_embedding"),
    (r"patch_embed\.proj\.(.+)", r"embeddings.patch_embedding.\1"),
    (r"norm\.(.+)", r"post_layernorm.\1"),
    (r"blocks\.(\d+)\.norm([12])\.(.+)", r"encoder.layers.\1.layer_norm\2.\3"),
    (r"blocks\.(\d+)\.attn\.qkv\.(.+)", r"encoder.layers.\1.self_attn.qkv.\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(.+)", r"encoder.layers.\1.self_attn.projection.\2"),
    (r"blocks\.(\d+)\.mlp\.(.+)", r"encoder.layers.\1.mlp.\2"),
)
"""Names of `models/vit.py` of github.com/salesforce/BLIP, and what a `BlipVisionModel` calls them."""


def vision_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of BLIP's image encoder; what has no other name keeps its own."""
    return {_vision_name(name): tensor for name, tensor in state.items()}


def _vision_name(name: str) -> str:
    for old, new in _VISION_PARTS:
        if re.fullmatch(old, name):
            return re.sub(old, new, name)
    return name


def vision_config(state: Mapping[str, Tensor]) -> Any:
    """Read the sizes of an image encoder from its renamed weights."""
    from transformers import BlipVisionConfig

    width, _, patch, _ = state["embeddings.patch_embedding.weight"].shape
    num_patches = state["embeddings.position_embedding"].shape[1] - 1
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_num_layers(state, r"encoder\.layers\.(\d+)\."),
        num_attention_heads=width // _HEAD_WIDTH,
        image_size=patch * round(num_patches**0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,  # of `models/vit.py`; the default of the config class is another
    )


def text_config(state: Mapping[str, Tensor], vision_width: int) -> Any:
    """Read the sizes of a text encoder, which looks at vectors of `vision_width`, from its weights."""
    from transformers import BlipTextConfig

    vocabulary, width = state["embeddings.word_embeddings.weight"].shape
    return BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=vision_width,
        intermediate_size=state["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_num_layers(state, r"encoder\.layer\.(\d+)\."),
        num_attention_heads=width // _HEAD_WIDTH,
        max_position_embeddings=state["embeddings.position_embeddings.weight"].shape[0],
        layer_norm_eps=1e-12,
        is_decoder=True,  # that is: has cross-attention
    )


def _num_layers(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max(int(match[1]) for match in map(re.compile(pattern).match, state) if match)


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the weights whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
