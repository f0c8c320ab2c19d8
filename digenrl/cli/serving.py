"""What the commands that serve have in common."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from digenrl.cli.errors import UsageError, show


def read_secret_for(host: str, variable: str | None, *, option: str) -> str | None:
    """Read what clients must send; hosts that other machines reach need it.

    Args:
        host: where is served.
        variable: environment variable that holds it, None if there is none.
        option: that names the variable.

    Raises:
        UsageError: it is needed, not set, or cannot be sent.
    """
    from digenrl.rewards.remote.connection import is_loopback, read_secret  # these need torch

    if variable is None:
        if not is_loopback(host):
            raise UsageError(f"`{option}` is needed to serve beyond this machine, `--host` is {host}.")
        return None
    try:
        return read_secret(variable, setting=option)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_count(flags: Mapping[str, str], name: str, default: int, *, least: int = 1, most: int = 10**6) -> int:
    """Read a whole number.

    Raises:
        UsageError: it is none, or outside its bounds.
    """
    text = flags.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        option = name.replace("_", "-")
        raise UsageError(f"`--{option}` must be a whole number from {least} to {most}, got {show(text)}.")
    return int(text)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Give SIGINT and SIGTERM as they are received, instead of what they do otherwise."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
