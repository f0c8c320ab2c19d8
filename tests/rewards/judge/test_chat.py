"""Servers that fail, and what is left of it."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from PIL import Image

from digenrl.rewards import RewardError
from digenrl.rewards.judge.answers import Candidates
from digenrl.rewards.judge.chat import ChatServer, Question
from tests.rewards.judge.fake_chat_server import HANG, FakeChatServer, Fault, refusal

GREY = Image.new("RGB", (4, 4), (51, 51, 51))
QUESTION = Question("Is it bright?", (GREY,), ("Yes", "No"))
CPU = torch.device("cpu")


@pytest.fixture
def server() -> Iterator[FakeChatServer]:
    fake = FakeChatServer()
    yield fake
    fake.close()


@pytest.fixture
def chat_at() -> Iterator[Callable[..., ChatServer]]:
    made: list[ChatServer] = []

    def make(url: str, **settings: Any) -> ChatServer:
        defaults: dict[str, Any] = {
            **{"model": "judge", "api_key_env": None, "concurrency": 4, "timeout_s": 60.0, "connect_timeout_s": 60.0},
            **{"retry_timeout_s": 60.0, "structured_outputs": True, "seed": 0, "extra_body": {}},
        }
        made.append(ChatServer(url=url, **{**defaults, **settings}))
        return made[-1]

    yield make
    for chat in made:
        chat.close()


class Waits:
    """Notes how long requests wait for their next try, and waits no time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.meanwhile()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    noted = Waits()
    monkeypatch.setattr(
        "digenrl.rewards.remote.connection.time", SimpleNamespace(sleep=noted, monotonic=time.monotonic, time=time.time)
    )
    return noted


def ask(chat: ChatServer) -> Candidates:
    (answer,) = chat.ask([QUESTION])
    if isinstance(answer, Exception):
        raise answer
    return answer


def message(chat: ChatServer) -> str:
    (answer,) = chat.ask([QUESTION])
    assert isinstance(answer, RewardError), answer
    assert "\n" not in str(answer)
    return str(answer)


def test_a_question_is_a_chat_with_images_that_wants_log_probabilities_of_one_token(
    server: FakeChatServer, chat_at: Any
) -> None:
    chat = chat_at(server.url, seed=7, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    chat.ask([Question("Is it?", (GREY, GREY), ("Yes", "No"), system="Be strict.")])
    body = dict(server.asked[0].body)
    system, user = body.pop("messages")
    assert system == {"role": "system", "content": "Be strict."}
    assert [part["type"] for part in user["content"]] == ["image_url", "image_url", "text"]
    assert server.asked[0].images[1].tobytes() == GREY.tobytes()
    assert body == {
        **{"model": "judge", "temperature": 0, "seed": 7, "max_tokens": 1, "logprobs": True, "top_logprobs": 20},
        **{"structured_outputs": {"choice": ["Yes", "No"]}, "chat_template_kwargs": {"enable_thinking": False}},
    }


def test_going_on_with_an_answer_offers_its_rest_and_its_end(server: FakeChatServer, chat_at: Any) -> None:
    chat_at(server.url).ask([QUESTION.go_on("1", "0")])
    body = server.asked[0].body
    assert body["messages"][-1] == {"role": "assistant", "content": "1"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["structured_outputs"] == {"choice": ["0", ""]}


def test_no_structured_outputs_are_asked_of_a_server_without(server: FakeChatServer, chat_at: Any) -> None:
    ask(chat_at(server.url, structured_outputs=False))
    assert "structured_outputs" not in server.asked[0].body


@pytest.mark.parametrize(
    "fault", [refusal(429, "slow down"), *(Fault(status) for status in (500, 502, 503, 504)), Fault(cut=True)]
)
def test_a_server_that_is_busy_or_breaks_off_is_asked_again(
    server: FakeChatServer, chat_at: Any, waits: Waits, fault: Fault
) -> None:
    server.faults = [fault] * 2
    chat = chat_at(server.url)
    assert len(ask(chat)) == 4
    assert len(server.asked) == 3
    assert 0.125 <= waits.seconds[0] <= 0.25 <= waits.seconds[1] <= 0.5


def test_waits_grow_to_four_seconds_and_are_random_without_the_runs_generator(
    server: FakeChatServer, chat_at: Any, waits: Waits
) -> None:
    server.faults = [Fault(503)] * 40
    state = random.getstate()
    chat = chat_at(server.url)
    ask(chat)
    assert all(2.0 <= seconds <= 4.0 for seconds in waits.seconds[4:])
    assert len({*waits.seconds[4:]}) > 1
    assert random.getstate() == state


def test_a_server_that_stays_out_of_order_is_given_up_with_its_words(server: FakeChatServer, chat_at: Any) -> None:
    server.fault_of = lambda asked: refusal(500, "out of memory")
    said = message(chat_at(server.url, retry_timeout_s=0.0))
    assert said == (f"{server.url}: refused with status 500: out of memory. Gave up after `retry_timeout_s` 0.")
    assert len(server.asked) == 1


def test_a_server_says_how_long_to_wait(server: FakeChatServer, chat_at: Any, waits: Waits) -> None:
    at = formatdate(time.time() + 30, usegmt=True)
    server.faults = [refusal(429, "later", **{"Retry-After": "7"}), refusal(503, "later", **{"Retry-After": at})]
    chat = chat_at(server.url)
    ask(chat)
    assert waits.seconds[0] == 7.0
    assert 20.0 < waits.seconds[1] <= 30.0


def test_a_wait_beyond_the_retry_timeout_is_not_begun(server: FakeChatServer, chat_at: Any, waits: Waits) -> None:
    server.faults = [refusal(429, "quota used up", **{"Retry-After": "3600"})]
    chat = chat_at(server.url)
    assert "429: quota used up. Gave up after `retry_timeout_s` 60." in message(chat)
    assert waits.seconds == []


def test_an_outage_and_its_end_are_said_once_for_all_requests(
    server: FakeChatServer, chat_at: Any, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    all_asked = threading.Barrier(4)
    first_try = iter(range(4))
    waits.meanwhile = lambda: all_asked.wait(30) and None if next(first_try, None) is not None else None
    server.faults = [refusal(503, "loading")] * 6
    assert len(chat_at(server.url, concurrency=4).ask([QUESTION] * 16)) == 16
    assert [record.getMessage() for record in caplog.records] == [
        f"{server.url}: refused with status 503: loading; asking again for up to 60 s.",
        f"{server.url}: it answers again.",
    ]


def test_a_server_that_comes_back_on_its_port_answers_as_before(
    server: FakeChatServer, chat_at: Any, waits: Waits
) -> None:
    chat = chat_at(server.url)
    before = ask(chat)
    server.close()
    restarted: list[FakeChatServer] = []

    def restart() -> None:
        if len(waits.seconds) == 3:
            restarted.append(FakeChatServer(port=server.port))

    waits.meanwhile = restart
    try:
        assert ask(chat) == before
        assert len(restarted[0].asked) == 1
    finally:
        for fake in restarted:
            fake.close()


def test_a_server_that_is_gone_is_one_line_with_the_command_that_starts_it(
    server: FakeChatServer, chat_at: Any
) -> None:
    chat = chat_at(server.url, retry_timeout_s=0.0)
    ask(chat)
    server.close()
    said = message(chat)
    assert said.startswith(f"{server.url}: there is no server (")
    assert f"start it with `digenrl serve-judge --model judge --port {server.port}`." in said


def test_a_command_for_another_machine_has_its_host_and_key(chat_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "abc")
    chat = chat_at("http://gpu7:9000/v1", api_key_env="JUDGE_KEY")
    assert (
        chat.connection.command == "digenrl serve-judge --model judge --port 9000 --host gpu7 --api-key-env JUDGE_KEY"
    )


def test_a_server_that_hangs_is_left_after_the_timeout_and_not_asked_again(
    server: FakeChatServer, chat_at: Any
) -> None:
    server.faults = [HANG]
    assert "no answer within `timeout_s` 0.2; raise it" in message(chat_at(server.url, timeout_s=0.2))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(body='{"choices": [{"logprobs": {"conten'), 'not a chat completion: \'{"choices": '),
        (Fault(body='{"choices": []}'), "not a chat completion"),
        (Fault(body="[]"), "not a chat completion"),
        (Fault(body='{"choices": [{"message": {"content": "7"}}]}'), "without log-probabilities; the server must give"),
        (Fault(body='{"choices": [{"logprobs": null}]}'), "without log-probabilities"),
        (Fault(body='{"choices": [{"logprobs": {"content": []}}]}'), "without log-probabilities"),
        (Fault(body='{"choices": [{"logprobs": {"content": [{"top_logprobs": []}]}}]}'), "without log-probabilities"),
        (refusal(400, "unknown field structured_outputs"), "set `structured_outputs` to false"),
        (refusal(422, "continue_final_message is not allowed"), "let `scale` end below 10"),
        (refusal(400, "At most 1 image(s) may be provided."), "set a smaller `num_frames`"),
        (refusal(401, "who are you"), "401: who are you; `api_key_env` must name"),
        (refusal(404, "no such model."), "refused with status 404: no such model."),
        (Fault(400, '{"detail": "bad"}'), "refused with status 400: bad."),
        (Fault(302, "moved", {"Location": "/elsewhere"}), "refused with status 302: moved."),
    ],
)
def test_what_is_no_answer_is_one_line_with_the_remedy_and_is_not_asked_again(
    server: FakeChatServer, chat_at: Any, fault: Fault, said: str
) -> None:
    server.faults = [fault]
    assert said in message(chat_at(server.url))
    assert len(server.asked) == 1


def test_requests_run_side_by_side_up_to_the_limit_over_connections_that_are_kept(
    server: FakeChatServer, chat_at: Any
) -> None:
    together = threading.Barrier(4)  # of no use to fewer than four at a time
    server.entered = lambda: together.wait(30) and None
    chat = chat_at(server.url, concurrency=4)
    for _ in range(2):
        assert not [answer for answer in chat.ask([QUESTION] * 16) if isinstance(answer, Exception)]
    assert server.most_at_once == 4
    assert server.num_connections == 4


def test_setup_finds_the_model(server: FakeChatServer, chat_at: Any) -> None:
    chat_at(server.url + "/").setup(CPU)


def test_a_model_that_is_not_served_is_one_line_with_those_that_are(server: FakeChatServer, chat_at: Any) -> None:
    server.models = ["small", "large"]
    with pytest.raises(RewardError, match="it does not serve judge; set `model` to what it serves: small, large.$"):
        chat_at(server.url).setup(CPU)


def test_a_server_that_takes_connections_and_stays_silent_is_one_line_at_setup(chat_at: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(RewardError) as info:
            chat_at(url, connect_timeout_s=0.05).setup(CPU)
    assert str(info.value).startswith(f"{url}: connected, and no answer within `connect_timeout_s` 0.05; see the")


def test_an_address_of_something_else_is_one_line(server: FakeChatServer, chat_at: Any) -> None:
    server.models = [None]  # type: ignore[list-item]
    with pytest.raises(RewardError, match="does not serve judge"):
        chat_at(server.url).setup(CPU)


def test_the_key_of_the_named_variable_is_sent(
    server: FakeChatServer, chat_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "abc")
    chat = chat_at(server.url, api_key_env="JUDGE_KEY")
    ask(chat)
    assert server.asked[0].headers["Authorization"] == "Bearer abc"
    assert b"abc" not in cloudpickle.dumps(chat)


def test_proxies_are_not_asked_about_this_machine(
    server: FakeChatServer, chat_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert len(ask(chat_at(server.url))) == 4


def test_a_copy_for_a_worker_opens_connections_of_its_own(server: FakeChatServer, chat_at: Any) -> None:
    chat = chat_at(server.url)
    ask(chat)
    copy = cloudpickle.loads(cloudpickle.dumps(chat))
    try:
        assert ask(copy) == ask(chat)
        assert server.num_connections == 2
    finally:
        copy.close()


def test_it_can_be_asked_again_after_it_was_closed(server: FakeChatServer, chat_at: Any) -> None:
    chat = chat_at(server.url)
    ask(chat)
    chat.close()
    ask(chat)
    assert server.num_connections == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "127.0.0.1:8000"}, "`url` must be the base of an OpenAI-compatible API"),
        ({"url": "http://"}, "`url` must be the base"),
        ({"url": "http://host:port/v1"}, "`url` must be the base"),
        ({"url": "http://me:hunter2@host/v1"}, "`url` must not hold a password"),
        ({"concurrency": 0}, "`concurrency` is a count and must be at least 1, got 0"),
        ({"timeout_s": 0.0}, "`timeout_s` is a time in seconds and must be above 0, got 0.0"),
        ({"connect_timeout_s": float("nan")}, "`connect_timeout_s` is a time in seconds and must be above 0, got nan"),
        ({"retry_timeout_s": -1.0}, "`retry_timeout_s` is a time in seconds and must be at least 0, got -1.0"),
        ({"api_key_env": "NOT_SET_AT_ALL"}, "`api_key_env` must name .* NOT_SET_AT_ALL is not set"),
    ],
)
def test_settings_outside_their_bounds_are_refused(chat_at: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as info:
        chat_at(**{"url": "http://127.0.0.1:1/v1", **settings})
    assert "hunter2" not in str(info.value)
