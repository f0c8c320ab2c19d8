"""Rewards that commands of the tests name by their dotted path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl import Prompt, PromptBatch


def red(media: Tensor, prompts: PromptBatch) -> Tensor:
    return media.movedim(-3, 1)[:, 0].flatten(1).mean(1)


def last_frame(media: Tensor, prompts: PromptBatch) -> Tensor:
    assert media.ndim == 5
    return media[:, -1].flatten(1).mean(1)


def prompt_length(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.tensor([float(len(text)) for text in prompts.texts])


class Column:
    """Gives what the prompt's metadata say."""

    requires = ("score",)

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return torch.tensor([prompt.metadata["score"] for prompt in prompts.prompts])


class GroupSize:
    """Gives how many samples of a prompt it sees."""

    groupwise = True

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return torch.tensor([float(prompts.group_ids.count(group)) for group in prompts.group_ids])


class Shy:
    """Says of a prompt that it cannot score it: before, or only when asked."""

    def __init__(self, when: str = "before") -> None:
        if when not in ("before", "asked"):
            raise ValueError(f"`when` must be before or asked, got {when!r}.")
        self.when = when

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        if self.when == "before" and any(prompt.text == "bad" for prompt in prompts):
            raise ValueError("a prompt is bad.")

    def __call__(self, media: Tensor, prompts: PromptBatch) -> list[float | Exception]:
        return [RuntimeError("cannot say") if text == "bad" else 1.0 for text in prompts.texts]


class Uninstalled:
    def setup(self, device: torch.device) -> None:
        raise ImportError("reward Uninstalled needs the package y: pip install 'digenrl[y]'")

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        raise AssertionError("it has not been set up")
