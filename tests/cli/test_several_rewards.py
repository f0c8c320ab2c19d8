"""Rewards in a configuration: functions and classes, alone and in lists with weights."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import TOY, Digenrl

PARTS = "tests.cli.toy_parts"
BRIGHT = f"{{class_path: {PARTS}.Bright, init_args: {{level: 0.3}}}}"
LEVEL = "tests.toy.level_reward"


@pytest.fixture
def several(folder: Path) -> Path:
    """A run's configuration with two rewards and their weights."""
    return write(
        folder,
        f"""
      class_path: SeveralRewards
      init_args:
        rewards:
          - class_path: {PARTS}.Bright
            init_args: {{level: 0.3}}
            weight: 0.5
          - {{class_path: {LEVEL}, weight: 2}}
""",
    )


def write(folder: Path, reward: str) -> Path:
    path = folder / "several.yaml"
    assert f"reward: {LEVEL}\n" in TOY
    path.write_text(TOY.replace(f"reward: {LEVEL}\n", f"reward: {reward}\n"))
    return path


def printed_reward(digenrl: Digenrl, *words: str) -> Any:
    result = digenrl("fit", *words, "--print_config")
    assert result.code == 0, result.err
    return yaml.safe_load(result.out)["model"]["init_args"]["reward"]


@pytest.mark.parametrize("notation", [LEVEL, f"{{class_path: {LEVEL}}}", f"{{class_path: {LEVEL}, init_args: {{}}}}"])
def test_a_function_is_named_with_or_without_class_path(digenrl: Digenrl, folder: Path, notation: str) -> None:
    write(folder, notation)
    assert printed_reward(digenrl, "--config", "several.yaml") == LEVEL
    assert printed_reward(digenrl, "--config", "toy.yaml", "--model.reward", notation) == LEVEL
    in_list = f"{{class_path: SeveralRewards, init_args: {{rewards: [{BRIGHT}, {notation}]}}}}"
    assert (
        printed_reward(digenrl, "--config", "toy.yaml", "--model.reward", in_list)["init_args"]["rewards"][1] == LEVEL
    )


def test_weights_stand_beside_the_rewards_and_the_printed_configuration_gives_itself(
    digenrl: Digenrl, folder: Path, several: Path
) -> None:
    first = digenrl("fit", "--config", "several.yaml", "--print_config").out
    (folder / "printed.yaml").write_text(first)
    assert digenrl("fit", "--config", "printed.yaml", "--print_config").out == first
    reward = yaml.safe_load(first)["model"]["init_args"]["reward"]
    assert reward["class_path"].endswith(".SeveralRewards")
    assert reward["init_args"]["rewards"] == [{"class_path": f"{PARTS}.Bright", "init_args": {"level": 0.3}}, LEVEL]
    assert reward["init_args"]["weights"] == [0.5, 2.0]


def test_an_entry_without_a_weight_has_weight_one(digenrl: Digenrl, several: Path) -> None:
    more = ["--model.reward.rewards+", f"{PARTS}.unannotated"]
    assert printed_reward(digenrl, "--config", "several.yaml", *more)["init_args"]["weights"] == [0.5, 2.0, 1.0]


def test_without_weights_in_entries_the_list_of_weights_counts(digenrl: Digenrl) -> None:
    reward = f"{{class_path: SeveralRewards, init_args: {{rewards: [{BRIGHT}, {LEVEL}], weights: [1, 3], mode: sum}}}}"
    settings = printed_reward(digenrl, "--config", "toy.yaml", "--model.reward", reward)["init_args"]
    assert (settings["weights"], settings["mode"]) == ([1.0, 3.0], "sum")


def test_options_change_an_entry_by_its_number(digenrl: Digenrl, several: Path) -> None:
    options = ["--model.reward.rewards.1.weight", "7", "--model.reward.rewards.0.level", "0.9"]
    settings = printed_reward(digenrl, "--config", "several.yaml", *options)["init_args"]
    assert settings["weights"] == [0.5, 7.0]
    assert settings["rewards"][0]["init_args"] == {"level": 0.9}


@pytest.mark.parametrize("reward", [LEVEL, f"{{class_path: {LEVEL}}}", BRIGHT])
def test_another_reward_leaves_out_the_settings_of_the_one_before(digenrl: Digenrl, several: Path, reward: str) -> None:
    given = printed_reward(digenrl, "--config", "several.yaml", "--model.reward", reward)
    assert given == (yaml.safe_load(BRIGHT) if reward == BRIGHT else LEVEL)


def test_the_run_uses_the_weights(digenrl: Digenrl, folder: Path, several: Path) -> None:
    result = digenrl("fit", "--config", "several.yaml", "--model.reward.mode", "sum")
    assert result.code == 0, result.err
    with (folder / "runs/version_0/metrics.csv").open() as file:
        row = next(csv.DictReader(file))
    parts = {name: float(row[f"reward/{name}"]) for name in ("Bright", "level_reward", "mean")}
    assert parts["Bright"] != parts["level_reward"]
    expected = 0.2 * parts["Bright"] + 0.8 * parts["level_reward"]  # weights count relative to each other
    assert parts["mean"] == pytest.approx(expected, rel=1e-5)


FILES = [
    ("weight: 0.5", "weight: much", "several.yaml:11: `model.reward.rewards.0.weight` must be a number, got 'much'."),
    ("weight: 0.5", "weightt: 0.5", "several.yaml:11: `model.reward.rewards.0.weightt` is not a key of a reward in a"),
    ("weight: 0.5", "weight: -1", "`weights` must be finite, at least 0 and not all 0, got [-1.0, 2.0]."),
    ("level: 0.3", "lewel: 0.3", "several.yaml:10: `model.reward.rewards.0.lewel` is not a setting of Bright; did"),
    ("level: 0.3", "level: x", "several.yaml:10: `model.reward.rewards.0.level` must be a number, got 'x'."),
    (f"{PARTS}.Bright", f"{PARTS}.Brigt", "several.yaml:9: `model.reward.rewards.0.class_path` is `tests.cli.toy_par"),
    (f"{PARTS}.Bright", f"{PARTS}.Silent", "several.yaml:9: `model.reward.rewards.0.class_path` must be a function"),
    (LEVEL, "tests.toy.lewel_reward", "several.yaml:12: `model.reward.rewards.1.class_path` is `tests.toy.lewel_rewar"),
    ("weight: 2", "init_args: {a: 1}", "several.yaml:12: `model.reward.rewards.1.init_args` must be left out: `tests"),
    ("        rewards:", "        weights: [1]\n        rewards:", "several.yaml:12: `model.reward.rewards.0.weight`"),
    ("rewards:", "reward:", "`model.reward.reward` is not a setting of SeveralRewards; did you mean `rewards`?"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "message"), FILES)
def test_a_mistake_in_a_list_is_said_with_its_line(
    digenrl: Digenrl, several: Path, right: str, wrong: str, message: str
) -> None:
    text = several.read_text()
    assert right in text
    several.write_text(text.replace(right, wrong))
    assert message in digenrl("fit", "--config", "several.yaml").error


OPTIONS = [
    ("--model.reward.rewards.1.weight x", "`--model.reward.rewards.1.weight` must be a number, got 'x'."),
    ("--model.reward.rewards.0.level x", "`--model.reward.rewards.0.level` must be a number, got 'x'."),
    ("--model.reward.rewards.2.level 1", "`--model.reward.rewards.2.level` means item 2 of a list of 2"),
    ("--model.reward.rewards tests.toy.level_reward", "must be a list, each item a function or a class whose objects"),
    ("--model.reward.rewards [nothing.there]", "--model.reward.rewards: `model.reward.rewards.0` is `nothing.there`"),
    ("--model.reward.weights [1,2]", "`model.reward.rewards.0.weight` must be left out where `weights` are given"),
    ("--model.reward {class_path:SeveralRewards}", "`--model.reward`"),
    ("--model.reward [tests.toy.level_reward]", "`--model.reward` must be a function or a class whose objects can be"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_a_wrong_option_for_a_list_is_said_on_one_line(
    digenrl: Digenrl, several: Path, options: str, message: str
) -> None:
    assert message in digenrl("fit", "--config", "several.yaml", *options.split()).error


def test_usage_shows_the_settings_of_each_of_several_rewards(digenrl: Digenrl, several: Path) -> None:
    out = digenrl("fit", "--config", "several.yaml", "--help").out
    assert "--model.reward.mode normalize_then_sum|sum" in out
    assert "--model.reward.rewards.0.level NUMBER" in out
