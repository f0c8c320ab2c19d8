"""`digenrl serve-judge`: vLLM's server with the flags that `VLMJudge` needs, from start to end."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from digenrl.cli.arguments import read_arguments
from digenrl.cli.errors import UsageError, suggest
from digenrl.cli.serving import noted_signals, read_count, read_secret_for
from digenrl.cli.settings import take_flags

HELP = """\
usage: digenrl serve-judge --model MODEL [--port N] [--max-images N] [--python FILE] [-- FLAG...]

Start vLLM's server for `VLMJudge`, wait until it answers, print the YAML of the reward and run until stopped. vLLM may
live in an environment of its own: --python names that environment's interpreter.

options:
  --model MODEL          a vision-language model that follows instructions, by folder or hub id
  --served-name NAME     what clients call it (default: as --model)
  --port N               default: 8000
  --host HOST            default: 127.0.0.1, which only this machine reaches; others need --api-key-env
  --api-key-env NAME     environment variable with the key that clients must send
  --max-images N         most images in a question, as `num_frames` of `VLMJudge` (default: 8)
  --python FILE          interpreter that has vLLM (default: this one)
  --start-timeout N      seconds until it must answer (default: 1800)
  -- FLAG...             for vLLM as they stand, such as -- --tensor-parallel-size 2 --max-model-len 8192
  -h, --help             show this
"""

_FLAGS = ("model", "served_name", "port", "host", "api_key_env", "max_images", "python", "start_timeout")
_POLL_S, _ASK_S = 0.25, 5.0
_STOP_S = 15.0
"""That vLLM has to end by itself."""
_PR_SET_PDEATHSIG = 1
_NUM_LOGPROBS = 20  # as `VLMJudge` asks for


@dataclass(frozen=True)
class Job:
    """What is to be served."""

    model: str
    served_name: str
    port: int
    host: str
    api_key: str | None = field(repr=False)
    api_key_env: str | None
    max_images: int
    python: str
    start_timeout_s: float
    extra: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """vLLM's own command; its key is not part of it, as all users of a machine see commands."""
        limits = json.dumps({"image": self.max_images, "video": 0})
        words = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        words += ["--served-model-name", self.served_name, "--host", self.host, "--port", str(self.port)]
        words += ["--limit-mm-per-prompt", limits, "--max-logprobs", str(_NUM_LOGPROBS)]
        return [*words, *self.extra]

    @property
    def reachable_host(self) -> str:
        """Where this machine reaches it."""
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(self.host, self.host)

    @property
    def yaml(self) -> str:
        """The reward that asks it."""
        host = socket.getfqdn() if self.host in ("0.0.0.0", "::") else self.reachable_host
        lines = ["reward:", "  class_path: VLMJudge", "  init_args:", f"    model: {self.served_name}"]
        lines.append(f"    url: http://{host}:{self.port}/v1")
        if self.api_key_env is not None:
            lines.append(f"    api_key_env: {self.api_key_env}")
        return "\n".join(lines)


def run(words: Sequence[str]) -> int:
    """Serve until stopped; returns the exit code: 130 and 143 after signals, 1 if vLLM ended by itself.

    Raises:
        UsageError: wrong input, or no vLLM.
    """
    words = list(words)
    own, extra = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments = read_arguments(own)
    if arguments.show_help:
        print(HELP, end="")
        return 0
    flags = take_flags(arguments, _FLAGS, "serve-judge")
    if arguments.files or arguments.options:
        name = "--config" if arguments.files else arguments.options[0].name
        otherwise = "; vLLM's own flags stand behind --."
        known = [f"--{flag.replace('_', '-')}" for flag in _FLAGS]
        raise UsageError(
            f"`{name}` is not an option of `digenrl serve-judge`{suggest(name, known, otherwise=otherwise)}"
        )
    job = read_job(flags, extra)
    _check_vllm(job.python)
    _check_port(job)
    return serve(job)


def read_job(flags: dict[str, str], extra: Sequence[str]) -> Job:
    """Check the options.

    Raises:
        UsageError: one is missing or outside its bounds.
    """
    model = flags.get("model")
    if not model:
        raise UsageError("`--model` is missing: the folder or hub id of a vision-language model.")
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise UsageError(f"`--model` must be a folder or a hub id, there is no folder `{model}`.")
    host, variable = flags.get("host", "127.0.0.1"), flags.get("api_key_env")
    return Job(
        model=model,
        served_name=flags.get("served_name", model),
        port=read_count(flags, "port", 8000, most=65535),
        host=host,
        api_key=read_secret_for(host, variable, option="--api-key-env"),
        api_key_env=variable,
        max_images=read_count(flags, "max_images", 8),
        python=flags.get("python", sys.executable),
        start_timeout_s=read_count(flags, "start_timeout", 1800),
        extra=tuple(extra),
    )


def serve(job: Job) -> int:
    """Start vLLM, say when it answers, and pass signals on to it; nothing of it is left at the end."""
    environment = dict(os.environ)
    if job.api_key is not None:
        environment["VLLM_API_KEY"] = job.api_key
    started_s = time.monotonic()
    with noted_signals() as received:
        # In a session of its own, so that all of it can be ended; the kernel ends it should this process be killed.
        server = subprocess.Popen(job.command, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
        try:
            problem = _wait_until_healthy(server, job, received, deadline_s=started_s + job.start_timeout_s)
            if problem is None:
                print(f"serving {job.served_name} after {time.monotonic() - started_s:.0f} s\n\n{job.yaml}", flush=True)
                problem = _wait_until_ended(server, received)
        finally:
            _end(server)
    if received:
        return 128 + received[0]
    print(f"error: {problem}; what it printed above says why.", file=sys.stderr)
    return 1


def _wait_until_healthy(
    server: subprocess.Popen[bytes], job: Job, received: Sequence[int], *, deadline_s: float
) -> str | None:
    """Wait for the first good answer; gives what is wrong if none comes."""
    url = f"http://{job.reachable_host}:{job.port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies are for other machines
    while server.poll() is None and not received:
        with suppress(OSError):
            opener.open(url, timeout=_ASK_S).close()
            return None
        if time.monotonic() > deadline_s:
            return f"vLLM did not answer within `--start-timeout` {job.start_timeout_s:.0f}"
        time.sleep(_POLL_S)
    return f"vLLM ended with exit code {server.returncode} before it answered"


def _wait_until_ended(server: subprocess.Popen[bytes], received: Sequence[int]) -> str:
    while server.poll() is None and not received:
        time.sleep(_POLL_S)
    return f"vLLM ended with exit code {server.returncode}"


def _end_with_parent() -> None:
    """Have the kernel end this process, and so all that it starts, when its parent dies (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Let the server end, and then all that it has started."""
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_S)
    with suppress(ProcessLookupError):  # all have gone
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _check_vllm(python: str) -> None:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise UsageError(f"`--python` must be an interpreter, `{python}` cannot be run: {error.strerror}.") from error
    if found.returncode != 0:
        raise UsageError(
            f"`--python` {python} has no vLLM: {python} -m pip install vllm, or give the interpreter of an environment "
            "that has it."
        )


def _check_port(job: Job) -> None:
    """See that the port is free before minutes are spent on loading."""
    family = socket.AF_INET6 if ":" in job.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((job.host, job.port))
        except OSError as error:
            raise UsageError(f"`--port` {job.port} cannot be had on {job.host}: {error.strerror}.") from error
