"""CLIPScore: how well an image fits its prompt."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from digenrl.rewards.preference.clip import ClipEmbedder, ClipReward, check_positive, load_clip
from digenrl.rewards.preference.weights import DType, check_folder
from digenrl.rewards.reward import reward_name
from digenrl.types import PromptBatch


class CLIPScore(ClipReward):
    """The cosine of image and prompt under any `CLIPModel`, times `scale`.

    The prompt is taken as it is and nothing is clamped, unlike in the metric of arXiv:2104.08718, which puts "A photo
    depicts" before it and gives 2.5 max(cosine, 0): what is clamped to 0 teaches nothing.
    """

    needs: ClassVar[str] = "weights of a CLIPModel, by default openai/clip-vit-large-patch14"

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        *,
        processor: str | None = None,
        scale: float = 1.0,
        dtype: DType = "float32",
        **settings: Any,
    ) -> None:
        """Say where the weights are; `setup` loads them.

        Args:
            model: a folder with a `CLIPModel`, or its id on the hub.
            processor: a folder with its tokenizer and image processor, or its id on the hub; None is `model`.
            scale: what cosines are multiplied with. 100/30 gives the numbers of flow_grpo (`flow_grpo/clip_scorer.py`
                divides the logits by 30, and the logit scale of OpenAI's models is 100).
            dtype: in which the model computes; the scores themselves are computed in float32.
            settings: `frames`, `num_frames`, `batch_size` and `offload` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(dtype, **settings)
        self.model = model
        self.processor = model if processor is None else processor
        check_folder("model", model)
        check_folder("processor", self.processor)
        self.scale = check_positive("scale", scale)

    def load(self) -> ClipEmbedder:
        """Load model, tokenizer and image processor to host memory."""
        return load_clip(self.model, self.processor, reward_name(self))

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Score N images: [N]."""
        return self.scale * self.cosines(images, prompts)
