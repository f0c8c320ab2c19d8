"""Noise that belongs to a sample: the same bits on any worker, in any batch and in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.types import derive_seed


def sample_noise(seeds: Sequence[int], stream: str, shape: Sequence[int]) -> Tensor:
    """Draw standard normal noise, one independent CPU random source per sample and stream.

    Args:
        seeds: [B] the samples' seeds (`PromptBatch.seeds`).
        stream: what the noise is for, such as `"initial"` or `"step 3"`; streams of a sample are independent.
        shape: shape of one sample's noise.

    Returns:
        [B, *shape], float32, on the CPU, so that the bits do not depend on the device either.
    """
    rng = torch.Generator()
    return torch.stack([torch.randn(*shape, generator=rng.manual_seed(derive_seed(seed, stream))) for seed in seeds])
