"""What rewards that ask a server have in common: its address, its secret, and when to ask again."""

from __future__ import annotations

import email.utils
import ipaddress
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from digenrl.rewards.reward import RewardError

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 4.0
_MAX_MESSAGE_CHARS = 300

_jitter = random.SystemRandom()
"""The generator of the module `random` belongs to the run."""


class StillFailing(Exception):
    """A server was busy or away for as long as a request is repeated."""

    def __init__(self, failure: httpx.Response | httpx.TransportError) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """The last one."""


class Outage:
    """Tells when a server begins to fail and when it is back: once each, however many requests there are.

    It is back with the first answer while no request is repeated: one that is overloaded refuses some for as long as it
    answers others. Requests may be those of several threads.

    Example:
        >>> outage = Outage()
        >>> outage.begins("a"), outage.begins("b"), outage.begins("a")
        (True, False, False)
        >>> outage.ends("a"), outage.ends("b"), outage.ends("c")
        (False, True, False)
    """

    def __init__(self) -> None:
        """Begin with a server that answers."""
        self._lock = threading.Lock()
        self._repeated: set[object] = set()
        self._lasts = False

    def __reduce__(self) -> tuple[type[Outage], tuple[()]]:
        """Give how a copy is made: it has seen no failure."""
        return Outage, ()

    def begins(self, request: object) -> bool:
        """Note that a request fails and will be repeated; True if none was before."""
        with self._lock:
            self._repeated.add(request)
            is_news, self._lasts = not self._lasts, True
            return is_news

    def ends(self, request: object) -> bool:
        """Note that a request is answered; True if that shows that the server is back."""
        with self._lock:
            self._repeated.discard(request)
            is_news = self._lasts and not self._repeated
            self._lasts = self._lasts and not is_news
            return is_news

    def forget(self, request: object) -> None:
        """Note that a request is not repeated any more, answered or not."""
        with self._lock:
            self._repeated.discard(request)


@dataclass(kw_only=True)
class Connection:
    """Asks one server; connections are kept and used again, and a copy for a worker opens its own."""

    url: str
    """Base of all requests."""
    meant: str
    """What `url` must be."""
    start: str
    """Command that starts the server, without what says where."""
    default_port: int
    """Of that command."""
    secret_env: str | None
    """Environment variable with what lets a client in."""
    secret_setting: str
    """The setting that names it."""
    timeout_s: float
    """Most seconds that a request may take; one that took longer has failed and is not repeated here."""
    lighter: str
    """Settings that make a request take less."""
    connect_timeout_s: float
    """Most seconds to connect, and to be told at setup what is served."""
    retry_timeout_s: float
    """How many seconds a request is repeated, after its first failure, to a server that is busy or away."""
    max_connections: int = 100
    _client: httpx.Client | None = field(default=None, init=False, repr=False)
    _outage: Outage = field(default_factory=Outage, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the settings, by the names that rewards have for them.

        Raises:
            ValueError: one is outside its bounds, or the variable of the secret is not set.
        """
        self.url = checked_url(self.url, meant=self.meant, secret_setting=self.secret_setting)
        if self.secret_env is not None:
            read_secret(self.secret_env, setting=self.secret_setting)
        for setting in ("timeout_s", "connect_timeout_s"):
            if not getattr(self, setting) > 0:
                raise ValueError(
                    f"`{setting}` is a time in seconds and must be above 0, got {getattr(self, setting)!r}."
                )
        if not self.retry_timeout_s >= 0:
            raise ValueError(
                f"`retry_timeout_s` is a time in seconds and must be at least 0, got {self.retry_timeout_s!r}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connections, which hold the secret, out of a copy for a worker."""
        return {**self.__dict__, "_client": None}

    def open(self) -> httpx.Client:
        """Give what sends requests; it connects when it is first used."""
        if self._client is None:
            import httpx

            secret = None if self.secret_env is None else read_secret(self.secret_env, setting=self.secret_setting)
            self._client = httpx.Client(
                base_url=self.url,
                headers={} if secret is None else {"Authorization": f"Bearer {secret}"},
                timeout=httpx.Timeout(self.timeout_s, connect=self.connect_timeout_s),
                limits=httpx.Limits(
                    max_connections=self.max_connections, max_keepalive_connections=self.max_connections
                ),
                trust_env=not is_loopback(self._host),  # proxies are for other machines
            )
        return self._client

    def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        if self._client is not None:
            self._client.close()
        self._client = None

    def look(self, path: str) -> httpx.Response:
        """Ask the server once what it is.

        Raises:
            RewardError: there is no answer within `connect_timeout_s`; the message has the remedy.
        """
        import httpx

        try:
            return self.open().get(path, timeout=self.connect_timeout_s)
        except httpx.ReadTimeout as error:
            self.close()
            raise RewardError(
                f"{self.url}: connected, and no answer within `connect_timeout_s` {self.connect_timeout_s:g}; see the "
                "server's log, raise it, or correct `url`."
            ) from error
        except httpx.TransportError as error:
            self.close()
            raise RewardError(f"{self.absent(error)}, or correct `url`.") from error

    def ask(
        self,
        send: Callable[[httpx.Client], httpx.Response],
        describe: Callable[[httpx.Response | httpx.TransportError], str],
    ) -> httpx.Response:
        """Send a request, again while the server is busy (429, 5xx) or away; both its going and its return are logged.

        Args:
            send: sends it, alike each time.
            describe: says, for the log, what has failed; without a period.

        Returns:
            an answer or a refusal.

        Raises:
            RewardError: it took longer than `timeout_s`.
            StillFailing: `retry_timeout_s` are over.
        """
        backoff, request = Backoff(self.retry_timeout_s), object()
        try:
            while True:
                answer = self._send(send)
                if not isinstance(answer, Exception) and not _is_failure(answer):
                    if self._outage.ends(request):
                        log.warning("%s: it answers again.", self.url)
                    return answer
                asked_s = 0.0 if isinstance(answer, Exception) else retry_after_s(answer.headers.get("Retry-After", ""))
                pause_s = backoff.pause_s(time.monotonic(), asked_s=asked_s)
                if pause_s is None:
                    raise StillFailing(answer) from (answer if isinstance(answer, Exception) else None)
                if self._outage.begins(request):
                    log.warning("%s; asking again for up to %g s.", describe(answer), self.retry_timeout_s)
                time.sleep(pause_s)
        finally:
            self._outage.forget(request)

    def absent(self, error: Exception) -> str:
        """Say, without a period, that nobody answers, and what starts the server."""
        return f"{self.url}: there is no server ({describe(error)}); start it with `{self.command}`"

    def _send(self, send: Callable[[httpx.Client], httpx.Response]) -> httpx.Response | httpx.TransportError:
        """Send a request once, and give what came of it."""
        import httpx

        try:
            return send(self.open())
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise RewardError(
                f"{self.url}: no answer within `timeout_s` {self.timeout_s:g}; raise it, or set a smaller "
                f"{self.lighter}."
            ) from error
        except httpx.TransportError as error:
            return error

    @property
    def command(self) -> str:
        """What starts the server."""
        is_local = is_loopback(self._host)
        words = [self.start, "--port", str(urlsplit(self.url).port or self.default_port)]
        if not is_local:
            words += ["--host", self._host]
        if self.secret_env is not None or not is_local:
            words += [f"--{self.secret_setting.replace('_', '-')}", self.secret_env or "VARIABLE"]
        return " ".join(words)

    @property
    def _host(self) -> str:
        return urlsplit(self.url).hostname or ""


def _is_failure(answer: httpx.Response) -> bool:
    """Tell whether the same request may be answered later."""
    return answer.status_code == 429 or answer.status_code >= 500


def describe(error: Exception) -> str:
    """Say what went wrong on the way to a server."""
    return str(error) or type(error).__name__


def message_of(response: httpx.Response) -> str:
    """Give what a refusal says, on one line without a period; servers put it in different places."""
    try:
        content = response.json()
    except ValueError:
        content = response.text
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    text = " ".join(str(content).split()).rstrip(".") or response.reason_phrase
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."


def checked_url(url: str, *, meant: str, secret_setting: str) -> str:
    """Give a server's address without a slash at its end.

    Raises:
        ValueError: it is not what is `meant`, or holds a password, for which there is `secret_setting`.
    """
    parts = urlsplit(url)
    try:
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        has_host = False
    if parts.scheme not in ("http", "https") or not has_host or parts.query or parts.fragment:
        raise ValueError(f"`url` must be {meant}, got {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"`url` must not hold a password, which messages would show; `{secret_setting}` names a variable with it."
        )
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
