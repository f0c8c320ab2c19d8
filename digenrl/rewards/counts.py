"""Counts that users set."""

from __future__ import annotations


def check_count(named: str, value: object, *, least: int = 1, what: str = "a count") -> None:
    """Check a whole number; True and False are none.

    Args:
        named: the setting, as a message names it.
        value: what was given.
        least: the smallest that may be.
        what: what it is, with its unit if it has one.

    Raises:
        ValueError: it is not a whole number, or too small.

    Example:
        >>> check_count("`batch_size`", True)
        Traceback (most recent call last):
        ValueError: `batch_size` is a count and must be at least 1, got True.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{named} is {what} and must be at least {least}, got {value!r}.")
