"""Packages that only some rewards need."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, *, reward: str, extra: str) -> Any:
    """Import a package that an extra of this one installs; call it in `setup`, so that others do without it.

    Args:
        module: what to import.
        reward: who needs it, for the message.
        extra: what installs it.

    Raises:
        ImportError: it, or a package it needs, is not installed; the message names that one and the extra. Other errors
            on import, such as of a missing shared library, come through as they are.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"reward {reward} needs the package {error.name or module}; install it with "
            f"`pip install 'digenrl[{extra}]'`"
        ) from error
