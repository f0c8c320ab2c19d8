"""Columns of a prompt file that policies read: images, a video, a negative prompt."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from digenrl.types import PROMPT_FIELDS, Prompt

log = logging.getLogger(__name__)

_CUTOFF = 0.8  # `imgae` is as near to `image` as that; `image_path` is not and may be anything


def read_fields(prompts: Sequence[Prompt], places: Sequence[str], folder: Path) -> list[Prompt]:
    """Check the columns that policies read, and turn paths of media, relative to `folder`, into absolute ones.

    Where a line has a `negative_prompt`, those without one get None, which is the policy's own: so all rows that ever
    are in one batch have the column, or none has.

    Args:
        prompts: as the lines have them.
        places: file and number of each line, for messages.
        folder: of the file.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: a value that is not what it should be.
    """
    read = [
        replace(prompt, metadata=_read_row(prompt.metadata, folder, where))
        for prompt, where in zip(prompts, places, strict=True)
    ]
    _point_out_typos(read, places)
    if any("negative_prompt" in prompt.metadata for prompt in read):
        read = [replace(prompt, metadata={"negative_prompt": None, **prompt.metadata}) for prompt in read]
    return read


def _read_row(row: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    read = dict(row)
    if "image" in row and "images" in row:
        raise ValueError(f"{where}: `image` and `images` are two ways to say the same: give one of them.")
    for column in ("image", "video"):
        if column in row:
            read[column] = _find(column, row[column], folder, where)
    if "images" in row:
        paths = row["images"]
        if not isinstance(paths, list) or not paths:
            raise ValueError(f"{where}: `images` must be a list of at least one path, got {_shown(paths)}.")
        read["images"] = [_find("images", path, folder, where) for path in paths]
    if "negative_prompt" in row and not isinstance(row["negative_prompt"], str):
        raise ValueError(
            f"{where}: `negative_prompt` must be a text, got {_shown(row['negative_prompt'])}; leave it out for the "
            "policy's own."
        )
    return read


def _find(column: str, value: Any, folder: Path, where: str) -> str:
    """Give the absolute path of a file that is there."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: `{column}` must hold paths of files, got {_shown(value)}.")
    path = folder.absolute() / value
    if not path.is_file():
        raise FileNotFoundError(
            f"{where}: `{column}`: there is no file `{value}`; paths are relative to {folder.absolute()}."
        )
    return str(path)


def _point_out_typos(prompts: Sequence[Prompt], places: Sequence[str]) -> None:
    seen: set[str] = set(PROMPT_FIELDS)
    for prompt, where in zip(prompts, places, strict=True):
        for column in prompt.metadata.keys() - seen:
            seen.add(column)
            close = difflib.get_close_matches(column.lower().replace("-", "_"), PROMPT_FIELDS, n=1, cutoff=_CUTOFF)
            if close:
                log.warning(
                    "%s: only rewards see the column `%s`; did you mean `%s`, which policies read?",
                    where,
                    column,
                    close[0],
                )


def _shown(value: Any) -> str:
    return repr(value)[:80]
