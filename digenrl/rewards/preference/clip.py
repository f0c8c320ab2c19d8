"""Rewards by CLIP: images and prompts as unit vectors, and how alike they are."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from digenrl.rewards.frames import FrameReward
from digenrl.rewards.images import to_pil
from digenrl.rewards.preference.tokens import PromptTokenizer
from digenrl.rewards.preference.weights import DType, as_dtype, load_folder, load_model
from digenrl.rewards.reward import RewardError, reward_name
from digenrl.types import PromptBatch

Preprocess = Callable[[Tensor], Tensor]
"""Images [N, C, H, W] in [0, 1], on any device -> what a model takes, [N, 3, S, S] float32."""


class ClipEmbedder(nn.Module):
    """A `CLIPModel` of transformers with its tokenizer and its preparation of images."""

    def __init__(self, model: Any, tokenizer: PromptTokenizer, preprocess: Preprocess) -> None:
        """Join the three."""
        super().__init__()
        self.model = model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.preprocess = preprocess

    def embed_images(self, images: Tensor) -> Tensor:
        """Embed N images, [N, C, H, W] in [0, 1]: unit vectors [N, D] in float32."""
        pixels = self.preprocess(images).to(self.model.device, self.model.dtype)
        return normalize(_projected(self.model.get_image_features(pixel_values=pixels)).float(), dim=-1)

    def embed_prompts(self, texts: Sequence[str]) -> Tensor:
        """Embed N prompts: unit vectors [N, D] in float32. Equal ones, as the samples of a group have, cost one."""
        unique = list(dict.fromkeys(texts))
        tokens = {name: ids.to(self.model.device) for name, ids in self.tokenizer(unique).items()}
        embedded = normalize(_projected(self.model.get_text_features(**tokens)).float(), dim=-1)
        return embedded[[unique.index(text) for text in texts]]

    @property
    def logit_scale(self) -> Tensor:
        """What the model multiplies cosines with: a scalar in float32."""
        scale: Tensor = self.model.logit_scale.float().exp()
        return scale


def _projected(features: Any) -> Tensor:
    """Give [N, D]; transformers has them in an output object from version 5 on."""
    projected: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return projected


def load_tokenizer(argument: str, source: str, max_length: int, reward: str) -> PromptTokenizer:
    """Load the tokenizer of a folder or hub id.

    Raises:
        RewardError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    return PromptTokenizer(load_folder(argument, source, AutoTokenizer.from_pretrained), max_length, reward)


def clip_image_processor() -> Any:
    """Give the class of CLIP's image processor that resizes with Pillow.

    Published scores come from it. Transformers 5 prefers another one, which resizes with torchvision, where that is
    installed; its pixels are not the same, so a score would depend on the environment.
    """
    try:
        from transformers import CLIPImageProcessorPil
    except ImportError:  # transformers 4: the class with the plain name
        from transformers import CLIPImageProcessor

        return CLIPImageProcessor
    return CLIPImageProcessorPil


class ProcessorPreprocess:
    """Prepares images by an image processor of transformers: 8 bits, resize, center crop, normalize."""

    def __init__(self, processor: Any) -> None:
        """Take the processor."""
        self.processor = processor

    def __call__(self, images: Tensor) -> Tensor:
        """Prepare N images: [N, 3, S, S] on the CPU."""
        pixels: Tensor = self.processor(images=to_pil(images), return_tensors="pt")["pixel_values"]
        return pixels


def load_clip(model: str, processor: str, reward: str) -> ClipEmbedder:
    """Load a `CLIPModel`, and tokenizer and image processor, from folders or hub ids to host memory.

    Raises:
        RewardError: one of them cannot be loaded; the message names the argument `model` or `processor`.
    """
    from transformers import CLIPModel

    network = load_model("model", model, CLIPModel)
    prepare = load_folder("processor", processor, clip_image_processor().from_pretrained)
    tokenizer = load_tokenizer("processor", processor, network.config.text_config.max_position_embeddings, reward)
    return ClipEmbedder(network, tokenizer, ProcessorPreprocess(prepare))


class ClipReward(FrameReward):
    """Base of rewards by how alike a CLIP model finds an image and its prompt; a subclass loads the model."""

    def __init__(self, dtype: DType, **settings: Any) -> None:
        """Set in which dtype CLIP computes, and `settings` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(**settings)
        as_dtype(dtype)
        self.dtype: DType = dtype
        self._clip: ClipEmbedder | None = None

    def setup(self, device: torch.device) -> None:
        """Load the model.

        Raises:
            RewardError: it cannot be loaded.
        """
        super().setup(device)
        self._clip = self.load().to(device, as_dtype(self.dtype))

    @abstractmethod
    def load(self) -> ClipEmbedder:
        """Load the model and what prepares its input to host memory."""

    @property
    def clip(self) -> ClipEmbedder:
        """The model, after `setup`."""
        if self._clip is None:
            raise RewardError(f"`setup(device)` of reward `{reward_name(self)}` must be called before it can judge.")
        return self._clip

    def cosines(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Compare N images, [N, C, H, W] in [0, 1], each with its prompt: [N] in [-1, 1]."""
        return (self.clip.embed_images(images) * self.clip.embed_prompts(prompts.texts)).sum(dim=-1)


def check_positive(argument: str, value: float) -> float:
    """Check a factor.

    Raises:
        ValueError: it is not positive and finite.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"`{argument}` must be positive and finite, got {value!r}.")
    return value
