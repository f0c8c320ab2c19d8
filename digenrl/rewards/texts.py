"""Texts that an image should show: where a prompt says them, and how alike two are."""

from __future__ import annotations

import re
import unicodedata

_DOUBLE = re.compile(r'"([^"]*)"|“([^“”]*)”')
# A single quote between two letters or digits is an apostrophe, and so is one after a letter with none open (dogs').
_SINGLE = re.compile(r"(?<!\w)'((?:[^']|(?<=\w)'(?=\w))+)'(?!\w)|(?<!\w)‘((?:[^‘’]|(?<=\w)’(?=\w))+)’(?!\w)")
_PLAIN_QUOTES = str.maketrans("‘’“”", "''\"\"")


def quoted_text(prompt: str) -> str:
    """Give the one text that a prompt has in quotes.

    Double quotes, "..." or “...”, count first; only a prompt without any is searched for single ones, '...' or ‘...’.

    Raises:
        ValueError: it has none or several, an empty one, or a double quote without its other half.

    Example:
        >>> quoted_text('''the baker's sign says "OPEN"''')
        'OPEN'
        >>> quoted_text("the baker's sign says 'don't knock'")
        "don't knock"
    """
    pattern = _DOUBLE if any(quote in prompt for quote in '"“”') else _SINGLE
    texts = [match[1] or match[2] or "" for match in pattern.finditer(prompt)]
    if len(texts) != 1:
        raise ValueError(f'the prompt must have one text in quotes, such as "OPEN", got {len(texts) or "none"}')
    if pattern is _DOUBLE and any(quote in pattern.sub("", prompt) for quote in '"“”'):
        raise ValueError("the prompt has a double quote without its other half")
    if not texts[0].strip():
        raise ValueError("the prompt's text in quotes is empty")
    return texts[0]


def folded(text: str, *, case_sensitive: bool, ignore_spaces: bool) -> str:
    """Drop differences between texts that do not count.

    Those of Unicode's compatibility forms (NFKC: a full-width ＆ is a &) and of straight and curly quotes never do.
    Where spaces count, white space at the ends does not, and any run of it is one space.

    Example:
        >>> folded(" Open  24 h", case_sensitive=False, ignore_spaces=True)
        'open24h'
    """
    text = unicodedata.normalize("NFKC", text).translate(_PLAIN_QUOTES)
    text = text if case_sensitive else text.casefold()
    return ("" if ignore_spaces else " ").join(text.split())


def edit_distance(first: str, second: str) -> int:
    """Count the characters to insert, delete or replace to make one text the other (Levenshtein, 1966).

    Example:
        >>> edit_distance("kitten", "sitting")
        3
    """
    distances = list(range(len(second) + 1))  # of the first text's beginning to each beginning of the second
    for row, wanted in enumerate(first, start=1):
        diagonal, distances[0] = distances[0], row
        for column, got in enumerate(second, start=1):
            replaced = diagonal + (wanted != got)
            diagonal = distances[column]
            distances[column] = min(replaced, distances[column] + 1, distances[column - 1] + 1)
    return distances[-1]


def edit_similarity(first: str, second: str) -> float:
    """Give 1 for equal texts and 0 for texts with nothing in common: 1 - distance / length of the longer one.

    Example:
        >>> edit_similarity("open", "oven")
        0.75
    """
    longer = max(len(first), len(second))
    return 1 - edit_distance(first, second) / longer if longer else 1.0
