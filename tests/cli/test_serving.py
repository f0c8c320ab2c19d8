from __future__ import annotations

import os
import signal

import pytest

from digenrl.cli.errors import UsageError
from digenrl.cli.serving import noted_signals, read_count, read_secret_for


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine_alone_needs_no_secret(host: str) -> None:
    assert read_secret_for(host, None, option="--key-env") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu7"])
def test_hosts_that_others_reach_need_a_secret(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    with pytest.raises(UsageError, match=f"^`--key-env` is needed to serve beyond this machine, `--host` is {host}.$"):
        read_secret_for(host, None, option="--key-env")
    monkeypatch.setenv("KEY", "sesame")
    assert read_secret_for(host, "KEY", option="--key-env") == "sesame"


@pytest.mark.parametrize(("value", "message"), [("", "KEY is not set"), ("open sesame", "KEY holds others")])
def test_a_secret_that_cannot_be_sent_is_one_line_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("KEY", value)
    with pytest.raises(UsageError, match=f"^`--key-env` must name .*, {message}.$") as info:
        read_secret_for("127.0.0.1", "KEY", option="--key-env")
    assert "sesame" not in str(info.value)


def test_a_count_is_read_within_its_bounds() -> None:
    assert read_count({}, "max_images", 8) == 8
    assert read_count({"port": "0"}, "port", 8, least=0) == 0
    for text in ("0", "101", "1.0", "-1", "²", ""):
        with pytest.raises(UsageError, match=f"^`--max-images` must be a whole number from 1 to 100, got '{text}'.$"):
            read_count({"max_images": text}, "max_images", 8, most=100)


def test_signals_are_noted_and_then_do_again_what_they_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert set(received) == {signal.SIGTERM, signal.SIGINT}
    assert signal.getsignal(signal.SIGTERM) is before
