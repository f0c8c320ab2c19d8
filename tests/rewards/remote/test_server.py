"""The server's side: whom it lets in, what it refuses, and what it says of itself."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.rewards import SeveralRewards
from digenrl.rewards.remote.server import RewardServer, openapi
from digenrl.rewards.remote.wire import encode_request
from digenrl.types import Prompt, PromptBatch
from tests.rewards.remote.served import ServerThread, served
from tests.toy import level_reward

ROOT = Path(__file__).parents[3]
JSON = {"Content-Type": "application/json"}
PROMPTS = PromptBatch.for_step([Prompt("low", 0), Prompt("top", 1)], step=0, group_size=2, seed=0)
MEDIA = torch.rand(4, 1, 2, 4, generator=torch.Generator().manual_seed(0))
REQUEST = json.loads(encode_request(MEDIA, PROMPTS, "npz"))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with served(level_reward, max_request_mb=1) as running:
        yield running


@pytest.fixture
def client(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as opened:
        yield opened


def problem_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status
    assert list(response.json()) == ["error"]
    message: str = response.json()["error"]
    assert "\n" not in message
    return message


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


def test_the_description_in_the_documentation_is_the_servers_own(client: httpx.Client) -> None:
    written = json.loads((ROOT / "docs" / "rewards_openapi.json").read_text())
    how = "write docs/rewards_openapi.json anew from json.dumps(openapi(), indent=2)"
    assert written == openapi() == client.get("/openapi.json").json(), how


def test_a_request_with_what_is_required_only_is_scored(client: httpx.Client) -> None:
    request = {"samples": [{"prompt": text} for text in PROMPTS.texts], "media": {**REQUEST["media"]}}
    answer = client.post("/score", json=request)
    assert answer.json() == {"rewards": level_reward(MEDIA, PROMPTS).tolist(), "failures": []}


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/python-pickle", "text/plain", ""])
def test_a_pickled_body_gets_415_and_executes_nothing(client: httpx.Client, tmp_path: Path, kind: str) -> None:
    body = pickle.dumps(Trap(tmp_path / "ran"))
    answer = client.post("/score", content=body, headers={"Content-Type": kind})
    assert "must be application/json" in problem_of(answer, 415)
    assert problem_of(client.post("/score", content=body, headers=JSON), 400)
    assert not (tmp_path / "ran").exists()


def test_pickled_media_get_415_and_execute_nothing(client: httpx.Client, tmp_path: Path) -> None:
    array = np.empty((4, 1, 2, 4), dtype=object)
    array[:] = Trap(tmp_path / "ran")
    buffer = io.BytesIO()
    np.savez(buffer, media=array)
    media = {"encoding": "npz", "data": base64.b64encode(buffer.getvalue()).decode()}
    assert "pickled data is refused" in problem_of(client.post("/score", json={**REQUEST, "media": media}), 415)
    assert not (tmp_path / "ran").exists()


def test_a_request_that_is_too_large_gets_413_whether_or_not_it_says_so(client: httpx.Client) -> None:
    pieces = [b" " * 2**16] * 17
    headers = {**JSON, "Content-Length": str(2**16 * 17)}
    for answer in (
        client.post("/score", content=iter(pieces), headers=headers),
        client.post("/score", content=iter(pieces), headers=JSON),
    ):
        assert "start the server with a larger `--max-request-mb`" in problem_of(answer, 413)


def test_media_that_unpack_to_too_much_get_413(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, media=np.zeros((4, 1, 512, 513), np.float32))
    media = {"encoding": "npz", "data": base64.b64encode(buffer.getvalue()).decode()}
    assert "too large" in problem_of(client.post("/score", json={**REQUEST, "media": media}), 413)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": []}, "`samples`: List should have at least 1 item"),
        ({"samples": REQUEST["samples"][:3]}, "there must be media for each of 3 samples, got 4"),
        ({"samples": [{"prompt": 1}] * 4}, "`samples.0.prompt`: Input should be a valid string"),
        ({"samples": [{"prompt": "low", "uid": "0"}] * 4}, "`samples.0.uid`: Input should be a valid integer"),
        ({"samples": [{"text": "low"}] * 4}, "`samples.0.prompt`: Field required"),
        ({"protocol": 2}, "`protocol`: Input should be 1"),
        ({"media": {"encoding": "jpeg", "data": ""}}, "`media`: .*'npz', 'png'"),
        ({"media": {"encoding": "npz", "data": "AAAA"}}, "must be an npz with an array `media`"),
        ({"more": 1}, "`more`: Extra inputs are not permitted"),
    ],
)
def test_a_malformed_request_gets_422_and_one_line(client: httpx.Client, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem_of(client.post("/score", json={**REQUEST, **changes}), 422))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 10_000])
def test_what_is_no_json_object_gets_422_or_400(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/score", content=body, headers=JSON)
    assert problem_of(answer, answer.status_code)
    assert answer.status_code in (400, 422)


def test_other_paths_and_methods_are_refused_in_json(client: httpx.Client) -> None:
    assert problem_of(client.get("/"), 404) == "Not Found"
    assert problem_of(client.get("/docs"), 404) == "Not Found"
    assert problem_of(client.get("/score"), 405) == "Method Not Allowed"


@pytest.mark.parametrize("path", ["/health", "/score", "/openapi.json", "/nothing"])
def test_no_path_is_open_without_the_token(path: str, token_server: ServerThread) -> None:
    with httpx.Client(base_url=token_server.url, trust_env=False) as client:
        for given in (None, "", "Bearer", "Bearer wrong", "Bearer secre", "Bearer secret2", "Basic secret", "secret"):
            headers = {} if given is None else {"Authorization": given}
            answer = client.request("POST" if path == "/score" else "GET", path, headers=headers)
            assert "a token is required" in problem_of(answer, 401)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert client.get("/health", headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.fixture(scope="module")
def token_server() -> Iterator[ServerThread]:
    with served(level_reward, token="secret") as running:
        yield running


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "rewards.example"])
def test_a_host_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ValueError, match=f"`host` {host} is reached by other machines: a token is required"):
        RewardServer(level_reward, host=host, port=0)
    RewardServer(level_reward, host=host, port=0, token="secret")


def test_several_rewards_are_not_served_as_one() -> None:
    with pytest.raises(ValueError, match="`reward` must give one number per sample, SeveralRewards gives 2"):
        RewardServer(SeveralRewards([level_reward, test_several_rewards_are_not_served_as_one]), port=0)


@pytest.mark.parametrize(("modalities", "said"), [("video", ["video"]), (["image"], ["image"]), (None, [])])
def test_what_a_reward_judges_is_said(modalities: Any, said: list[str]) -> None:
    def judge(media: Tensor, prompts: PromptBatch) -> Tensor:
        return media.flatten(1).mean(1)

    if modalities is not None:
        judge.modalities = modalities  # type: ignore[attr-defined]
    assert RewardServer(partial(judge), port=0).health.modalities == said
    judge.modalities = ("images",)  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"`modalities` of reward `judge` must be of image and video, got \['images'\]."
    ):
        RewardServer(judge, port=0)


def test_health_answers_while_samples_are_scored_one_request_at_a_time() -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def patient(media: Tensor, prompts: PromptBatch) -> Tensor:
        begun.release()
        release.wait()
        return level_reward(media, prompts)

    with (
        served(patient) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        answers = [pool.submit(client.post, "/score", json=REQUEST) for _ in range(2)]
        try:
            assert begun.acquire(timeout=60)
            while running.num_requests < 2:
                assert not any(answer.done() for answer in answers)
            assert client.get("/health").status_code == 200
            assert not begun.acquire(timeout=0.1), "a second request is scored beside the first"
        finally:
            release.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_a_request_that_says_it_is_too_large_is_refused_before_it_is_sent(server: ServerThread) -> None:
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {2**20 + 1}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
