"""Reward by the text that an optical character recognition reads in an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.rewards.counts import check_count
from digenrl.rewards.cpu import CPUReward
from digenrl.rewards.extras import import_extra
from digenrl.rewards.images import to_uint8
from digenrl.rewards.reward import RewardError, reward_name, shortened
from digenrl.rewards.texts import edit_similarity, folded, quoted_text
from digenrl.types import Prompt, PromptBatch

_LINE_HEIGHT = 48  # pixels; the recognizer scales every line to it
# Grey columns to the right of a line, at that height. Without any the last character is misread at times. RapidOCR
# fills up to 320 columns: 2.5 times the time at 16x32, for 96 instead of 95 % of 300 noisy pairs of digits.
_MARGIN = 32
_GREY = 128  # what the recognizer pads with
_LINES_PER_CALL = 8


class OCRReward(CPUReward):
    """Wants an image to show a given text, and reads it with RapidOCR (PP-OCRv6 small, Chinese and English).

    The text is the one in quotes in the prompt (`rewards.texts.quoted_text` has the rule), or a metadata column.
    An image in which nothing can be read is worth 0. The networks are in the package `rapidocr` and run on the CPU; an
    image gets the same reward whatever other images are judged with it.

    Cost with one thread: 10 ms for an image of 16×32 as one line, 100 ms with detection; 25 ms for a line of 48×320.
    """

    needs = "the text in quotes in the prompt, or a metadata column; the package brings the weights"
    extra = "ocr"

    def __init__(
        self,
        column: str | None = None,
        *,
        metric: Literal["edit", "exact"] = "edit",
        detect: bool = True,
        case_sensitive: bool = False,
        ignore_spaces: bool = True,
        detect_size: int = 320,
        num_threads: int = 1,
        **settings: Any,
    ) -> None:
        """Set what is read and how it is compared.

        Args:
            column: the metadata column with the text that an image should show; None is the text in quotes in the
                prompt.
            metric: `"edit"` is 1 - edit distance / length of the longer text, in [0, 1]; `"exact"` is 1 for the very
                text and else 0.
            detect: find lines of text first, and join them in reading order: from the top, then from the left. False
                reads the whole image as one line, for images that show nothing else; it is several times faster.
            case_sensitive: whether "Open" is not "OPEN".
            ignore_spaces: whether "24h" is "24 h".
            detect_size: images whose shorter side has fewer pixels are enlarged to so many before lines are searched.
                Small text in a large image needs more, at a cost that grows with its square; much more than the image
                has, and text is not found.
            num_threads: of the networks.
            settings: `frames`, `num_frames` and `batch_size` of `FrameReward`.

        Raises:
            ValueError: an argument that cannot be.
        """
        super().__init__(**settings)
        if column is not None and (not isinstance(column, str) or not column):
            raise ValueError(f"`column` must be the name of a metadata column, got {column!r}.")
        if metric not in ("edit", "exact"):
            raise ValueError(f"`metric` must be edit or exact, got {metric!r}.")
        check_count("`num_threads`", num_threads)
        check_count("`detect_size`", detect_size, least=32, what="in pixels")
        self.requires = () if column is None else (column,)
        self.column = column
        self.metric = metric
        self.detect = detect
        self.case_sensitive = case_sensitive
        self.ignore_spaces = ignore_spaces
        self.detect_size = detect_size
        self.num_threads = num_threads
        self._ocr: Any = None

    def setup(self, device: torch.device) -> None:
        """Load the networks; they stay on the CPU.

        Raises:
            ImportError: the extra `ocr` is not installed.
        """
        super().setup(device)
        import_extra("onnxruntime", reward="OCRReward", extra="ocr")
        package = import_extra("rapidocr", reward="OCRReward", extra="ocr")
        self._ocr = package.RapidOCR(
            params={
                "Global.log_level": "critical",  # an image without text is no event
                "Global.text_score": 0.0,  # keep what was read without certainty, as for a single line
                "Global.use_cls": False,  # text is upright
                "EngineConfig.onnxruntime.intra_op_num_threads": self.num_threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_side_len": self.detect_size,
                "Rec.rec_batch_num": _LINES_PER_CALL,
                **({} if self.detect else {"Rec.rec_img_shape": [3, _LINE_HEIGHT, _LINE_HEIGHT]}),
            }
        )
        blank = torch.zeros(1, 3, _LINE_HEIGHT, _LINE_HEIGHT)  # networks are loaded when first asked
        self._ocr.recognize_txt(list(to_uint8(blank)))
        self.read(blank)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that each prompt says what its images should show.

        Raises:
            ValueError: one does not; the message names the prompt.
        """
        for prompt in prompts:
            self.target(prompt)

    def target(self, prompt: Prompt) -> str:
        """Give the text that images of a prompt should show.

        Raises:
            ValueError: the prompt does not say it; the message names the prompt.
        """
        try:
            return self._column_text(prompt, self.column) if self.column else quoted_text(prompt.text)
        except ValueError as error:
            remedy = "" if self.column else "; or give the text in a metadata column and its name as `column`"
            raise ValueError(
                f"reward `{reward_name(self)}` does not know what to read for prompt {shortened(prompt.text)}: "
                f"{error}{remedy}."
            ) from None

    def read(self, images: Tensor) -> list[str]:
        """Read N images, [N, C, H, W] in [0, 1]: N texts as recognized, empty where nothing was.

        Raises:
            RewardError: `setup` was not called.
        """
        if self._ocr is None:
            raise RewardError(f"`setup(device)` of reward `{reward_name(self)}` must be called before it can judge.")
        pixels = np.ascontiguousarray(to_uint8(images)[..., ::-1])  # the networks want blue first
        return [self._read_page(image) for image in pixels] if self.detect else self._read_lines(pixels)

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Tensor:
        """Compare what N images, [N, C, H, W] in [0, 1], show with what they should: [N] in [0, 1]."""
        targets = [self.target(prompt) for prompt in prompts.prompts]
        return torch.tensor(
            [self.compare(text, target) for text, target in zip(self.read(images), targets, strict=True)]
        )

    def compare(self, text: str, target: str) -> float:
        """Compare a text with the one wanted: in [0, 1]."""
        text, target = (
            folded(part, case_sensitive=self.case_sensitive, ignore_spaces=self.ignore_spaces)
            for part in (text, target)
        )
        return float(text == target) if self.metric == "exact" else edit_similarity(text, target)

    def _column_text(self, prompt: Prompt, column: str) -> str:
        value = prompt.metadata.get(column)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"the column `{column}` must be a text, got {value!r}")
        return value

    def _read_lines(self, pixels: NDArray[np.uint8]) -> list[str]:
        margin = math.ceil(_MARGIN * pixels.shape[1] / _LINE_HEIGHT)
        lines = np.pad(pixels, ((0, 0), (0, 0), (0, margin), (0, 0)), constant_values=_GREY)
        return list(self._ocr.recognize_txt(list(lines)).txts)

    def _read_page(self, pixels: NDArray[np.uint8]) -> str:
        return " ".join(self._ocr(pixels).txts or ())
