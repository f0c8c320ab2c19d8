"""Prompts as tokens, with a word about those that are too long."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from digenrl.rewards.reward import shortened

log = logging.getLogger(__name__)


class PromptTokenizer:
    """Cuts prompts to what a text encoder reads, and says so, once, when that loses something."""

    def __init__(self, tokenizer: Any, max_length: int, reward: str) -> None:
        """Take a tokenizer of transformers.

        Args:
            tokenizer: what gives ids.
            max_length: most tokens, those of start and end included.
            reward: named in the message.
        """
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.reward = reward
        self._has_warned = False

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Tokenize N prompts: `input_ids` and `attention_mask`, both [N, L], padded to the longest."""
        if not self._has_warned:
            self._look_for_long_ones(texts)
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def _look_for_long_ones(self, texts: Sequence[str]) -> None:
        lengths = [len(ids) for ids in self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]]
        longest = max(range(len(texts)), key=lengths.__getitem__)
        if lengths[longest] > self.max_length:
            log.warning(
                "reward `%s` reads the first %d tokens of a prompt; %s has %d. Said once; later prompts are cut alike.",
                *(self.reward, self.max_length, shortened(texts[longest]), lengths[longest]),
            )
            self._has_warned = True
