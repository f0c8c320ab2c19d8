"""The LAION aesthetic score: how much people like an image, whatever its prompt."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from digenrl.rewards.preference.clip import ClipEmbedder, ClipReward, load_clip
from digenrl.rewards.preference.score_head import ScoreHead
from digenrl.rewards.preference.weights import DType, check_file, check_folder, load_state
from digenrl.rewards.reward import RewardError, reward_name
from digenrl.types import PromptBatch


class AestheticScore(ClipReward):
    """A small head on the unit image vector of OpenAI's CLIP ViT-L/14, trained on ratings from 1 to 10.

    Head, vector and its normalization are those of github.com/christophschuhmann/improved-aesthetic-predictor
    (`simple_inference.py`, `sac+logos+ava1-l14-linearMSE.pth`), as DDPO (arXiv:2305.13301) and flow_grpo use them. A
    head fits the CLIP it was trained with and no other of that width, which gives numbers without a meaning.
    """

    needs: ClassVar[str] = "weights of openai/clip-vit-large-patch14 and a file with the predictor's head"

    def __init__(
        self,
        predictor: str,
        *,
        model: str = "openai/clip-vit-large-patch14",
        dtype: DType = "float32",
        **settings: Any,
    ) -> None:
        """Say where the weights are; `setup` loads them.

        Args:
            predictor: a file with the head, .pth or .safetensors, or one of the hub as owner/name/file.
            model: a folder with the CLIP, its tokenizer and image processor, or its id on the hub.
            dtype: in which CLIP computes; the head computes in float32.
            settings: `frames`, `num_frames`, `batch_size` and `offload` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(dtype, **settings)
        check_file("predictor", predictor)
        check_folder("model", model)
        self.predictor = predictor
        self.model = model
        self._head: ScoreHead | None = None

    def load(self) -> ClipEmbedder:
        """Load model, tokenizer and image processor to host memory."""
        return load_clip(self.model, self.model, reward_name(self))

    def setup(self, device: torch.device) -> None:
        """Load CLIP and the head.

        Raises:
            RewardError: they cannot be loaded, or do not fit each other.
        """
        super().setup(device)
        head = ScoreHead.from_state("predictor", self.predictor, load_state("predictor", self.predictor))
        width = self.clip.model.config.projection_dim
        if head.width != width:
            raise RewardError(
                f"`predictor` {self.predictor} wants vectors of {head.width}, but `model` {self.model} gives {width}."
            )
        self._head = head.to(device)

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Score N images: [N]."""
        embeddings = self.clip.embed_images(images)
        assert self._head is not None  # made where `clip` is
        scores: Tensor = self._head(embeddings)
        return scores
