"""The server behind `HTTPReward`; `digenrl serve-reward` runs it. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import anyio.to_thread
import torch
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from digenrl.rewards.remote.connection import is_loopback
from digenrl.rewards.remote.wire import (
    PROTOCOL,
    WireError,
    decode_media,
    decode_prompts,
    encode_answer,
    served_name,
)
from digenrl.rewards.reward import (
    JoinedReward,
    Reward,
    RewardTraits,
    check_prompts,
    reward_attribute,
    reward_name,
    set_up_reward,
)
from digenrl.rewards.scoring import ErrorPolicy, score_samples
from digenrl.types import PromptBatch

log = logging.getLogger(__name__)

_MODALITIES = {"image": "[B, C, H, W]", "video": "[B, F, C, H, W]"}
_ONCE = ErrorPolicy(on_error="drop_group", num_retries=0)  # who asks decides what is done about a failure
_GRACE_S = 10  # for requests that are answered when the server is told to stop
_KEEP_ALIVE_S = 75  # longer than clients keep a connection, so that none is closed while a request is on its way


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Sample(_Model):
    """One sample to score; equal `group_id`s are samples of one prompt that are compared with each other."""

    prompt: str
    metadata: dict[str, Any] = Field({}, description="The other columns of the prompt's row.")
    uid: int | None = Field(None, description="Row of the prompt in its data set; null is the sample's place here.")
    group_id: int | None = Field(None, description="null is the sample's place here.")
    sample_index: int = Field(0, description="Which sample of its prompt it is.")
    seed: int = Field(0, description="Of the sample's noise.")


class NpzMedia(_Model):
    """All media in one array: nothing is rounded."""

    encoding: Literal["npz"]
    data: str = Field(
        description="base64 of a npz file with one array `media`, [B, C, H, W] or [B, F, C, H, W], of floats in "
        "[0, 1]. Arrays of objects are refused with 415."
    )
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = Field(
        "float32", description="What the reward is given; bfloat16 is sent as float32."
    )


class PngMedia(_Model):
    """A PNG file per image, 8 bits of gray or RGB: level v is v / 255."""

    encoding: Literal["png"]
    images: list[str] | list[list[str]] = Field(
        description="base64 of B files of one size, or, of videos, B lists of equally many frames."
    )


class ScoreRequest(_Model):
    """Samples to score."""

    protocol: Literal[1] = 1
    step: int = Field(0, description="The training step that made the samples.")
    samples: list[Sample] = Field(min_length=1)
    media: NpzMedia | PngMedia = Field(discriminator="encoding")


class Failure(_Model):
    """A sample that there is no reward for."""

    row: int
    reason: str = Field(description='Such as "returned nan" or "raised ValueError: ...".')


class ScoreAnswer(_Model):
    """What the samples are worth."""

    rewards: list[float | None] = Field(description="One per sample, in the request's order; null if it has failed.")
    failures: list[Failure] = Field(description="Why, for each null.")


class Health(_Model):
    """What is served."""

    protocol: int
    reward: str = Field(description="Short name or dotted path of the reward.")
    requires: list[str] = Field(description="Metadata columns that every sample must have.")
    groupwise: bool = Field(description="Whether a request must hold whole groups.")
    modalities: list[str] = Field(description='"image", "video"; empty if the reward does not say.')
    max_request_mb: int = Field(description="Largest request, and largest media once unpacked, in 2**20 bytes.")

    @property
    def max_bytes(self) -> int:
        """The same in bytes."""
        return self.max_request_mb * 2**20


class Problem(_Model):
    """Why there is no answer, on one line."""

    error: str


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "Not text, or nested too deeply."},
    401: {"model": Problem, "description": "No token, or a wrong one."},
    413: {"model": Problem, "description": "The request, or the media once unpacked, is too large."},
    415: {"model": Problem, "description": "Not JSON, or pickled data."},
    422: {"model": Problem, "description": "Not as described here."},
}


def describe(reward: Reward, *, max_request_mb: int) -> Health:
    """Say what clients are told of a reward.

    Raises:
        ValueError: an attribute of it that is not what it should be.
    """
    traits = RewardTraits.of(reward)
    modalities = reward_attribute(reward, "modalities", ())
    modalities = [modalities] if isinstance(modalities, str) else list(modalities)
    if any(modality not in _MODALITIES for modality in modalities):
        raise ValueError(
            f"`modalities` of reward `{reward_name(reward)}` must be of {' and '.join(_MODALITIES)}, got {modalities}."
        )
    return Health(
        protocol=PROTOCOL,
        reward=served_name(reward),
        requires=list(traits.requires),
        groupwise=traits.groupwise,
        modalities=modalities,
        max_request_mb=max_request_mb,
    )


def make_app(reward: Reward, health: Health, *, device: torch.device, token: str | None) -> FastAPI:
    """Make the application that serves one reward.

    Args:
        reward: what to serve; whoever runs the application sets it up before.
        health: what clients are told of it.
        device: where media are put for it.
        token: what clients must send; None lets everybody in.
    """
    app = FastAPI(
        title="digenrl reward server",
        version=str(PROTOCOL),
        description="Scores samples for `digenrl.rewards.HTTPReward`.",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        dependencies=[Depends(HTTPBearer(auto_error=False))],  # says in the description what _Gate checks
    )
    one_at_a_time = asyncio.Lock()

    @app.get("/health", summary="Say what is served", responses={401: _PROBLEMS[401]})
    async def get_health() -> Health:
        return health

    @app.post("/score", summary="Score samples, one request at a time", responses=_PROBLEMS)
    async def post_score(asked: ScoreRequest, request: Request) -> ScoreAnswer:
        work = partial(_score, reward, health, asked, device)
        async with one_at_a_time:
            if await request.is_disconnected():  # a client that waited too long has given up
                raise HTTPException(408, "the client has gone")
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)

    app.add_middleware(_Gate, token=token, max_bytes=health.max_bytes)
    app.add_exception_handler(WireError, _say_wire_error)
    app.add_exception_handler(HTTPException, _say_http_error)
    app.add_exception_handler(RequestValidationError, _say_validation_error)
    app.add_exception_handler(Exception, _say_bug)
    return app


def openapi() -> dict[str, Any]:
    """Describe the protocol, which is the same for all rewards: what `docs/rewards_openapi.json` holds."""

    def some_reward(media: torch.Tensor, prompts: PromptBatch) -> torch.Tensor:
        return media.flatten(1).mean(1)

    health = describe(some_reward, max_request_mb=1)
    return make_app(some_reward, health, device=torch.device("cpu"), token=None).openapi()


@torch.no_grad()
def _score(reward: Reward, health: Health, asked: ScoreRequest, device: torch.device) -> ScoreAnswer:
    prompts = decode_prompts([sample.model_dump() for sample in asked.samples], asked.step)
    media = decode_media(asked.media.model_dump(), max_bytes=health.max_bytes)
    if len(media) != len(prompts):
        raise WireError(f"there must be media for each of {len(prompts)} samples, got {len(media)}")
    _check_modality(media, health)
    try:
        check_prompts(reward, prompts.prompts, name="samples")
    except ValueError as error:
        raise WireError(str(error)) from error
    batch = score_samples(reward, media.to(device), prompts, _ONCE)
    if batch.failures:
        log.warning("%s (%d of %d samples).", batch.failures[0], len(batch.failures), len(prompts))
    return ScoreAnswer.model_validate(encode_answer(batch))


def _check_modality(media: torch.Tensor, health: Health) -> None:
    """Refuse media that the reward does not judge, instead of letting it fail over their shape."""
    modality = "video" if media.ndim == 5 else "image"
    if health.modalities and modality not in health.modalities:
        judged, *_ = health.modalities
        raise WireError(
            f"{health.reward} judges media of {judged}s, {_MODALITIES[judged]}, got {modality}s, {list(media.shape)}"
        )


class _Gate:
    """Lets requests in by token, type and size, before anything of them is read."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_bytes: int) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["method"], Headers(scope=scope))
        except HTTPException as error:
            await _problem(error.status_code, error.detail)(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check(self, method: str, headers: Headers) -> None:
        given = headers.get("authorization", "").encode()
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise HTTPException(401, "a token is required, as `Authorization: Bearer TOKEN`")
        if method != "POST":
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"a request must be application/json, got {kind or 'no content type'!r}")
        size = headers.get("content-length", "0")
        if size.isdecimal() and int(size) > self._max_bytes:
            raise HTTPException(413, self._too_large)

    @property
    def _too_large(self) -> str:
        return f"a request may have {self._max_bytes // 2**20} MB; start the server with a larger `--max-request-mb`"

    def _limited(self, receive: Receive) -> Receive:
        """Count a body whose length is not given, or not true."""
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return receive_limited


def _problem(status: int, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": message}, status, headers=headers)


async def _say_wire_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WireError)
    return _problem(error.status, str(error))


async def _say_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, error.detail)


async def _say_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return _problem(422, f"`{where}`: {first['msg']}" if where else first["msg"])


async def _say_bug(request: Request, error: Exception) -> JSONResponse:
    return _problem(500, f"the server has failed: {type(error).__name__}; see its log")


class RewardServer:
    """Serves one reward; `bind`, then `run`.

    Example:
        >>> def bright(media, prompts): return media.flatten(1).mean(1)
        >>> server = RewardServer(bright, port=0)
        >>> server.bind()
        >>> server.url.startswith("http://127.0.0.1:")
        True
        >>> server.close()
    """

    def __init__(
        self,
        reward: Reward,
        *,
        host: str = "127.0.0.1",
        port: int,
        token: str | None = None,
        max_request_mb: int = 512,
        device: torch.device | None = None,
    ) -> None:
        """Say what is served where.

        Args:
            reward: one that is not set up.
            host: address to listen at; others than this machine's own need a token.
            port: 0 takes a free one.
            token: what clients must send.
            max_request_mb: largest request, and largest media once unpacked, in 2**20 bytes.
            device: where the reward computes; None is the CPU.

        Raises:
            ValueError: several rewards, or an address that others reach and no token.
        """
        if isinstance(reward, JoinedReward):
            raise ValueError(
                f"`reward` must give one number per sample, {reward_name(reward)} gives {len(reward.names)}; serve "
                "single rewards, each at a port of its own."
            )
        if token is None and not is_loopback(host):
            raise ValueError(f"`host` {host} is reached by other machines: a token is required, give `token_env`.")
        self.health = describe(reward, max_request_mb=max_request_mb)
        self._reward = reward
        self.host = host
        self.port = port
        self.device = device or torch.device("cpu")
        app = make_app(reward, self.health, device=self.device, token=token)
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._socket: socket.socket | None = None

    def bind(self) -> None:
        """Take the port.

        Raises:
            OSError: it is taken, or the host is not one of this machine's.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        # A server that is started again must not wait for the connections of the one before.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
        except OSError:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where clients find it."""
        assert self._socket is not None
        port = self._socket.getsockname()[1]
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def set_up(self) -> None:
        """Let the reward load what it needs.

        Raises:
            RewardError: it could not.
        """
        set_up_reward(self._reward, self.device)

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` or, in the main thread, a signal; calls `on_ready` when clients are let in."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        self._server.on_ready = on_ready
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Finish the requests at hand and stop; from any thread."""
        self._server.should_exit = True

    def close(self) -> None:
        """Let go of the port."""
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """Says when it is ready."""

    on_ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()
