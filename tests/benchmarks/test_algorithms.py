"""The table of algorithms is filled from runs, and the document about them is true; nothing here asserts a time."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import digenrl.algorithms
from benchmarks import algorithms
from benchmarks.algorithms import ALGORITHMS, BEGIN, DOCS, END, Row, Run, read_rewards, write_docs
from digenrl.cli.classes import settings_of

SETTING = re.compile(r"^\| `(\w+)` \| (`.+?`|required) \|", re.MULTILINE)


def make_run(*rewards: float, seed: int = 0, wall_s: float = 60.0) -> Run:
    return Run(seed, tuple((10 * index, reward) for index, reward in enumerate(rewards)), wall_s)


def test_every_configuration_of_the_digits_is_measured() -> None:
    assert {path.stem for path in algorithms.EXAMPLES.glob("*.yaml")} == set(ALGORITHMS)


def test_a_row_has_the_worst_of_its_runs_and_the_least_seconds() -> None:
    row = Row.of("dgpo", [make_run(0.84, 0.96, 0.97), make_run(0.85, 0.94, 0.99, seed=1, wall_s=50.0)])
    assert row.cells("paper") == ("DGPO", "paper", "20", "20", "50", "0.840", "0.970")


def test_a_target_that_one_run_missed_is_not_reached() -> None:
    row = Row.of("dgpo", [make_run(0.84, 0.96), make_run(0.84, 0.94, seed=1)])
    assert row.num_steps_to_target is None
    assert "not reached" in row.cells("paper")


def test_rewards_are_read_with_the_number_of_steps_before_them(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,loss,val/reward/mean\n0,,0.5\n0,0.1,\n0,,0.6\n1,0.1,\n1,,0.7\n")
    assert read_rewards(metrics) == ((0, 0.5), (1, 0.6), (2, 0.7))


def test_the_document_gets_new_lines_and_keeps_those_of_others(tmp_path: Path) -> None:
    document = tmp_path / "algorithms.md"
    document.write_text(f"above\n{BEGIN}\n{END}\nbelow\n")
    for name, reward in (("dgpo", 0.97), ("flow_grpo", 0.96), ("dgpo", 0.98)):
        write_docs([Row.of(name, [make_run(0.84, reward)])], document)
    lines = document.read_text().splitlines()
    assert [lines[0], lines[1], *lines[-2:]] == ["above", BEGIN, END, "below"]
    assert [line.split(" | ")[0] for line in lines[4:-2]] == ["| Flow-GRPO", "| DGPO"]
    assert lines[5].endswith(" 0.980 |")


def test_a_document_without_a_place_for_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "algorithms.md").write_text(BEGIN)
    with pytest.raises(ValueError, match="must have the lines"):
        write_docs([], tmp_path / "algorithms.md")


def test_a_failed_run_is_an_error_that_says_why() -> None:
    with pytest.raises(RuntimeError, match="`--model.clip_rnage` is not a setting of DGPO"):
        algorithms.measure("dgpo", 0, options=("--model.clip_rnage", "1"))


@pytest.mark.parametrize("name", [name for name in digenrl.algorithms.__all__ if not name.endswith("Module")])
def test_the_document_gives_the_defaults_that_the_code_has(name: str) -> None:
    section = DOCS.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    check_defaults(getattr(digenrl.algorithms, name), section)


def test_the_document_gives_the_defaults_of_the_base_class() -> None:
    check_defaults(
        digenrl.DiffusionRLModule, DOCS.read_text().split("\n## Settings that all have\n")[1].split("\n## ")[0]
    )


def test_the_measured_table_has_a_line_for_every_algorithm() -> None:
    table = DOCS.read_text().split(BEGIN)[1].split(END)[0]
    assert re.findall(r"^\| ([^|]+) \| \[", table, re.MULTILINE) == [entry.title for entry in ALGORITHMS.values()]
    assert "not reached" not in table


def check_defaults(cls: type, section: str) -> None:
    settings = settings_of(cls)
    documented = SETTING.findall(section)
    assert documented
    for name, default in documented:
        assert name in settings
        if default == "required":
            assert settings[name].is_required
        else:
            assert ast.literal_eval(default.strip("`")) == settings[name].default, name
