"""Which samples are trained, compared with a published implementation and with brute force."""

import json
import math

import numpy as np
import pytest
import torch

from digenrl.functional import best_of_n, per_reward_advantages, preference_pairs, weighted_sum
from tests.functional.golden import FOLDER, load

BEST_OF = {
    name: case
    for name, case in json.loads((FOLDER / "advantages.json").read_text()).items()
    if name.startswith("hunyuan_bestof")
}


@pytest.mark.parametrize("name", BEST_OF)
def test_best_of_n_of_a_whole_batch_equals_dancegrpos(name):
    inputs, outputs = BEST_OF[name]["inputs"], BEST_OF[name]["outputs"]
    rewards = torch.tensor([inputs["vq_rewards"], inputs["mq_rewards"]]).T
    ids = torch.arange(16) // inputs["num_generations"]
    advantages = per_reward_advantages(rewards, ids, ddof=1, eps=1e-8)
    weights = [inputs["vq_coef"], inputs["mq_coef"]]
    scores = weighted_sum(advantages, weights)
    assert np.abs(scores.numpy() * sum(weights) - outputs["total_scores"]).max() <= 2e-5
    assert best_of_n(scores, [0] * 16, inputs["bestofn"]).tolist() == outputs["kept_ids_sorted"]


def kept_by_brute_force(scores, ids, n):
    kept = []
    for group in set(ids):
        rows = sorted((score, row) for row, (score, id_) in enumerate(zip(scores, ids, strict=True)) if id_ == group)
        if rows[0][0] != rows[-1][0]:
            kept += rows[: n // 2] + rows[len(rows) - (n - n // 2) :]
    return sorted(row for _, row in kept)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_best_of_n_equals_brute_force_in_each_group(n):
    for _ in range(50):
        ids = [9] * 5 + [-1] * 7 + [4] * 6 + [2] * 8
        ids = [ids[row] for row in torch.randperm(len(ids))]
        scores = torch.randint(4, (len(ids),)).float()  # many ties
        actual = best_of_n(scores, ids, n)
        assert actual.tolist() == kept_by_brute_force(scores.tolist(), ids, n)
        assert actual.dtype == torch.int64


def test_best_of_n_orders_equal_scores_by_index():
    assert best_of_n(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), [0] * 5, 3).tolist() == [1, 2, 3]


def test_best_of_n_keeps_nothing_of_a_group_without_a_preference():
    scores = torch.tensor([0.7, 1.0, 0.7, 2.0, 0.7, 3.0])
    assert best_of_n(scores, [0, 1, 0, 1, 0, 1], 2).tolist() == [1, 5]
    assert best_of_n(torch.full((4,), 0.1), [0, 0, 1, 1], 2).tolist() == []


@pytest.mark.parametrize("function", [lambda scores, ids: best_of_n(scores, ids, 2), preference_pairs])
def test_scores_that_cannot_be_ordered_are_refused(function):
    with pytest.raises(ValueError, match=r"`scores` must be finite, got \[nan\] at indices \[1\]"):
        function(torch.tensor([1.0, math.nan]), [0, 0])
    with pytest.raises(ValueError, match=r"`group_ids` .* got shape \(3,\) for 2 scores"):
        function(torch.zeros(2), [0, 0, 1])


def test_n_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="`n` must be at least 2.* got 1"):
        best_of_n(torch.randn(6), [0, 0, 0, 1, 1, 1], 1)
    with pytest.raises(ValueError, match="`n` must be at most the size of the smallest group, 2, got 3"):
        best_of_n(torch.randn(6), [0, 0, 0, 0, 1, 1], 3)


def test_pairs_equal_the_stored_ones():
    golden = load("ff_dpo_default")
    pairs = preference_pairs(torch.from_numpy(golden["adv"]), torch.from_numpy(golden["uid"]))
    assert pairs.tolist() == golden["pairs"].tolist()


def test_pairs_are_the_first_best_and_the_first_worst_of_each_group():
    scores = torch.tensor([1.0, 5.0, 3.0, 0.0, 3.0, 0.0, 1.0, 5.0])
    ids = [8, 3, 8, 3, 8, 3, 8, 3]
    assert preference_pairs(scores, ids).tolist() == [[1, 3], [2, 0]]


def test_tied_group_makes_no_pair():
    pairs = preference_pairs(torch.tensor([0.7, 1.0, 0.7, 2.0, 4.0]), [0, 1, 0, 1, 2])
    assert pairs.tolist() == [[3, 1]]
    assert preference_pairs(torch.full((4,), 0.1), [0, 0, 1, 1]).shape == (0, 2)
