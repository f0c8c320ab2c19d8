"""Shapes and means of rows."""

import pytest
import torch

from digenrl.functional import append_dims, mean_square


def test_append_dims_adds_trailing_axes():
    assert append_dims(torch.arange(3), 4).shape == (3, 1, 1, 1)
    assert append_dims(torch.zeros(2, 3), 2).shape == (2, 3)
    with pytest.raises(ValueError, match="`ndim` .* 2 axes .* got 1"):
        append_dims(torch.zeros(2, 3), 1)


def test_mean_square_averages_each_row():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 2.0]]])
    assert mean_square(x).tolist() == [7.5, 1.0]


def test_mean_square_of_half_precision_is_float32():
    x = torch.full((1, 4096), 1.0 + 2**-7, dtype=torch.bfloat16)
    assert mean_square(x).dtype == torch.float32
    assert mean_square(x).item() == pytest.approx((1.0 + 2**-7) ** 2, rel=1e-6)
    assert mean_square(x.double()).dtype == torch.float64
