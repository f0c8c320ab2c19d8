"""What rewards that ask a server have in common: its address, its secret, and when to ask again."""

from __future__ import annotations

import email.utils
import ipaddress
import os
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_LONGEST_WAIT_S = 4.0

_jitter = random.SystemRandom()
"""The generator of the module `random` belongs to the run."""


def checked_url(url: str, *, example: str) -> str:
    """Give a server's address without a slash at its end.

    Raises:
        ValueError: it is none, or holds a password.
    """
    parts = urlsplit(url)
    try:
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        has_host = False
    if parts.scheme not in ("http", "https") or not has_host or parts.query or parts.fragment:
        raise ValueError(f"`url` must be that of a server, such as {example}, got {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise ValueError("`url` must not hold a password, which messages would show; name a variable that holds it.")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_secret(variable: str, *, setting: str) -> str:
    """Read what lets a client in from an environment variable, which `setting` names.

    Raises:
        ValueError: it is not set, or cannot be sent.
    """
    secret = os.environ.get(variable, "")
    if not secret:
        raise ValueError(f"`{setting}` must name an environment variable with the secret, {variable} is not set.")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ValueError(f"`{setting}` must name a secret of ASCII characters without spaces, {variable} holds others.")
    return secret


@dataclass
class Backoff:
    """Says when a request that has failed is repeated.

    Example:
        >>> backoff = Backoff(timeout_s=10.0)
        >>> 0.125 <= backoff.pause_s(now_s=100.0) <= 0.25
        True
        >>> backoff.pause_s(now_s=111.0) is None
        True
    """

    timeout_s: float
    """From the first failure to the last repetition."""
    first_wait_s: float = 0.25
    """Each next wait is twice as long, up to 4 s; all are shortened by up to a half, by chance."""
    _deadline_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._wait_s = self.first_wait_s

    def pause_s(self, now_s: float, *, asked_s: float = 0.0) -> float | None:
        """Give the seconds to wait after a failure; None if there is no time left.

        Args:
            now_s: of a clock.
            asked_s: how long the server wants one to wait, at least.
        """
        if self._deadline_s is None:
            self._deadline_s = now_s + self.timeout_s
        # Workers that lost one server must not all come back at once.
        pause_s = max(asked_s, self._wait_s * _jitter.uniform(0.5, 1.0))
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        return None if now_s + pause_s > self._deadline_s else pause_s


def retry_after_s(text: str) -> float:
    """Read the header `Retry-After`, a number of seconds or a date; 0 if it is neither."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
