"""The client's side: the same scores as in this process, and what is said when there are none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from digenrl.rewards import ErrorPolicy, Reward, RewardError, RewardTraits, score_samples, set_up_reward
from digenrl.rewards.jpeg import JpegIncompressibility
from digenrl.rewards.remote import connection
from digenrl.rewards.remote.connection import Backoff
from digenrl.rewards.remote.http import HTTPReward
from digenrl.rewards.remote.wire import encode_request
from digenrl.types import Prompt, PromptBatch
from tests.rewards.remote.served import ServerThread, served
from tests.toy import level_reward

CPU = torch.device("cpu")
PROMPTS = PromptBatch.for_step(
    [Prompt("low", 0, metadata={"weight": 1.5}), Prompt("top", 5, metadata={"weight": -0.1})],
    step=3,
    group_size=3,
    seed=0,
)
HEALTH = {"protocol": 1, "reward": "x", "requires": [], "groupwise": False, "modalities": [], "max_request_mb": 1}


def media(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(6, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


class Relative:
    """Compares the samples of a prompt, and reads all that a prompt batch has."""

    groupwise = True
    requires = ("weight",)

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        level = media.double().flatten(1).mean(1)
        groups = torch.tensor(prompts.group_ids)
        mean = torch.stack([level[groups == group].mean() for group in groups])
        noise = torch.tensor([seed % 997 + 10 * prompts.step for seed in prompts.seeds])
        index = torch.tensor(prompts.sample_indices) + torch.tensor([prompt.uid for prompt in prompts.prompts])
        weights = torch.tensor([prompt.metadata["weight"] for prompt in prompts.prompts])
        return weights * (level - mean) + noise + 0.01 * index


def dtype_reward(media: Tensor, prompts: PromptBatch) -> Tensor:
    return media.flatten(1).sum(1) + {torch.bfloat16: 100, torch.float32: 0}[media.dtype]


@contextmanager
def fake_server(*answers: tuple[int, Any], health: Any = HEALTH) -> Iterator[tuple[str, list[bytes]]]:
    """Answer `/score` as told, one after the other, the last one for ever; gives the URL and the bodies that came."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, health)

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(*answers[min(len(bodies), len(answers)) - 1])

        def answer(self, status: int, content: Any) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "Backoff", partial(Backoff, first_wait_s=0.002))


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:  # bound and not listening: refuses, and nobody else gets it
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def scores(reward: Reward, values: Tensor) -> list[float]:
    rewards: list[float] = score_samples(reward, values, PROMPTS, ErrorPolicy()).rewards.tolist()
    return rewards


@pytest.mark.parametrize(
    ("reward", "values"),
    [
        (level_reward, media(1, 4, 5)),
        (Relative(), media(2, 3, 4, 5)),
        (dtype_reward, media(3, 4, 5, dtype=torch.bfloat16)),
        (JpegIncompressibility(batch_size=2), media(3, 16, 16)),
        (JpegIncompressibility(frames="max", num_frames=2), media(3, 3, 16, 16)),
    ],
)
def test_scores_are_those_of_the_reward_in_this_process_bit_by_bit(reward: Reward, values: Tensor) -> None:
    traits = RewardTraits.of(reward)
    with served(reward) as server:
        client = HTTPReward(server.url, requires=traits.requires, groupwise=traits.groupwise)
        set_up_reward(client, CPU)
        assert scores(client, values) == scores(reward, values)


def test_png_gives_the_scores_of_media_rounded_to_eight_bits() -> None:
    values = media(3, 4, 5)
    with served(dtype_reward) as server:
        client = HTTPReward(server.url, encoding="png")
        assert scores(client, values) == scores(dtype_reward, (values * 255).round() / 255)
        assert scores(client, values) != scores(dtype_reward, values)


def test_what_fails_on_the_server_fails_here_sample_by_sample_with_its_reason() -> None:
    def sparse(media: Tensor, prompts: PromptBatch) -> list[Any]:
        return [1.0, float("nan"), None, float("-inf"), 0.25, 0.5]

    with served(sparse) as server:
        policy = ErrorPolicy(on_error="drop_group", num_retries=0)
        batch = score_samples(HTTPReward(server.url), media(1, 2, 2), PROMPTS, policy)
    assert [failure.row for failure in batch.failures] == [1, 2, 3]
    reasons = [failure.reason.removeprefix(f"failed: {server.url}: the reward there ") for failure in batch.failures]
    assert reasons == ["returned nan", "returned None", "returned -inf"]
    assert batch.rewards[[0, 4, 5]].tolist() == [1.0, 0.25, 0.5]


def test_an_error_of_the_served_reward_is_said_with_reward_and_prompt() -> None:
    def buggy(media: Tensor, prompts: PromptBatch) -> Tensor:
        raise KeyError("no such column")

    with served(buggy) as server, pytest.raises(RewardError) as info:
        scores(HTTPReward(server.url, name="mine"), media(1, 2, 2))
    assert str(info.value) == (
        f"reward `mine` failed for 6 of 6 samples, the first for prompt 'low': {server.url}: the reward there failed: "
        "KeyError: 'no such column'."
    )


def test_without_a_server_one_line_has_url_reward_and_the_command_that_starts_it(closed_port: int) -> None:
    reward = HTTPReward(f"http://127.0.0.1:{closed_port}", "OCRReward")
    with pytest.raises(RewardError) as info:
        set_up_reward(reward, CPU)
    message = str(info.value)
    assert "\n" not in message
    assert message.startswith(
        f"reward `OCRReward` cannot be set up: http://127.0.0.1:{closed_port}: there is no server"
    )
    assert f"`digenrl serve-reward --reward OCRReward --port {closed_port}`" in message


def test_a_server_that_takes_connections_and_stays_silent_is_one_line_at_setup() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RewardError) as info:
            set_up_reward(HTTPReward(url, connect_timeout_s=0.05), CPU)
    assert str(info.value) == (
        f"reward `HTTPReward` cannot be set up: {url}: connected, and no answer within `connect_timeout_s` 0.05; see "
        "the server's log, raise it, or correct `url`."
    )


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"url": "http://localhost", "reward": "a.B"}, "--reward a.B --port 8200"),
        ({"url": "http://localhost:1", "token_env": "TOKEN"}, "--reward NAME --port 1 --token-env TOKEN"),
        ({"url": "http://gpu3:81"}, "--reward NAME --port 81 --host gpu3 --token-env VARIABLE"),
    ],
)
def test_the_command_is_one_that_serves_where_the_client_asks(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], command: str
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    assert HTTPReward(**settings).connection.command == f"digenrl serve-reward {command}"


def test_settings_that_do_not_fit_the_served_reward_are_said_at_setup() -> None:
    with served(Relative()) as server:
        for settings, message in (
            ({"reward": "OCRReward"}, rf"it serves {__name__}.Relative and not OCRReward; correct `url`"),
            ({}, r"set `requires: \[weight\]`, got \[\]"),
            ({"requires": "weight"}, "set `groupwise: true`"),
        ):
            with pytest.raises(RewardError, match=message):
                set_up_reward(HTTPReward(server.url, **settings), CPU)  # type: ignore[arg-type]
        set_up_reward(HTTPReward(server.url, "Relative", requires=["weight"], groupwise=True), CPU)


class Judge:
    """Looks at the frames of videos, or at the rows of images."""

    def __init__(self, *modalities: str) -> None:
        self.modalities = modalities

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return media.flatten(1).mean(1)


@pytest.mark.parametrize(
    ("modalities", "shape", "message"),
    [
        (("video",), (1, 2, 2), r"Judge judges media of videos, \[B, F, C, H, W\], got images, \[6, 1, 2, 2\]; "),
        (("image",), (3, 1, 2, 2), r"Judge judges media of images, \[B, C, H, W\], got videos, \[6, 3, 1, 2, 2\]; "),
        (("image", "video"), (3, 1, 2, 2), None),
        ((), (1, 2, 2), None),
    ],
)
def test_media_that_the_served_reward_does_not_judge_are_refused(
    modalities: tuple[str, ...], shape: tuple[int, ...], message: str | None
) -> None:
    with served(Judge(*modalities)) as server:
        reward = HTTPReward(server.url)
        if message is None:
            assert len(scores(reward, media(*shape))) == 6
            return
        with pytest.raises(RewardError, match=f"refused with status 422: .*{message}"):
            scores(reward, media(*shape))


@pytest.mark.parametrize(
    ("health", "message"),
    [
        (b"<html>hello</html>", "no reward server answers there: an answer must be JSON, got b'<html>"),
        ({"status": "ok"}, "no reward server answers there: 'protocol'; correct `url`"),
        ({**HEALTH, "protocol": 2}, "it speaks version 2 of the protocol, this client 1; use one version"),
    ],
)
def test_another_server_at_the_address_is_said_at_setup(health: Any, message: str) -> None:
    with fake_server((200, {}), health=health) as (url, _), pytest.raises(RewardError, match=message):
        set_up_reward(HTTPReward(url), CPU)


def test_a_wrong_token_is_refused_at_setup_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("OTHER", "hunter2")
    with served(level_reward, token="secret") as server:
        for settings, sent in (({}, "no token"), ({"token_env": "OTHER"}, "the token in OTHER")):
            with pytest.raises(RewardError, match=f"status 401: .* with the server's token; {sent} was sent") as info:
                set_up_reward(HTTPReward(server.url, **settings), CPU)  # type: ignore[arg-type]
            assert "hunter2" not in str(info.value)
        assert scores(HTTPReward(server.url, token_env="TOKEN"), media(1, 2, 2))


def test_a_copy_for_a_worker_has_no_connection_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    with served(level_reward, token="hunter2") as server:
        reward = HTTPReward(server.url, token_env="TOKEN")
        expected = scores(reward, media(1, 2, 2))
        pickled = cloudpickle.dumps(reward)
        assert b"hunter2" not in pickled
        assert scores(cloudpickle.loads(pickled), media(1, 2, 2)) == expected


def test_one_connection_serves_many_requests() -> None:
    with served(level_reward) as server:
        reward = HTTPReward(server.url)
        for _ in range(5):
            scores(reward, media(1, 2, 2))
        assert len(server.connections) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_is_overloaded_or_fails_is_asked_the_same_again(status: int) -> None:
    good = (200, {"rewards": [0.5] * 6})
    with fake_server((status, {"error": "busy"}), (status, b"<html>"), good) as (url, bodies):
        assert scores(HTTPReward(url), media(1, 2, 2)) == [0.5] * 6
    assert bodies == [encode_request(media(1, 2, 2), PROMPTS, "npz")] * 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 415, 422])
def test_a_request_that_is_refused_is_not_repeated(status: int) -> None:
    with fake_server((status, {"error": "not this"})) as (url, bodies):
        with pytest.raises(RewardError, match=f"{url}: refused with status {status}: not this; "):
            scores(HTTPReward(url), media(1, 2, 2))
        assert len(bodies) == 1


def test_an_outage_and_its_end_are_said_once_whoever_asks_again(caplog: pytest.LogCaptureFixture) -> None:
    busy, good = (503, {"error": "loading"}), (200, {"rewards": [0.5] * 6})
    with fake_server(*[busy] * 9, good, good, busy, good) as (url, _):
        reward = HTTPReward(url, name="mine", retry_timeout_s=0.02)
        policy = ErrorPolicy(on_error="retry", num_retries=1000, wait_s=0.0)
        for _ in range(3):
            score_samples(reward, media(1, 2, 2), PROMPTS, policy)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("connection")]
    away = f"reward `mine`: {url}: status 503: loading; asking again for up to 0.02 s."
    assert said == [away, f"{url}: it answers again."] * 2


def test_a_server_that_goes_on_failing_is_given_up_after_the_time_that_is_set() -> None:
    with fake_server((503, {"error": "loading"})) as (url, bodies):
        message = rf"{url}: no reward for `retry_timeout_s` 0.05 \(status 503: loading\); .*`digenrl serve-reward"
        with pytest.raises(RewardError, match=message):
            scores(HTTPReward(url, retry_timeout_s=0.05), media(1, 2, 2))
        assert len(bodies) > 1
        bodies.clear()
        with pytest.raises(RewardError, match="no reward for `retry_timeout_s` 0 "):
            scores(HTTPReward(url, retry_timeout_s=0), media(1, 2, 2))
        assert len(bodies) == 1


@pytest.mark.parametrize(
    "answer", [b"<html>", {"rewards": [1.0] * 5}, {"rewards": None}, {"rewards": [1.0] * 6, "failures": [{}]}]
)
def test_an_answer_that_is_none_is_an_error_and_no_reward(answer: Any) -> None:
    with fake_server((200, answer)) as (url, _), pytest.raises(RewardError, match=f"{url}: not an answer of a reward"):
        scores(HTTPReward(url), media(1, 2, 2))


@pytest.mark.parametrize("value", [None, "0.5", [1.0], float("nan"), float("inf")])
def test_a_value_that_is_no_finite_number_is_an_error_and_no_reward(value: Any) -> None:
    answer = (200, {"rewards": [1.0] * 5 + [value]})
    with fake_server(answer) as (url, _), pytest.raises(RewardError, match="returned .* for 1 of 6 samples"):
        scores(HTTPReward(url), media(1, 2, 2))


def test_a_slow_answer_is_given_up_once_and_the_remedy_is_said() -> None:
    release = threading.Event()

    def slow(media: Tensor, prompts: PromptBatch) -> Tensor:
        release.wait()
        return level_reward(media, prompts)

    with served(slow) as server:
        with pytest.raises(RewardError, match="no answer within `timeout_s` 0.05; raise it, or set a smaller"):
            scores(HTTPReward(server.url, timeout_s=0.05, connect_timeout_s=5), media(1, 2, 2))
        release.set()


def test_a_request_that_the_server_would_not_take_is_not_sent() -> None:
    with served(level_reward, max_request_mb=1) as server, pytest.raises(RewardError) as info:
        scores(HTTPReward(server.url), media(3, 256, 256))
    assert "a request of 6 samples has 7 MB, the server takes 1; set a smaller `batch_size`" in str(info.value)
    assert "`--max-request-mb 7`" in str(info.value)


def test_metadata_that_cannot_be_sent_are_said_before_anything_is_generated() -> None:
    with pytest.raises(ValueError, match="column `box` must hold JSON"):
        HTTPReward("http://127.0.0.1:1").check_prompts([Prompt("a", 0, metadata={"box": (1, 2)})])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "127.0.0.1"}, "`url` must be that of a server, such as http://127.0.0.1:8200"),
        ({"encoding": "jpeg"}, "`encoding` must be npz or png, got 'jpeg'"),
        ({"token_env": "NO_SUCH"}, "`token_env` must name an environment variable .*, NO_SUCH is not set"),
        ({"connect_timeout_s": 0}, "`connect_timeout_s` is a time in seconds and must be above 0, got 0"),
        ({"timeout_s": float("nan")}, "`timeout_s` is a time"),
        ({"retry_timeout_s": -1}, "`retry_timeout_s` is a time in seconds and must be at least 0, got -1"),
    ],
)
def test_settings_outside_their_bounds_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HTTPReward(**{"url": "http://127.0.0.1:1", **settings})


def test_rewards_of_two_servers_have_names_of_their_own() -> None:
    names = [HTTPReward("http://a:1", reward).name for reward in ("OCRReward", "mine.bright")]
    assert names == ["OCRReward", "bright"]
    assert HTTPReward("http://a:1").name == "HTTPReward"
    assert HTTPReward("http://a:1", "OCRReward", name="ocr").name == "ocr"


def test_a_server_that_is_gone_and_comes_back_gives_the_same_rewards(caplog: pytest.LogCaptureFixture) -> None:
    expected = scores(level_reward, media(1, 2, 2))
    first = ServerThread(level_reward)
    reward = HTTPReward(first.url)
    assert scores(reward, media(1, 2, 2)) == expected
    first.kill()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(scores(reward, media(1, 2, 2))))
    with caplog.at_level("WARNING"):
        asking.start()
        while "asking again" not in caplog.text:  # the client has found it gone
            asking.join(0.01)
        with served(level_reward, port=first.port):
            asking.join()
    assert answers == [expected]
