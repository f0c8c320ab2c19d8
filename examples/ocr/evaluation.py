"""How many of the 100 texts a policy draws so that the OCR reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.diffusion.sampling import sample_ode
from digenrl.rewards import OCRReward
from digenrl.types import Prompt, PromptBatch
from examples.ocr.drawings import TEXTS
from examples.ocr.policy import TextPolicy

NUM_STEPS = 10


@torch.no_grad()
def draw_texts(policy: TextPolicy, *, seed: int = 0) -> Tensor:
    """Draw each text once, in the order of `TEXTS`: images [100, 1, 16, 32] in [0, 1].

    These are the validation samples of a run with `prompts.txt` whose `model.seed` is `seed`: their noise depends on
    it and not on the weights.
    """
    prompts = PromptBatch.for_validation([Prompt(f'"{text}"', uid=uid) for uid, text in enumerate(TEXTS)], seed=seed)
    condition = policy.encode(prompts.texts)
    latents = sample_ode(
        lambda latents, sigma: policy.velocity(latents, sigma, condition),
        policy.initial_latents(prompts.seeds),
        policy.sigmas(NUM_STEPS),
    )
    return policy.decode(latents)


def read_texts(images: Tensor) -> list[str]:
    """Let the OCR read images [B, 1, 16, 32] in [0, 1]: B texts."""
    reward = OCRReward(metric="exact", detect=False)
    reward.setup(torch.device("cpu"))
    return reward.read(images)


def num_right(read: Sequence[str]) -> int:
    """Count which of the 100 texts were read as asked for."""
    return sum(text == asked for text, asked in zip(read, TEXTS, strict=True))
