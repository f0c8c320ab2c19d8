"""What tests of all parts share."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported, here and in all workers. Processors round differently, and what two ways to the same gradient
# differ by is close to the bound of 1e-6 in places: one set of instructions makes a test pass everywhere or nowhere.
if platform.machine() == "x86_64":
    for name, instructions in {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }.items():
        os.environ.setdefault(name, instructions)


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
