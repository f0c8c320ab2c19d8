"""The command that starts vLLM, with a package of that name that serves nothing but its health."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from digenrl.rewards.judge.vlm_judge import VLMJudge
from tests.cli.commands import Digenrl

ROOT = Path(__file__).parents[2]

FAKE_SERVER = """\
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    num_asked = 0
    def do_GET(self):
        Health.num_asked += 1
        is_up = self.path == "/health" and Health.num_asked > 1
        self.send_response(200 if is_up else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

engine = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
notes = {"words": sys.argv[1:], "key": os.environ.get("VLLM_API_KEY"), "pids": [os.getpid(), engine.pid]}
with open(os.environ["FAKE_VLLM_NOTES"], "w") as file:
    json.dump(notes, file)
if "--fail" in sys.argv:
    sys.exit(3)
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
HTTPServer((words["--host"], int(words["--port"])), Health).serve_forever()
"""

Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the package on the path; gives the file with its notes."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(FAKE_SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    monkeypatch.setenv("FAKE_VLLM_NOTES", str(tmp_path / "notes.json"))
    return tmp_path / "notes.json"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(vllm: Path) -> Iterator[Serve]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "digenrl", "serve-judge", "--model", "tiny", *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(60)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def ready(process: subprocess.Popen[str]) -> str:
    """Wait until it serves; gives the YAML it prints."""
    assert process.stdout is not None
    lines: list[str] = []
    while "    url:" not in "".join(lines[-1:]):
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        lines.append(line)
    assert lines[0].startswith("serving ")
    return "".join(lines[2:])


def all_gone(notes: Path) -> bool:
    processes = []
    for pid in json.loads(notes.read_text())["pids"]:
        if psutil.pid_exists(pid):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_it_starts_vllm_with_the_flags_a_judge_needs_and_prints_the_reward(serve: Serve, vllm: Path, port: int) -> None:
    process = serve("--port", str(port), "--served-name", "judge", "--max-images", "4", "--", "--dtype", "float32")
    printed = yaml.safe_load(ready(process))
    assert printed["reward"]["class_path"] == "VLMJudge"
    judge = VLMJudge(**printed["reward"]["init_args"])
    assert judge.model == "judge"
    assert printed["reward"]["init_args"]["url"] == f"http://127.0.0.1:{port}/v1"
    assert json.loads(vllm.read_text())["words"] == [
        *("--model", "tiny", "--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port)),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--max-logprobs", "20", "--dtype", "float32"),
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_vllm_and_all_that_it_has_started(
    serve: Serve, vllm: Path, port: int, number: signal.Signals, code: int
) -> None:
    process = serve("--port", str(port))
    ready(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("error:")) == (code, 0)
    assert all_gone(vllm)


def test_vllm_ends_when_the_command_is_killed(serve: Serve, vllm: Path, port: int) -> None:
    process = serve("--port", str(port))
    ready(process)
    process.kill()
    process.wait()
    server, engine = json.loads(vllm.read_text())["pids"]
    try:
        psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], timeout=30)
        assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE
    finally:
        os.kill(engine, signal.SIGKILL)  # vLLM's own processes look after their parent, this one does not


def test_vllm_that_fails_is_one_line_behind_its_own(serve: Serve, vllm: Path, port: int) -> None:
    process = serve("--port", str(port), "--", "--fail", "1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.splitlines() == [
        "error: vLLM ended with exit code 3 before it answered; what it printed above says why."
    ]
    assert all_gone(vllm)


def test_vllm_that_does_not_answer_in_time_is_one_line(
    monkeypatch: pytest.MonkeyPatch, digenrl: Digenrl, vllm: Path, port: int
) -> None:
    server = vllm.parent / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.write_text(FAKE_SERVER.replace("Health.num_asked > 1", "False"))
    monkeypatch.setattr("digenrl.cli.serve_judge._POLL_S", 0.01)
    result = digenrl("serve-judge", "--model", "tiny", "--port", str(port), "--start-timeout", "1")
    assert result.code == 1
    assert result.err[-1].startswith("error: vLLM did not answer within `--start-timeout` 1;")
    assert all_gone(vllm)


def test_a_key_reaches_vllm_and_clients_but_no_command_line(
    serve: Serve, vllm: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    process = serve("--port", str(port), "--host", "0.0.0.0", "--api-key-env", "JUDGE_KEY")
    assert "url:" in ready(process)
    notes = json.loads(vllm.read_text())
    assert notes["key"] == "sesame"
    assert "sesame" not in notes["words"]
    assert process.stdout is not None
    assert process.stdout.readline() == "    api_key_env: JUDGE_KEY\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "`--model` is missing"),
        (("--model", "./missing"), "there is no folder `./missing`"),
        (("--model", "tiny", "--port", "http"), "`--port` must be a whole number from 1 to 65535, got 'http'"),
        (("--model", "tiny", "--port", "70000"), "`--port` must be a whole number from 1 to 65535"),
        (("--model", "tiny", "--max-images", "0"), "`--max-images` must be a whole number from 1 to 1000000"),
        (("--model", "tiny", "--host", "0.0.0.0"), "`--api-key-env` is needed to serve beyond this machine"),
        (("--model", "tiny", "--api-key-env", "NOT_SET_AT_ALL"), "NOT_SET_AT_ALL is not set"),
        (
            ("--model", "tiny", "--prot", "80"),
            "`--prot` is not an option of `digenrl serve-judge`; did you mean `--port`?",
        ),
        (("--model", "tiny", "--gpu-fraction", "1"), "vLLM's own flags stand behind --."),
        (("--model", "tiny", "--python", "/missing/python"), "`/missing/python` cannot be run: No such file"),
    ],
)
def test_wrong_input_is_one_line(digenrl: Digenrl, words: tuple[str, ...], message: str) -> None:
    assert message in digenrl("serve-judge", *words).error


def test_missing_vllm_is_one_line(digenrl: Digenrl) -> None:
    error = digenrl("serve-judge", "--model", "tiny", "--python", sys.executable).error
    assert f"`--python` {sys.executable} has no vLLM: {sys.executable} -m pip install vllm" in error


def test_a_port_that_is_taken_is_one_line(digenrl: Digenrl, vllm: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = digenrl("serve-judge", "--model", "tiny", "--port", str(port)).error
    assert f"`--port` {port} cannot be had on 127.0.0.1: Address already in use." in error


def test_help_lists_all_options(digenrl: Digenrl) -> None:
    out = digenrl("serve-judge", "--help").out
    for option in ("--model", "--served-name", "--port", "--host", "--api-key-env", "--max-images", "--python"):
        assert option in out
