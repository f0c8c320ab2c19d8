"""Questions about images to a chat model behind an OpenAI-compatible server."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from PIL import Image

from digenrl.rewards.counts import check_count
from digenrl.rewards.judge.answers import Candidates
from digenrl.rewards.remote.connection import Connection, StillFailing, message_of
from digenrl.rewards.reward import RewardError, shortened

if TYPE_CHECKING:
    import httpx

DEFAULT_PORT = 8000
"""vLLM's own."""
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}/v1"

NUM_CANDIDATES = 20
"""Tokens whose log-probability is asked for: the most that vLLM, as it is set, and OpenAI give."""


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


class ChatServer:
    """A chat model behind a server."""

    def __init__(
        self,
        model: str,
        *,
        url: str,
        api_key_env: str | None,
        concurrency: int,
        timeout_s: float,
        connect_timeout_s: float,
        retry_timeout_s: float,
        structured_outputs: bool,
        seed: int,
        extra_body: Mapping[str, Any] | None,
    ) -> None:
        """Check the settings, which `VLMJudge` describes.

        Raises:
            ValueError: one is outside its bounds, or the variable of the key is not set.
        """
        check_count("`concurrency`", concurrency)
        self.connection = Connection(
            url=url,
            meant=f"the base of an OpenAI-compatible API, such as {DEFAULT_URL}",
            start=f"digenrl serve-judge --model {model}",
            default_port=DEFAULT_PORT,
            secret_env=api_key_env,
            secret_setting="api_key_env",
            timeout_s=timeout_s,
            lighter="`concurrency` or `max_side`",
            connect_timeout_s=connect_timeout_s,
            retry_timeout_s=retry_timeout_s,
            max_connections=concurrency,
        )
        self.url = self.connection.url
        self.model = model
        self.concurrency = concurrency
        self.structured_outputs = structured_outputs
        self.seed = seed
        self.extra_body = dict(extra_body or {})

    def setup(self, device: torch.device) -> None:
        """Look whether the server is there and serves the model.

        Raises:
            RewardError: not within `connect_timeout_s`, or other models only.
        """
        response = self.connection.look("models")
        try:
            self._check_served(response)
        except RewardError:
            self.close()
            raise

    def ask(self, questions: Sequence[Question]) -> list[Candidates | Exception]:
        """Ask all questions, at most `concurrency` at a time, and give an exception where there is no answer."""
        self.connection.open()
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
        self.connection.close()

    def _check_served(self, response: httpx.Response) -> None:
        if response.status_code in (401, 403):
            raise RewardError(f"{self._refused(response)}.")
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
        try:
            response = self.connection.ask(lambda client: client.post("chat/completions", json=body), self._describe)
        except StillFailing as error:
            retry_timeout_s = self.connection.retry_timeout_s
            raise RewardError(
                f"{self._describe(error.failure)}. Gave up after `retry_timeout_s` {retry_timeout_s:g}."
            ) from error
        if response.status_code != 200:
            raise RewardError(f"{self._refused(response)}.")
        return response

    def _describe(self, failure: httpx.Response | httpx.TransportError) -> str:
        return self.connection.absent(failure) if isinstance(failure, Exception) else self._refused(failure)

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
        problem = f"{self.url}: refused with status {response.status_code}: {message_of(response)}"
        remedy = ""
        if response.status_code in (401, 403):
            remedy = "; `api_key_env` must name an environment variable with the server's key"
        elif "structured_outputs" in problem:
            remedy = "; set `structured_outputs` to false for a server that does not know it"
        elif "continue_final_message" in problem or "add_generation_prompt" in problem:
            remedy = "; let `scale` end below 10 for a server that cannot go on with an answer"
        elif "image" in problem and "At most" in problem:
            remedy = "; set a smaller `num_frames`, or start the server with a larger `--max-images`"
        return f"{problem}{remedy}"


def _top_logprobs(answer: Any) -> list[Any]:
    entries = answer["logprobs"]["content"][0]["top_logprobs"]
    if not isinstance(entries, list) or not entries:
        raise ValueError("empty")
    return entries


def _data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)  # lossless at any level; higher ones take longer than sending
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
