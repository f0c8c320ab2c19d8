"""What constructors raise for wrong input, said in one line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from digenrl.cli.errors import Keys, one_line
from digenrl.cli.sources import Source, locate

INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError, MisconfigurationException)
"""What constructors, and the checks before workers start, raise for wrong input."""

_SAYS_ALL = (ValueError, FileNotFoundError, MisconfigurationException)
"""Those of them whose message is meant for users; others need the line that raised them."""


def say_input_error(error: Exception, config: Mapping[str, Any], sources: Sequence[Source], *, name: str = "") -> str:
    """Put ahead where the setting that a message names was given, or else the class that raised it."""
    message = one_line(error)
    if not isinstance(error, _SAYS_ALL):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {message} ({frame.filename}:{frame.lineno})"
    settings = list(_settings_in(config, ()))
    for named in re.findall(r"`(\w+)\b[^`]*`", message):
        found = [keys for keys in settings if keys[-1] == named]
        if len(found) == 1:
            return f"{locate(found[0], sources)}{message}"
    return f"{name}: {message}" if name else message


def _settings_in(node: Mapping[str, Any], keys: Keys) -> Iterator[Keys]:
    """Give all settings, those of classes without their `init_args`."""
    for key, value in node.items():
        inner = keys if key in ("init_args", "dict_kwargs") else (*keys, key)
        if inner is not keys:
            yield inner
        items = {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else value
        if isinstance(items, dict):
            yield from _settings_in(items, inner)
