"""A reward for 8x8 digits: how probable is it that the image shows the digit asked for?"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.neighbors import KernelDensity
from torch import Tensor

from digenrl.types import PromptBatch
from examples.digits.policy import DIGIT_WORDS, digits_of

HELD_OUT_EVERY = 5
"""Every fifth real image is kept from the fit, to set the floor on and to test with."""


def load_images(*, held_out: bool) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Load scikit-learn's digits (UCI Optical Recognition of Handwritten Digits, 1797 images).

    Returns:
        images [B, 64] in [0, 1] and their digits [B], of the held-out fifth or of the rest.
    """
    images, digits = load_digits(return_X_y=True)
    rows = (np.arange(len(digits)) % HELD_OUT_EVERY == 0) == held_out
    return images[rows] / 16, digits[rows]


class DigitReward:
    """The probability of the asked digit under a generative classifier of real digits.

    Bayes' rule over eleven equally likely causes of an image: one kernel density per digit, and "no digit"
    with a constant density, the floor. A classifier that must choose among ten digits is also sure of one for
    a blank image or for noise, and a policy would find that out; here both get about 0. The floor is the
    lowest density that a held-out real image has under its own digit.

    Fitting takes about 0.1 s on one thread and draws no random numbers.

    Args:
        bandwidth: of the Gaussian kernels, in units of pixel value; the median distance from an image to the
            nearest other one is 1.0.
    """

    def __init__(self, *, bandwidth: float = 0.4) -> None:
        images, digits = load_images(held_out=False)
        self.densities = [
            KernelDensity(bandwidth=bandwidth).fit(images[digits == digit]) for digit in range(len(DIGIT_WORDS))
        ]
        images, digits = load_images(held_out=True)
        self.log_floor = float(self._log_densities(images)[np.arange(len(digits)), digits].min())

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        """Score B images [B, 1, 8, 8] in [0, 1]; returns probabilities [B]."""
        probabilities = self.probabilities(media.detach().flatten(1).double().cpu().numpy())
        asked = digits_of(prompts.texts)
        return torch.from_numpy(probabilities[np.arange(len(asked)), asked]).float()

    def probabilities(self, images: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give the probability of each digit, [B, 10], for images [B, 64]; "no digit" has the rest to 1."""
        log_densities = self._log_densities(images)
        log_total = np.logaddexp(np.logaddexp.reduce(log_densities, axis=1), self.log_floor)  # [B]
        probabilities: NDArray[np.float64] = np.exp(log_densities - log_total[:, None])
        return probabilities

    def _log_densities(self, images: NDArray[np.float64]) -> NDArray[np.float64]:  # [B, 64] -> [B, 10]
        return np.stack([density.score_samples(images) for density in self.densities], axis=1)
