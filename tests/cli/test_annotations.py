from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from torch import Tensor

from digenrl import DiffusionPolicy
from digenrl.cli.annotations import Alternatives, accepts


@pytest.mark.parametrize(
    ("annotation", "words", "placeholder"),
    [
        (int, "a whole number", "INT"),
        (Optional[float], "a number or null", "NUMBER"),  # noqa: UP045
        (str | Path | list[str], "a text or a path or a list, each item a text", "TEXT|PATH|LIST"),
        (int | Literal["all"], "`all` or a whole number", "INT|all"),
        (Union[Literal[64, 32], Literal["64", "bf16"]], "one of `64`, `32`, `bf16`", "64|32|64|bf16"),  # noqa: UP007
        (DiffusionPolicy, "a DiffusionPolicy", "CLASS"),
        (Callable[[Tensor], Tensor], "a function or a class whose objects can be called", "FUNCTION|CLASS"),
    ],
)
def test_types_are_named_in_words(annotation: Any, words: str, placeholder: str) -> None:
    types = Alternatives.of(annotation)
    assert (types.describe(), types.placeholder()) == (words, placeholder)


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (int, ["3", 3], ["3.5", "x", None]),
        (float, ["1e-4", 1, "3"], ["x", True, None]),
        (bool, ["true", False], ["maybe", 3]),
        (int | None, ["null", None], ["x"]),
        (list[str], [["a"], []], ["a", 3]),
        (str, ["a", "3"], [3, ["a"]]),
    ],
)
def test_values_are_judged_as_options_and_files_give_them(annotation: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(accepts(annotation, value) for value in right)
    assert not any(accepts(annotation, value) for value in wrong)
