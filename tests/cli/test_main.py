from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.cli.main import SUBCOMMANDS
from tests.cli.commands import TOY, Digenrl

REPOSITORY = str(Path(__file__).parents[2])


def test_help_version_and_unknown_commands_need_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from digenrl.cli import main; codes = [main(words) for words in ([], ['--help'], ['--version'],"
        "['fti'])]; print(codes, [name for name in ('torch', 'lightning', 'jsonargparse') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2] []"
    assert done.stderr == "error: `fti` is not a command; did you mean `fit`?\n"


def test_help_names_the_commands(digenrl: Digenrl) -> None:
    assert digenrl("--help").out == digenrl().out
    assert {"fit", "validate", "--print_config"} <= set(digenrl().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], f"`train` is not a command; known: {', '.join(sorted(SUBCOMMANDS))}."),
        (
            ["--config", "toy.yaml"],
            f"`--config` must stand behind a command, {' or '.join(SUBCOMMANDS)}: digenrl fit --config",
        ),
        (["-x"], f"`-x` must stand behind a command, {' or '.join(SUBCOMMANDS)}: digenrl fit -x"),
    ],
)
def test_what_is_no_command_is_refused(digenrl: Digenrl, words: list[str], message: str) -> None:
    assert digenrl(*words).error == f"error: {message}"


def test_python_m_finds_classes_of_the_working_directory_and_gives_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(media, prompts):\n    return media.flatten(1).mean(1)\n")
    (tmp_path / "toy.yaml").write_text(TOY)
    command = [sys.executable, "-m", "digenrl", "fit", "-c", "toy.yaml", "--model.reward", "mine.reward"]
    environment = {"PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(
        [*command, "--model.lr", "x"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == "error: `--model.lr` must be a number, got 'x'.\n"
    assert done.returncode == 2


def test_traceback_is_printed_on_demand(digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_TRACEBACK", "1")
    result = digenrl("fit", "--config", "absent.yaml")
    assert result.code == 2
    assert result.err[0].startswith("Traceback")
    assert result.err[-1].startswith("error: `--config`: there is no file `absent.yaml`")


def test_a_reader_that_has_enough_ends_a_command_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "digenrl", "rewards", "list"]
    result = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")
