"""HPS v2 and v2.1: which image people prefer for a prompt."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from digenrl.rewards.images import to_uint8
from digenrl.rewards.preference.clip import (
    ClipEmbedder,
    ClipReward,
    check_positive,
    clip_image_processor,
    load_tokenizer,
)
from digenrl.rewards.preference.open_clip import clip_state
from digenrl.rewards.preference.weights import (
    DType,
    check_file,
    check_folder,
    load_folder,
    load_state,
    model_from_state,
)
from digenrl.rewards.reward import RewardError, reward_name
from digenrl.types import PromptBatch


class HPSv2(ClipReward):
    """Human Preference Score v2 (arXiv:2306.09341): the cosine of image and prompt, times `scale`.

    The published checkpoint is a CLIP ViT-H/14 in the layout of open_clip; it is renamed to a `CLIPModel` on loading.
    Of github.com/tgxs002/HPSv2: the score is the bare cosine (`hpsv2/img_score.py`), which its benchmark tables show
    times 100 (`hpsv2/evaluation.py`), 23 to 29 for models of 2023. An image is not cropped: its longer side becomes 224
    and the shorter one is padded with black (`hpsv2/src/open_clip/factory.py` asks for `resize_longest_max` of
    `transform.py`). The prompt is read up to 77 tokens. Scores compare images of one prompt.

    Upstream repairs broken unicode and HTML entities in prompts before it tokenizes; that is not done here.
    """

    needs: ClassVar[str] = "HPS_v2.1_compressed.pt of xswu/HPSv2 and config and processor of laion/CLIP-ViT-H-14"

    def __init__(
        self,
        checkpoint: str = "xswu/HPSv2/HPS_v2.1_compressed.pt",
        *,
        base: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: float = 1.0,
        dtype: DType = "float32",
        **settings: Any,
    ) -> None:
        """Say where the weights are; `setup` loads them.

        Args:
            checkpoint: the file of v2.1 or of v2 (`HPS_v2_compressed.pt`), or one of the hub as owner/name/file.
            base: a folder with the configuration, tokenizer and image processor of the CLIP that it was trained from,
                or its id on the hub. Its weights are not needed.
            scale: what cosines are multiplied with.
            dtype: in which the model computes; the scores themselves are computed in float32.
            settings: `frames`, `num_frames`, `batch_size` and `offload` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(dtype, **settings)
        check_file("checkpoint", checkpoint)
        check_folder("base", base)
        self.checkpoint = checkpoint
        self.base = base
        self.scale = check_positive("scale", scale)

    def load(self) -> ClipEmbedder:
        """Load configuration, tokenizer and the renamed weights to host memory."""
        from transformers import CLIPConfig, CLIPModel

        config = load_folder("base", self.base, CLIPConfig.from_pretrained)
        processor = load_folder("base", self.base, clip_image_processor().from_pretrained)
        tokenizer = load_tokenizer("base", self.base, config.text_config.max_position_embeddings, reward_name(self))
        held = load_state("checkpoint", self.checkpoint)
        try:
            state = clip_state(held.get("state_dict", held))
        except KeyError as error:
            raise RewardError(f"`checkpoint` {self.checkpoint} is no CLIP of open_clip: it has {error}.") from error
        model = model_from_state("checkpoint", self.checkpoint, CLIPModel, config, state)
        size = config.vision_config.image_size
        return ClipEmbedder(model, tokenizer, PaddedPreprocess(size, processor.image_mean, processor.image_std))

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Score N images: [N]."""
        return self.scale * self.cosines(images, prompts)


class PaddedPreprocess:
    """Prepares whole images: 8 bits, longer side to `size` with antialiased bicubic, black edges, normalize."""

    def __init__(self, size: int, mean: list[float], std: list[float]) -> None:
        """Take the size and, for each color, mean and deviation of [0, 1]."""
        self.size = size
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        """Prepare N images: [N, 3, size, size] on the CPU."""
        pixels = torch.from_numpy(to_uint8(images)).permute(0, 3, 1, 2) / 255
        longest = max(pixels.shape[-2:])
        height, width = (round(side * self.size / longest) for side in pixels.shape[-2:])
        if (height, width) != tuple(pixels.shape[-2:]):
            pixels = interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        rows, columns = self.size - height, self.size - width
        pixels = pad(pixels, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        return (pixels - self.mean) / self.std
