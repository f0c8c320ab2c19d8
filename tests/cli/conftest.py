"""A scratch folder with a configuration of the toy, and the command line in this process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from digenrl.cli import main
from digenrl.engines import InlineEngine, LocalEngine
from tests.cli.commands import TOY, Digenrl, Result


@pytest.fixture
def folder(restored_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with `toy.yaml`, and leave the process as it was."""
    (tmp_path / "toy.yaml").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def digenrl(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Digenrl:
    """Run a command."""
    workers: list[str] = []
    for engine in (InlineEngine, LocalEngine):
        start = engine.start

        def noted(self, worker, factory, *, env=None, start=start):  # type: ignore[no-untyped-def]
            workers.append(worker)
            start(self, worker, factory, env=env)

        monkeypatch.setattr(engine, "start", noted)

    def run(*words: str) -> Result:
        capsys.readouterr()
        workers.clear()
        code = main(words)
        out, err = capsys.readouterr()
        assert not logging.getLogger("digenrl").handlers
        return Result(code, out, err.splitlines(), list(workers))

    return run
