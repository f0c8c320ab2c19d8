from __future__ import annotations

import pytest

from digenrl.rewards import RewardError
from digenrl.rewards.judge.templates import fill_in, template_columns
from digenrl.types import Prompt


def test_columns_are_the_placeholders_but_the_prompt_each_once() -> None:
    assert template_columns("{prompt}: {color} {object}, {color}? {{not}}", name="question") == ("color", "object")


def test_prompts_and_metadata_are_put_in_as_they_are() -> None:
    prompt = Prompt("a {red} cat", 0, metadata={"count": 2, "color": "{prompt}"})
    assert fill_in("{count} x {prompt} in {color} {{}}", prompt) == "2 x a {red} cat in {prompt} {}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Is it {}?", r"`question` may name .* got \{\}; write \{\{ for a brace"),
        ("Is it {0}?", r"got \{0\}"),
        ("Is it {prompt.text}?", r"got \{prompt.text\}"),
        ("Is it {prompt[0]}?", r"got \{prompt\[0\]\}"),
        ("Is it {prompt!r:>8}?", r"got \{prompt!r:>8\}"),
        ("Is it {prompt?", "`question` must have matching braces"),
        ("Is it prompt}?", "`question` must have matching braces"),
        ("Is it {Prompt}?", r"`question` names \{Prompt\}, but the prompt's text is \{prompt\}"),
        (None, "`question` must be a text, got None"),
    ],
)
def test_what_is_no_plain_name_is_refused_in_one_line(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        template_columns(template, name="question")
    assert "\n" not in str(info.value)


def test_a_missing_column_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match="column `color`, which prompt 'a cat' lacks"):
        fill_in("{color}?", Prompt("a cat", 0))
