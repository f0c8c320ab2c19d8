from __future__ import annotations

import math

import pytest

from digenrl.rewards import RewardError
from digenrl.rewards.judge.answers import YES_NO, read_first_token, scale_choices

TO_TEN = scale_choices(0, 10)


def candidates(**chances: float) -> list[tuple[str, float]]:
    return [(text.removeprefix("_"), math.log(chance)) for text, chance in chances.items()]


def test_probability_of_yes_is_that_of_all_its_spellings_relative_to_yes_and_no() -> None:
    answer = [(" Yes", math.log(0.3)), ("yes", math.log(0.1)), ("No", math.log(0.2)), ("It", math.log(0.4))]
    reading = read_first_token(answer, YES_NO)
    assert reading.value == pytest.approx(0.4 / 0.6)
    assert reading.beginning is None


def test_a_part_of_a_word_counts_for_the_only_choice_that_it_can_become() -> None:
    assert read_first_token(candidates(y=0.2, Y=0.1, n=0.3, No=0.4), YES_NO).value == pytest.approx(0.3)


def test_expected_score_is_the_mean_of_all_scores_and_not_the_likeliest() -> None:
    assert read_first_token(candidates(_2=0.5, _9=0.25, _7=0.25), TO_TEN).value == pytest.approx(5.0)


def test_one_and_ten_are_told_apart_by_the_token_behind_the_one() -> None:
    reading = read_first_token(candidates(_1=0.5, _4=0.5), TO_TEN)
    assert reading.value == pytest.approx(2.0)
    assert reading.beginning is not None
    assert (reading.beginning.text, reading.beginning.rest) == ("1", "0")
    after_one = [("<|im_end|>", math.log(0.8)), ("0", math.log(0.2))]
    # p(10) = 0.5 * 0.2, p(1) = 0.5 * 0.8, p(4) = 0.5
    total = reading.value + reading.beginning.share * reading.beginning.mean(TO_TEN, after_one)
    assert total == pytest.approx(0.1 * 10 + 0.4 * 1 + 0.5 * 4)


def test_a_rest_that_is_not_among_the_candidates_counts_as_not_given() -> None:
    reading = read_first_token(candidates(_1=1.0), TO_TEN)
    assert reading.beginning is not None
    assert reading.beginning.mean(TO_TEN, [("<|im_end|>", math.log(0.5)), ("00", math.log(0.4))]) == 1.0


def test_a_ten_that_is_one_token_leaves_nothing_open() -> None:
    reading = read_first_token([("10", math.log(0.5)), ("1", math.log(0.5))], TO_TEN)
    assert (reading.value, reading.beginning) == (pytest.approx(5.5), None)


@pytest.mark.parametrize("scale", [(0, 9), (1, 5)])
def test_a_scale_of_digits_leaves_nothing_open(scale: tuple[int, int]) -> None:
    reading = read_first_token(candidates(_1=0.5, _3=0.5), scale_choices(*scale))
    assert (reading.value, reading.beginning) == (pytest.approx(2.0), None)


def test_a_one_that_cannot_move_the_score_is_not_asked_about() -> None:
    reading = read_first_token(candidates(_1=1e-5, _4=1.0), TO_TEN)
    assert reading.beginning is None
    assert reading.value == pytest.approx(4.0, abs=1e-3)


def test_an_answer_of_another_kind_is_an_error_that_shows_it_and_says_what_to_do() -> None:
    with pytest.raises(RewardError, match=r"none of 0, .* 10: they have 3% .* 'The' \(90%\).*`structured_outputs`"):
        read_first_token(candidates(The=0.9, _8=0.03), TO_TEN)


def test_no_candidates_are_an_error() -> None:
    with pytest.raises(RewardError, match="the likeliest are none"):
        read_first_token([], TO_TEN)
