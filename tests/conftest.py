"""What tests of all parts share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the process as it was before a command ran in it, the working folder apart."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a run makes of it
        monkeypatch.delenv(name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
