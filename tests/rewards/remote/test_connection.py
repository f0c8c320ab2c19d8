from __future__ import annotations

import email.utils
import pickle
import time

import pytest

from digenrl.rewards.remote.connection import Backoff, Outage, checked_url, is_loopback, read_secret, retry_after_s


@pytest.mark.parametrize("url", ["http://127.0.0.1:8200/", "https://rewards.example/ocr"])
def test_an_address_loses_its_last_slash_only(url: str) -> None:
    assert checked_url(url, meant="x", secret_setting="y") == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8200", "ftp://host", "http://", "http://host:port", "http://host:0", "http://host?a=1"]
)
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match="`url` must be that of a server, such as http://here:1, got '"):
        checked_url(url, meant="that of a server, such as http://here:1", secret_setting="y")


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="must not hold a password, .*; `token_env` names a") as info:
        checked_url("http://me:hunter2@host", meant="x", secret_setting="token_env")
    assert "hunter2" not in str(info.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("127.example.com", False), ("", False)),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("value", "message"), [("", "TOKEN is not set"), ("a b", "TOKEN holds others"), ("\u00fc", "TOKEN holds others")]
)
def test_a_secret_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("TOKEN", value)
    with pytest.raises(ValueError, match=f"`token_env` must name .*, {message}"):
        read_secret("TOKEN", setting="token_env")


def test_waits_double_up_to_four_seconds_and_end_with_the_time_that_is_given() -> None:
    backoff, now_s, waits = Backoff(timeout_s=60.0, first_wait_s=0.5), 1000.0, []
    while (pause_s := backoff.pause_s(now_s)) is not None:
        waits.append(pause_s)
        now_s += pause_s
    longest = [0.5, 1.0, 2.0, *[4.0] * (len(waits) - 3)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert len(set(waits)) == len(waits), "workers that lost one server would come back at once"
    assert 56.0 <= now_s - 1000.0 <= 60.0


def test_a_server_that_asks_for_more_time_gets_it_if_there_is_so_much() -> None:
    assert Backoff(timeout_s=10.0).pause_s(0.0, asked_s=7.0) == 7.0
    assert Backoff(timeout_s=10.0).pause_s(0.0, asked_s=11.0) is None
    assert Backoff(timeout_s=0.0).pause_s(0.0) is None


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("3") == 3.0
    date = email.utils.formatdate(time.time() + 3600, usegmt=True)
    assert retry_after_s(date) == pytest.approx(3600, abs=60)
    assert [retry_after_s(text) for text in ("", "soon", "-1")] == [0.0, 0.0, 0.0]


def test_an_outage_lasts_until_an_answer_comes_while_no_request_is_repeated() -> None:
    outage = Outage()
    assert not outage.ends("before")
    assert [outage.begins(request) for request in ("a", "b", "a")] == [True, False, False]
    assert not outage.ends("c")  # an overloaded server answers some
    assert not outage.ends("a")
    outage.forget("b")  # given up, which is no answer
    assert not outage.begins("d")
    assert outage.ends("d")
    assert not outage.ends("e")
    assert outage.begins("f")


def test_a_copy_for_a_worker_has_seen_no_outage() -> None:
    outage = Outage()
    outage.begins("a")
    assert pickle.loads(pickle.dumps(outage)).begins("b")
