"""Sums and means over the rows of a group."""

import torch

from digenrl.functional import mean_per_group, sum_per_group


def test_each_row_gets_the_sum_and_the_mean_of_its_group():
    values, index = torch.tensor([1.0, 10.0, 2.0, 6.0, 30.0]), torch.tensor([7, -2, 7, 7, -2])
    assert sum_per_group(values, index).tolist() == [9.0, 40.0, 9.0, 9.0, 40.0]
    assert mean_per_group(values, index).tolist() == [3.0, 20.0, 3.0, 3.0, 20.0]


def test_reductions_follow_the_order_of_the_rows():
    values, index = torch.randn(20, dtype=torch.float64), torch.randint(4, (20,))
    order = torch.randperm(20)
    for reduction in (sum_per_group, mean_per_group):
        torch.testing.assert_close(reduction(values[order], index[order]), reduction(values, index)[order])


def test_sum_carries_gradients_to_all_rows_of_the_group():
    values = torch.ones(4, dtype=torch.float64, requires_grad=True)
    sum_per_group(values, torch.tensor([0, 0, 1, 0]))[0].backward()
    assert values.grad.tolist() == [1.0, 1.0, 0.0, 1.0]
