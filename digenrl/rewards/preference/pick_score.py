"""PickScore: which image people prefer for a prompt."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from digenrl.rewards.preference.clip import ClipEmbedder, ClipReward, check_positive, load_clip
from digenrl.rewards.preference.weights import DType, check_folder
from digenrl.rewards.reward import reward_name
from digenrl.types import PromptBatch


class PickScore(ClipReward):
    """Preference learned from Pick-a-Pic (arXiv:2305.01569): the logit scale times the cosine of image and prompt.

    The model is a CLIP ViT-H/14, its preparation that of the CLIP it was trained from, the prompt is read up to 77
    tokens (model card of yuvalkirstain/PickScore_v1).
    """

    needs: ClassVar[str] = "weights of yuvalkirstain/PickScore_v1 and the processor of laion/CLIP-ViT-H-14"

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        *,
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        divisor: float = 1.0,
        dtype: DType = "float32",
        **settings: Any,
    ) -> None:
        """Say where the weights are; `setup` loads them.

        Args:
            model: a folder with a `CLIPModel`, or its id on the hub.
            processor: a folder with CLIP's tokenizer and image processor, or its id on the hub.
            divisor: what scores are divided by; flow_grpo takes 26 (`flow_grpo/pickscore_scorer.py`), which brings most
                of them to [0, 1]. Advantages that are divided by a group's deviation do not depend on it.
            dtype: in which the model computes; the scores themselves are computed in float32.
            settings: `frames`, `num_frames`, `batch_size` and `offload` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(dtype, **settings)
        self.model = model
        self.processor = processor
        check_folder("model", model)
        check_folder("processor", self.processor)
        self.divisor = check_positive("divisor", divisor)

    def load(self) -> ClipEmbedder:
        """Load model, tokenizer and image processor to host memory."""
        return load_clip(self.model, self.processor, reward_name(self))

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Score N images: [N]."""
        return self.clip.logit_scale * self.cosines(images, prompts) / self.divisor
