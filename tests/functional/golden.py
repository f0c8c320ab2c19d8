"""Stored numbers of published implementations, and the toy model that some of them were made with."""

from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "golden"
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def load(name):
    return np.load(FOLDER / f"{name}.npz")


def tensors(golden, *keys, dtype):
    return [torch.from_numpy(golden[key]).to(dtype) for key in keys]


def assert_value(actual, expected, bound):
    """Compare by |a - b| / (1 + |b|), elementwise."""
    np.testing.assert_allclose(actual.detach().double().numpy(), expected, rtol=bound, atol=bound)


def assert_gradient(actual, expected, bound):
    """Compare relative to the largest entry."""
    assert np.abs(actual.double().numpy() - expected).max() <= bound * np.abs(expected).max()


class LinearToy:
    """v = x W' + b + 0.2 c + 0.1 sigma, for x and c of 8 numbers a token."""

    def __init__(self, golden, weight, bias, *, dtype):
        self.weight, self.bias = tensors(golden, weight, bias, dtype=dtype)

    def __call__(self, latents, sigma, condition):
        return latents @ self.weight.T + self.bias + 0.2 * condition[:, None] + 0.1 * sigma[:, None, None]

    def trained(self):
        self.weight.requires_grad_(), self.bias.requires_grad_()
        return self

    def assert_gradients(self, golden, bound):
        assert_gradient(self.weight.grad, golden["gradW0"], bound)
        assert_gradient(self.bias.grad, golden["gradb0"], bound)
