"""Questions about images to a chat model behind an OpenAI-compatible server."""

from __future__ import annotations

import base64
import email.utils
import io
import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
from PIL import Image

from digenrl.rewards.judge.answers import Candidates
from digenrl.rewards.remote.wire import is_loopback
from digenrl.rewards.reward import RewardError, shortened

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

DEFAULT_PORT = 8000
"""vLLM's own."""
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}/v1"

NUM_CANDIDATES = 20
"""Tokens whose log-probability is asked for: the most that vLLM, as it is set, and OpenAI give."""

_BUSY = (429, 500, 502, 503, 504)
"""Status codes that may be another one at the next try."""
_MAX_MESSAGE_CHARS = 200

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 4.0
"""Before the second try, and before later ones; each wait is about twice as long as the one before."""


_jitter = random.SystemRandom()


@dataclass(frozen=True)
class Question:
    """What a model is asked about a sample, and what it may answer."""

    text: str
    images: tuple[Image.Image, ...]
    choices: tuple[str, ...]
    system: str = ""
    begun: str = ""
    """What the answer has begun with; `choices` are then how it may go on."""

    def messages(self) -> list[dict[str, Any]]:
        """Write it as OpenAI's chat messages: images first, so that questions about one image begin alike."""
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": _data_uri(image)}} for image in self.images
        ]
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": self.text}]})
        return [*messages, {"role": "assistant", "content": self.begun}] if self.begun else messages

    def go_on(self, begun: str, rest: str) -> Question:
        """Ask whether an answer that has begun with `begun` goes on with `rest` or ends."""
        return replace(self, begun=begun, choices=(rest, ""))


class Chat(Protocol):
    """A chat model that can be asked."""

    def setup(self, device: torch.device) -> None:
        """Find or load the model.

        Raises:
            RewardError: it is not there.
        """
        ...

    def ask(self, questions: Sequence[Question]) -> list[Candidates | Exception]:
        """Give the likeliest first tokens of the answer to each question, or why there is none."""
        ...

    def close(self) -> None:
        """Let go of connections or of the model."""
        ...


@dataclass
class ChatServer:
    """A chat model behind a server; connections are kept and used again."""

    model: str
    url: str
    """Base of the API, such as `http://127.0.0.1:8000/v1`."""
    api_key_env: str | None
    """Environment variable that holds the key."""
    concurrency: int
    """Most requests at a time."""
    timeout_s: float
    """Most seconds that a request may take; one that took longer is not repeated."""
    connect_timeout_s: float
    """Most seconds to connect, and to be told at setup what is served."""
    retry_timeout_s: float
    """How many seconds a request is repeated, after its first failure, to a server that is busy or away."""
    structured_outputs: bool
    """Whether the server is told to answer with a choice."""
    seed: int
    extra_body: Mapping[str, Any]
    """Further fields of each request."""
    _client: httpx.Client | None = field(default=None, repr=False)
    _is_in_trouble: bool = False

    def __post_init__(self) -> None:
        """Check the settings, by the names that rewards have for them.

        Raises:
            ValueError: one is outside its bounds, or the variable of the key is not set.
        """
        self.url = _checked_url(self.url)
        if self.api_key_env is not None:
            read_api_key(self.api_key_env)
        if not isinstance(self.concurrency, int) or self.concurrency < 1:
            raise ValueError(f"`concurrency` is a count and must be at least 1, got {self.concurrency!r}.")
        for setting in ("timeout_s", "connect_timeout_s"):
            if not getattr(self, setting) > 0:
                raise ValueError(f"`{setting}` is in seconds and must be above 0, got {getattr(self, setting)!r}.")
        if not self.retry_timeout_s >= 0:
            raise ValueError(f"`retry_timeout_s` is in seconds and must be at least 0, got {self.retry_timeout_s!r}.")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connections out of a copy for a worker."""
        return {**self.__dict__, "_client": None}

    def setup(self, device: torch.device) -> None:
        """Look whether the server is there and serves the model.

        Raises:
            RewardError: not within `connect_timeout_s`, or other models only.
        """
        import httpx

        try:
            response = self._open().get("models", timeout=self.connect_timeout_s)
        except httpx.TransportError as error:
            self.close()
            raise RewardError(self._absent(error)) from error
        try:
            self._check_served(response)
        except RewardError:
            self.close()
            raise

    def ask(self, questions: Sequence[Question]) -> list[Candidates | Exception]:
        """Ask all questions, at most `concurrency` at a time, and give an exception where there is no answer."""
        self._open()
        answers: list[Candidates | Exception] = [RewardError(f"{self.url}: not asked.")] * len(questions)
        rows = iter(range(len(questions)))  # one iterator for all threads: each row goes to one of them

        def work() -> None:
            for row in rows:
                answers[row] = self._ask(questions[row])

        # Daemons, so that an interrupted run does not wait for answers before it ends.
        threads = [threading.Thread(target=work, daemon=True) for _ in questions[: self.concurrency]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def close(self) -> None:
        """Close all connections; the next question opens new ones."""
        if self._client is not None:
            self._client.close()
        self._client = None

    def _open(self) -> httpx.Client:
        if self._client is None:
            import httpx

            self._client = httpx.Client(
                base_url=self.url,
                headers=self._headers(),
                timeout=httpx.Timeout(self.timeout_s, connect=self.connect_timeout_s),
                limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
                trust_env=not is_loopback(self._host),  # proxies are for other machines
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        return {} if self.api_key_env is None else {"Authorization": f"Bearer {read_api_key(self.api_key_env)}"}

    @property
    def _host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def _check_served(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            raise RewardError(self._refused(response))
        try:
            served = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f"{self.url}: status {response.status_code} and no list of models; `url` must be the base of an "
                f"OpenAI-compatible API, such as {DEFAULT_URL}."
            ) from error
        if self.model not in served:
            raise RewardError(
                f"{self.url}: it does not serve {self.model}; set `model` to what it serves: "
                f"{', '.join(served) or 'nothing'}."
            )

    def _ask(self, question: Question) -> Candidates | Exception:
        try:
            return self._candidates(self._send(self._body(question)))
        except Exception as error:  # of this sample alone
            return error

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": question.messages(),
            "temperature": 0,
            "seed": self.seed,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": NUM_CANDIDATES,
        }
        if question.begun:
            body.update(add_generation_prompt=False, continue_final_message=True)
        if self.structured_outputs:
            body["structured_outputs"] = {"choice": list(question.choices)}
        return {**body, **self.extra_body}

    def _send(self, body: Mapping[str, Any]) -> httpx.Response:
        import httpx

        client = self._open()
        deadline_s, wait_s = None, _FIRST_WAIT_S
        while True:
            asked_wait_s, cause = 0.0, None
            try:
                response = client.post("chat/completions", json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise RewardError(
                    f"{self.url}: no answer within `timeout_s` {self.timeout_s:g}; raise it, or set a smaller "
                    "`concurrency` or `max_side`."
                ) from error
            except httpx.TransportError as error:
                problem, cause = self._absent(error), error
            else:
                if response.status_code == 200:
                    self._is_in_trouble = False
                    return response
                problem = self._refused(response)
                if response.status_code not in _BUSY:
                    raise RewardError(problem)
                asked_wait_s = _retry_after_s(response)
            now_s = time.monotonic()
            deadline_s = now_s + self.retry_timeout_s if deadline_s is None else deadline_s
            # Clients of one server must not all come back at once; the module's own generator belongs to the run.
            pause_s = max(asked_wait_s, wait_s * _jitter.uniform(0.5, 1.0))
            if now_s + pause_s > deadline_s:
                raise RewardError(f"{problem} Gave up after `retry_timeout_s` {self.retry_timeout_s:g}.") from cause
            if not self._is_in_trouble:  # said once, not by each of many requests
                self._is_in_trouble = True
                log.warning("%s Asking again for up to %g s.", problem, self.retry_timeout_s)
            time.sleep(pause_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _candidates(self, response: httpx.Response) -> Candidates:
        try:
            answer = response.json()["choices"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RewardError(f"{self.url}: not a chat completion: {shortened(response.text)}.") from error
        try:
            return [(str(entry["token"]), float(entry["logprob"])) for entry in _top_logprobs(answer)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RewardError(
                f"{self.url}: an answer without log-probabilities; the server must give `logprobs` with "
                f"{NUM_CANDIDATES} `top_logprobs`, as vLLM does."
            ) from error

    def _refused(self, response: httpx.Response) -> str:
        problem = f"{self.url}: refused with status {response.status_code}: {_message_of(response)}"
        remedy = ""
        if response.status_code in (401, 403):
            remedy = "; `api_key_env` must name an environment variable with the server's key"
        elif "structured_outputs" in problem:
            remedy = "; set `structured_outputs` to false for a server that does not know it"
        elif "continue_final_message" in problem or "add_generation_prompt" in problem:
            remedy = "; let `scale` end below 10 for a server that cannot go on with an answer"
        elif "image" in problem and "At most" in problem:
            remedy = "; set a smaller `num_frames`, or start the server with a larger `--max-images`"
        return f"{problem}{remedy}."

    def _absent(self, error: Exception) -> str:
        return f"{self.url}: there is no server ({str(error) or type(error).__name__}); start it with `{self.command}`."

    @property
    def command(self) -> str:
        """What starts the server."""
        words = ["digenrl serve-judge --model", self.model, "--port", str(urlsplit(self.url).port or DEFAULT_PORT)]
        if not is_loopback(self._host):
            words += ["--host", self._host, "--api-key-env", self.api_key_env or "VARIABLE"]
        return " ".join(words)


def _checked_url(url: str) -> str:
    """Give the base of an API without a slash at its end.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(url)
    try:
        has_host = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        has_host = False
    if parts.scheme not in ("http", "https") or not has_host or parts.query or parts.fragment:
        raise ValueError(f"`url` must be the base of an OpenAI-compatible API, such as {DEFAULT_URL}, got {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise ValueError("`url` must not hold a password, which messages would show; give a key by `api_key_env`.")
    return url.rstrip("/")


def read_api_key(variable: str) -> str:
    """Read a server's key from an environment variable.

    Raises:
        ValueError: it is not set, or no key.
    """
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"`api_key_env` must name an environment variable that holds the key, {variable} is not set.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"`api_key_env` must name a key of ASCII characters without spaces, {variable} holds others.")
    return key


def _top_logprobs(answer: Any) -> list[Any]:
    entries = answer["logprobs"]["content"][0]["top_logprobs"]
    if not isinstance(entries, list) or not entries:
        raise ValueError("empty")
    return entries


def _data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)  # lossless at any level; higher ones take longer than sending
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _retry_after_s(response: httpx.Response) -> float:
    """Give the seconds that a server asks to wait, as a number or as a date; 0 if it does not."""
    text = response.headers.get("Retry-After", "").strip()
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _message_of(response: httpx.Response) -> str:
    """Give what a refusal says; servers put it in different places."""
    try:
        content = response.json()
    except ValueError:
        content = response.text
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    text = " ".join(str(content).split()).rstrip(".") or response.reason_phrase
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."
