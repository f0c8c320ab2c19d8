"""Which text a prompt asks for, and how alike two texts are, against the definition."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.rewards.texts import edit_distance, edit_similarity, folded, quoted_text


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign that says "OPEN"', "OPEN"),
        ("a sign that says “OPEN”, at night", "OPEN"),
        ("a sign that says 'OPEN'", "OPEN"),
        ("a sign that says ‘OPEN’", "OPEN"),
        ("'42'", "42"),
        ('the baker\'s "OPEN" sign', "OPEN"),
        ("the baker's and the dogs' sign 'OPEN'", "OPEN"),
        ("'don't panic', it says", "don't panic"),
        ("‘don’t panic’, it says", "don’t panic"),
        ("the '90s poster '42'", "42"),
        ('"don\'t panic"', "don't panic"),
        ("\"it's 'fine'\"", "it's 'fine'"),
        ('a sign: "24 h, 7 days"', "24 h, 7 days"),
        ("“猫”", "猫"),
    ],
)
def test_the_text_in_quotes_is_found(prompt: str, text: str) -> None:
    assert quoted_text(prompt) == text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("the baker's cat", "got none"),
        ("", "got none"),
        ('"A" and "B"', "got 2"),
        ("'A' and 'B'", "got 2"),
        ('"A" and “B”', "got 2"),
        ('a 5" nail and "B"', "without its other half"),
        ('a 5" nail', "got none"),
        ('it says ""', "is empty"),
        ('it says " "', "is empty"),
    ],
)
def test_a_prompt_that_does_not_say_one_text_is_refused(prompt: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quoted_text(prompt)


@pytest.mark.parametrize(
    ("case_sensitive", "ignore_spaces", "text"),
    [
        (False, True, "open24h&'"),
        (False, False, "open 24 h&'"),
        (True, True, "OPEN24h&'"),
        (True, False, "OPEN 24 h&'"),
    ],
)
def test_only_what_does_not_count_is_dropped(case_sensitive: bool, ignore_spaces: bool, text: str) -> None:
    given = " OPEN\n 24\N{NO-BREAK SPACE}h\N{FULLWIDTH AMPERSAND}’ "
    assert folded(given, case_sensitive=case_sensitive, ignore_spaces=ignore_spaces) == text


def distance_by_definition(first: str, second: str) -> int:
    @cache
    def of_ends(row: int, column: int) -> int:
        if row == len(first) or column == len(second):
            return len(first) - row + len(second) - column
        if first[row] == second[column]:
            return of_ends(row + 1, column + 1)
        return 1 + min(of_ends(row + 1, column), of_ends(row, column + 1), of_ends(row + 1, column + 1))

    return of_ends(0, 0)


TEXTS = st.text("abc", max_size=8)


@given(TEXTS, TEXTS)
def test_the_edit_distance_is_that_of_the_definition(first: str, second: str) -> None:
    assert edit_distance(first, second) == distance_by_definition(first, second)


@given(TEXTS, TEXTS)
def test_similarity_is_symmetric_and_one_for_equal_texts_alone(first: str, second: str) -> None:
    similarity = edit_similarity(first, second)
    assert 0 <= similarity <= 1
    assert similarity == edit_similarity(second, first)
    assert (similarity == 1) == (first == second)


@pytest.mark.parametrize(
    ("first", "second", "similarity"), [("", "", 1), ("", "ab", 0), ("ab", "cd", 0), ("ab", "abcd", 0.5)]
)
def test_similarity_counts_the_longer_text(first: str, second: str, similarity: float) -> None:
    assert edit_similarity(first, second) == similarity
