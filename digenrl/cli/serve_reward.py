"""`digenrl serve-reward`: one reward behind HTTP, so that it may have an environment, or a machine, of its own."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from digenrl.cli.arguments import read_flags
from digenrl.cli.errors import UsageError, suggest
from digenrl.cli.quiet import own_log
from digenrl.cli.serving import noted_signals, read_count, read_secret_for

if TYPE_CHECKING:
    from digenrl.rewards.remote.server import RewardServer

HELP = """\
usage: digenrl serve-reward --reward NAME [--reward.SETTING VALUE]... [--port N]

Serve a reward for `HTTPReward`, print the YAML that asks it, and run until stopped. Scores are those of the reward in
the run's own process. docs/guide/remote_rewards.md describes it, docs/rewards_openapi.json the protocol.

  digenrl serve-reward --reward OCRReward
  digenrl serve-reward --reward my_rewards.brightness --port 8201
  digenrl serve-reward --reward PickScore --device cuda --host 0.0.0.0 --token-env REWARD_TOKEN

options:
  --reward NAME             a class of `digenrl rewards list`, or the dotted path of a class or function of your own
  --reward.SETTING VALUE    what its constructor takes
  -c, --config FILE         YAML with the same under `reward:`, as in a run's configuration; options win over it
  --port N                  default: 8200; 0 takes a free one
  --host HOST               default: 127.0.0.1, which only this machine reaches; others need --token-env
  --token-env NAME          environment variable with the token that clients must send
  --device NAME             cpu, cuda, ... (default: cpu)
  --max-request-mb N        largest request, and largest media once unpacked (default: 512)
  -h, --help                show this
"""

_COMMAND = "digenrl serve-reward"
_FLAGS = ("port", "host", "token-env", "device", "max-request-mb")
_PACKAGES = ("fastapi", "uvicorn")
_MAX_MB = 2**20


def run(words: Sequence[str]) -> int:
    """Serve until stopped; returns the exit code: 130 and 143 after signals.

    Raises:
        UsageError: wrong input, or a reward that cannot be set up.
    """
    if "--help" in words or "-h" in words:
        print(HELP, end="")
        return 0
    _check_names(words)
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"`{_COMMAND}` needs the package {package}: pip install 'digenrl[serve]'")
    with own_log():
        return _serve(words)


def _serve(words: Sequence[str]) -> int:
    server, variable = _make_server(words)
    _take_port(server.bind, server)
    started_s = time.monotonic()
    from digenrl.rewards import RewardError

    try:
        server.set_up()
    except RewardError as error:
        raise UsageError(str(error)) from error

    def say_ready() -> None:
        ready = f"serving {server.health.reward} on {server.device} after {time.monotonic() - started_s:.0f} s"
        print(f"{ready}\n\n{_yaml(server, variable)}", flush=True)

    return _run(server, say_ready)


def _make_server(words: Sequence[str]) -> tuple[RewardServer, str | None]:
    """Make what the words describe, and give the name of the token's variable."""
    # These need torch and Lightning.
    from digenrl.cli.devices import read_device
    from digenrl.cli.reward_argument import make_reward
    from digenrl.rewards.remote.server import RewardServer
    from digenrl.rewards.remote.wire import DEFAULT_PORT

    reward, rest = make_reward(words)
    flags = {name: _only(name, given) for name, given in read_flags(rest, _FLAGS, _COMMAND).items()}
    host, variable = flags.get("host", "127.0.0.1"), flags.get("token-env")
    try:
        server = RewardServer(
            reward,
            host=host,
            port=read_count(flags, "port", DEFAULT_PORT, least=0, most=65535),
            token=read_secret_for(host, variable, option="--token-env"),
            max_request_mb=read_count(flags, "max-request-mb", 512, most=_MAX_MB),
            device=read_device(flags.get("device", "cpu")),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return server, variable


def _take_port(take: Callable[[], None], server: RewardServer) -> None:
    try:
        take()
    except OSError as error:
        raise UsageError(
            f"`--port` {server.port} cannot be had on `--host` {server.host}: {error.strerror}."
        ) from error


def _run(server: RewardServer, say_ready: Callable[[], None]) -> int:
    """Serve, and give the exit code; the server lets the signals through that have stopped it."""
    with noted_signals() as received:
        _take_port(partial(server.run, say_ready), server)  # of two that load at a time, one has it now
    return 128 + received[0] if received else 0


def _yaml(server: RewardServer, variable: str | None) -> str:
    """Write the reward that asks the server."""
    lines = ["reward:", "  class_path: HTTPReward", "  init_args:"]
    lines += [f"    url: {server.url}", f"    reward: {server.health.reward}"]
    if server.health.requires:
        lines.append(f"    requires: {json.dumps(server.health.requires)}")
    if server.health.groupwise:
        lines.append("    groupwise: true")
    if variable is not None:
        lines.append(f"    token_env: {variable}")
    return "\n".join(lines)


def _check_names(words: Sequence[str]) -> None:
    """Refuse what is no option, before a misspelt one is said to be missing."""
    known = ["--reward", "--config", *(f"--{flag}" for flag in _FLAGS)]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and not name.startswith("--reward."):
            raise UsageError(f"`{name}` is not an option of `{_COMMAND}`{suggest(name, known)}")


def _only(name: str, given: Sequence[str]) -> str:
    if len(given) > 1:
        raise UsageError(f"`--{name}` must be given once, got {', '.join(given)}.")
    return given[0]
