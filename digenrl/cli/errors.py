"""Errors that the command line says in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

Keys = tuple[str, ...]
"""Where a setting stands, `("model", "clip_range")`; the `init_args` between a class and its settings are left out."""

_MAX_LISTED = 12  # names that a message lists when none is near
_MAX_VALUE_CHARS = 80


class UsageError(Exception):
    """What the user gave is wrong; the message says what and what would be right."""


class SettingError(UsageError):
    """A setting is wrong. `problem` goes on where its name ends: "must be a number, got 'abc'"."""

    def __init__(self, keys: Keys, problem: str) -> None:
        super().__init__(f"`{'.'.join(keys)}` {problem}")
        self.keys = keys
        self.problem = problem


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Give the name that was probably meant."""
    by_lower_case = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return by_lower_case[close[0]] if close else None


def suggest(name: str, names: Iterable[str], *, otherwise: str | None = None) -> str:
    """End a message with what would be right: the nearest name, or else `otherwise`, or all names if they are few."""
    known = sorted(names)
    close = nearest(name, known)
    if close is not None:
        return f"; did you mean `{close}`?"
    return listing(known) if otherwise is None else otherwise


def listing(names: Iterable[str]) -> str:
    """End a message with all names, if they are few."""
    known = sorted(names)
    return f"; known: {', '.join(known)}." if 0 < len(known) <= _MAX_LISTED else "."


def show(value: object) -> str:
    """Write a value as it stands in a configuration, shortened."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def one_line(error: object) -> str:
    """Put a message on one line."""
    return " ".join(str(error).split())
