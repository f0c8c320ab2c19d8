from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from digenrl.cli.reward_argument import make_reward
from digenrl.rewards.remote.http import HTTPReward
from digenrl.types import Prompt, PromptBatch
from tests.cli.commands import Digenrl

REPOSITORY = str(Path(__file__).parents[2])
MINE = """\
class Above:
    requires = ("level",)
    groupwise = True

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, media, prompts):
        return [self.scale * (value - row.metadata["level"])
                for value, row in zip(media.flatten(1).mean(1).tolist(), prompts.prompts)]


class Unloadable:
    def setup(self, device):
        raise OSError("there are no weights at /nowhere")

    def __call__(self, media, prompts):
        return media.flatten(1).mean(1)
"""
BRIGHT = ("--reward", "tests.cli.toy_parts.Bright")


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (folder / "served_mine.py").write_text(MINE)
    yield folder
    sys.modules.pop("served_mine", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "`--reward` is missing; `digenrl rewards list` shows what there is."),
        (["--rewrd", "X"], "`--rewrd` is not an option of `digenrl serve-reward`; did you mean `--reward`?"),
        (["--reward", "tests.cli.toy_parts.Brigt"], "`--reward` is `tests.cli.toy_parts.Brigt`, but module "),
        ([*BRIGHT, "--reward.lvl", "1"], "`--reward.lvl` is not a setting of Bright; did you mean `level`?"),
        ([*BRIGHT, "--reward.level", "x"], "`--reward.level` must be a number, got 'x'."),
        ([*BRIGHT, "--port", "http"], "`--port` must be a whole number from 0 to 65535, got 'http'."),
        ([*BRIGHT, "--port", "70000"], "`--port` must be a whole number from 0 to 65535, got '70000'."),
        ([*BRIGHT, "--port"], "`--port` needs a value, got nothing."),
        ([*BRIGHT, "--port", "1", "--port", "2"], "`--port` must be given once, got 1, 2."),
        ([*BRIGHT, "--max-request-mb", "0"], "`--max-request-mb` must be a whole number from 1 to "),
        ([*BRIGHT, "--device", "gpu"], "`--device` must be a device of this machine, as cpu, got `gpu`: "),
        ([*BRIGHT, "more"], "`more` is not an option of `digenrl serve-reward`; known: --device, "),
        ([*BRIGHT, "--host", "0.0.0.0"], "`--token-env` is needed to serve beyond this machine, `--host` is 0.0.0.0."),
        (
            [*BRIGHT, "--host", "::", "--token-env", "UNSET"],
            "`--token-env` must name an environment variable with the secret, UNSET is not set.",
        ),
        (["--reward", "served_mine.Unloadable", "--port", "0"], "reward `Unloadable` cannot be set up: OSError: there"),
    ],
)
def test_wrong_input_is_one_line(digenrl: Digenrl, mine: Path, words: list[str], message: str) -> None:
    assert digenrl("serve-reward", *words).error.startswith(f"error: {message}")


def test_an_empty_token_is_none(digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "")
    result = digenrl("serve-reward", *BRIGHT, "--host", "0.0.0.0", "--token-env", "TOKEN")
    assert "TOKEN is not set" in result.error


def test_several_rewards_are_served_one_by_one(digenrl: Digenrl, folder: Path) -> None:
    rewards = "[tests.toy.level_reward, tests.cli.toy_parts.Bright]"
    (folder / "both.yaml").write_text(f"reward: {{class_path: SeveralRewards, init_args: {{rewards: {rewards}}}}}")
    assert "serve single rewards, each at a port of its own" in digenrl("serve-reward", "--config", "both.yaml").error


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(digenrl: Digenrl, mine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = digenrl("serve-reward", "--reward", "served_mine.Unloadable", "--port", port).error
    assert error == f"error: `--port` {port} cannot be had on `--host` 127.0.0.1: Address already in use."


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_package_is_one_line_with_the_extra(
    digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    error = digenrl("serve-reward", *BRIGHT).error
    assert error == f"error: `digenrl serve-reward` needs the package {package}: pip install 'digenrl[serve]'"


def test_help_names_the_options(digenrl: Digenrl) -> None:
    result = digenrl("serve-reward", "--help")
    assert result.code == 0
    for option in ("--reward", "--port", "--host", "--token-env", "--device", "--max-request-mb", "--config"):
        assert f"  {option}" in result.out or f", {option}" in result.out


def test_a_reward_of_the_users_is_served_and_what_is_printed_asks_it(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "digenrl", "serve-reward", "--reward", "served_mine.Above", "--port", "0"]
    environment = {"PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1", "PATH": "", "SCORER_TOKEN": "secret"}
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    server = subprocess.Popen(
        [*command, "--reward.scale", "2.0", "--token-env", "SCORER_TOKEN"],
        cwd=mine,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines: list[str] = []
        while not (lines and lines[-1].strip().startswith("token_env")):
            lines.append(server.stdout.readline())
            assert lines[-1], server.communicate()
        assert lines[0].startswith("serving served_mine.Above on cpu after ")
        described: dict[str, Any] = yaml.safe_load("".join(lines[1:]))["reward"]
        assert described["class_path"] == "HTTPReward"
        (mine / "printed.yaml").write_text("".join(lines[1:]))
        reward, _ = make_reward(
            ["--config", str(mine / "printed.yaml"), "--reward", "digenrl.rewards.remote.http.HTTPReward"]
        )
        assert isinstance(reward, HTTPReward)
        assert (reward.requires, reward.groupwise) == (("level",), True)
        reward.setup(torch.device("cpu"))
        prompts = PromptBatch.for_step([Prompt("a", 0, metadata={"level": 0.25})], step=0, group_size=2, seed=0)
        assert reward(torch.tensor([0.5, 1.0])[:, None, None, None].expand(2, 1, 2, 2), prompts) == [0.5, 1.5]
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert (server.returncode, out, err) == (128 + signal.SIGTERM, "", "")
