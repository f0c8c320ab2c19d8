"""A reward that a server computes, so that it may live in an environment, or on a machine, of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from digenrl.rewards.remote.connection import Connection, StillFailing, describe, message_of
from digenrl.rewards.remote.wire import (
    DEFAULT_PORT,
    PROTOCOL,
    Encoding,
    WireError,
    check_metadata,
    decode_answer,
    decode_object,
    encode_request,
)
from digenrl.rewards.reward import RewardError
from digenrl.types import Prompt, PromptBatch

if TYPE_CHECKING:
    import httpx

_PIECE_BYTES = 2**18


class HTTPReward:
    """Asks a server that `digenrl serve-reward` runs, or any that speaks its protocol (`docs/rewards_openapi.json`).

    Scores are those of the reward in this process, bit by bit with the encoding `"npz"` where the server computes alike
    (device, versions, threads). Connections are kept; a server that is gone for a moment is asked again until
    `retry_timeout_s` is over, so that one that is restarted does not end a run.

    Example:
        >>> HTTPReward("http://127.0.0.1:8200", "OCRReward", requires=["text"]).name
        'OCRReward'
    """

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    needs: ClassVar[str] = "a server, `digenrl serve-reward --reward NAME`"
    extra: ClassVar[str | None] = None

    def __init__(
        self,
        url: str,
        reward: str | None = None,
        *,
        name: str | None = None,
        requires: Sequence[str] = (),
        groupwise: bool = False,
        batch_size: int | None = None,
        encoding: Encoding = "npz",
        token_env: str | None = None,
        connect_timeout_s: float = 5.0,
        timeout_s: float = 120.0,
        retry_timeout_s: float = 60.0,
    ) -> None:
        """Say where the server is and what to expect of it; nothing is sent before `setup`.

        Args:
            url: of the server, such as `http://127.0.0.1:8200`.
            reward: what the server must serve, as its `--reward`; None takes whatever it serves.
            name: in metrics and messages; None is that of `reward`.
            requires: metadata columns that the reward needs; all prompts are checked for them before anything is
                generated, and `setup` checks that none is left out here.
            groupwise: whether the reward compares the samples of a prompt; `setup` checks it.
            batch_size: most samples in a request; None is as many as there are to score.
            encoding: of media on their way: `"npz"` keeps every bit, `"png"` rounds to 8 bits and is much smaller.
            token_env: name of the environment variable that holds the server's token.
            connect_timeout_s: most seconds to connect.
            timeout_s: most seconds that a request may take. One that took longer has failed and is not repeated here,
                but the module asks again as its `on_reward_error` says, by default twice: a server that hangs is waited
                for `(1 + reward_retries) * timeout_s` per request, with `drop_group` the last time per sample.
            retry_timeout_s: how many seconds a request is repeated, after its first failure, if there is no connection
                or the server is overloaded (429) or fails (5xx); 0 never repeats one.

        Raises:
            ValueError: a setting outside its bounds.
        """
        if encoding not in ("npz", "png"):
            raise ValueError(f"`encoding` must be npz or png, got {encoding!r}.")
        self.connection = Connection(
            url=url,
            meant=f"that of a server, such as http://127.0.0.1:{DEFAULT_PORT}",
            start=f"digenrl serve-reward --reward {reward or 'NAME'}",
            default_port=DEFAULT_PORT,
            secret_env=token_env,
            secret_setting="token_env",
            timeout_s=timeout_s,
            lighter="`batch_size`",
            connect_timeout_s=connect_timeout_s,
            retry_timeout_s=retry_timeout_s,
        )
        self.url = self.connection.url
        self.reward = reward
        self.name = name or (reward or type(self).__name__).rpartition(".")[2]
        self.requires = (requires,) if isinstance(requires, str) else tuple(requires)
        self.groupwise = groupwise
        self.batch_size = batch_size
        self.encoding: Encoding = encoding
        self._max_request_bytes: int | None = None

    def setup(self, device: torch.device) -> None:
        """See that the server is there, serves what is expected and lets this client in.

        Raises:
            RewardError: it does not; the message has the remedy.
        """
        self._check_server(self._content_of(self.connection.look("health")))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that all metadata can be sent.

        Raises:
            ValueError: a value that is not JSON.
        """
        check_metadata(prompts)

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
        """Ask the server about B samples.

        Args:
            media: [B, (F), C, H, W] in [0, 1].
            prompts: of B rows.

        Returns:
            [B] numbers, an exception in place of one that the server has no reward for.

        Raises:
            RewardError: no answer, or none that can be used; the message has the URL and the remedy.
            ValueError: media or metadata that cannot be sent.
        """
        if self._max_request_bytes is None:
            self.setup(media.device)
            assert self._max_request_bytes is not None
        body = encode_request(media, prompts, self.encoding)
        if len(body) > self._max_request_bytes:
            needed_mb = -(-len(body) // 2**20)
            raise RewardError(
                f"{self.url}: a request of {len(prompts)} samples has {needed_mb} MB, the server takes "
                f"{self._max_request_bytes // 2**20}; set a smaller `batch_size`, `encoding` png, or start it with "
                f"`--max-request-mb {needed_mb}`."
            )
        content = self._content_of(self._post(body))
        try:
            return decode_answer(content, len(prompts), url=self.url)
        except WireError as error:
            raise RewardError(f"{self.url}: not an answer of a reward server: {error}; correct `url`.") from error

    def _post(self, body: bytes) -> httpx.Response:
        """Send a request, again if that may help."""
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        try:
            return self.connection.ask(
                lambda client: client.post("score", content=_pieces(body), headers=headers), self._describe
            )
        except StillFailing as error:
            raise RewardError(
                f"{self.url}: no reward for `retry_timeout_s` {self.connection.retry_timeout_s:g} "
                f"({_describe(error.failure)}); see the server's log, or start it again with "
                f"`{self.connection.command}`."
            ) from error

    def _describe(self, failure: httpx.Response | httpx.TransportError) -> str:
        return f"reward `{self.name}`: {self.url}: {_describe(failure)}"

    def _content_of(self, response: httpx.Response) -> bytes:
        """Give what a good response holds."""
        if response.status_code == 200:
            return response.content
        message = message_of(response)
        if response.status_code == 401:
            variable = self.connection.secret_env
            token = "no token" if variable is None else f"the token in {variable}"
            remedy = f"`token_env` must name a variable with the server's token; {token} was sent"
        elif response.status_code == 404:
            remedy = "`url` must be that of a reward server"
        else:
            remedy = "the request is not repeated, as it would be refused again"
        raise RewardError(f"{self.url}: refused with status {response.status_code}: {message}; {remedy}.")

    def _check_server(self, content: bytes) -> None:
        """Compare what the server says of itself with what is expected."""
        try:
            health = decode_object(content)
            protocol, served = health["protocol"], str(health["reward"])
            requires, groupwise = [str(column) for column in health["requires"]], bool(health["groupwise"])
            max_request_mb = int(health["max_request_mb"])
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise RewardError(f"{self.url}: no reward server answers there: {error}; correct `url`.") from error
        if protocol != PROTOCOL:
            raise RewardError(
                f"{self.url}: it speaks version {protocol} of the protocol, this client {PROTOCOL}; use one version of "
                "digenrl at both ends."
            )
        if self.reward is not None and served.rpartition(".")[2] != self.reward.rpartition(".")[2]:
            raise RewardError(
                f"{self.url}: it serves {served} and not {self.reward}; correct `url` or `reward`, or start "
                f"`{self.connection.command}`."
            )
        missing = [column for column in requires if column not in self.requires]
        if missing:
            raise RewardError(
                f"{self.url}: {served} needs metadata columns; set `requires: [{', '.join(requires)}]`, got "
                f"{list(self.requires)}."
            )
        if groupwise and not self.groupwise:
            raise RewardError(f"{self.url}: {served} compares the samples of a prompt; set `groupwise: true`.")
        self._max_request_bytes = max_request_mb * 2**20


def _pieces(body: bytes) -> Iterator[bytes]:
    """Cut a body: of one that is given whole, httpcore copies the rest each time that a part was sent."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def _describe(failure: httpx.Response | httpx.TransportError) -> str:
    if isinstance(failure, Exception):
        return describe(failure)
    return f"status {failure.status_code}: {message_of(failure)}"
