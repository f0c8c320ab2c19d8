from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from digenrl.scheduling.profile import Profile
from tests.cli.commands import Digenrl

PROFILE = Profile(
    generate_s=3.5,
    score_s=0.25,
    update_s=0.5,
    num_groups=8,
    group_size=4,
    generators=2,
    trainers=4,
    assist_s=1.0,
    load_s=1.0,
    optimizer_s=0.5,
    publish_s=0.5,
    switch_s=0.5,
    timestep_batch_size="all",
    update_s_by_timestep_batch_size={1: 0.875},
)


@pytest.fixture(autouse=True)
def profile(folder: Path) -> Path:
    PROFILE.write(folder / "profile.json")
    return folder / "profile.json"


def settings(out: str) -> dict[str, object]:
    return dict(yaml.safe_load(out)["trainer"]["strategy"]["init_args"])


def plan(digenrl: Digenrl, *words: str) -> dict[str, object]:
    result = digenrl("plan", "--devices", "6", "--profile", "profile.json", *words)
    assert (result.code, result.err) == (0, [])
    return settings(result.out)


def test_plan_is_yaml_that_the_strategy_takes(digenrl: Digenrl) -> None:
    from digenrl.strategies import DisaggregatedStrategy

    found = plan(digenrl)
    strategy = DisaggregatedStrategy(**found)  # type: ignore[arg-type]
    assert strategy.generators + strategy.trainers == 6
    assert found["timestep_batch_size"] == "all"


def test_plan_says_what_each_choice_gains(digenrl: Digenrl) -> None:
    out = digenrl("plan", "--devices", "6", "--profile", "profile.json").out
    assert "groups_per_micro_batch: 1         # 1." in out
    assert "x as fast as with 1\n" in out
    assert "% of the fluid bound" in out


def test_generators_get_most_devices_where_generation_is_dear(digenrl: Digenrl, profile: Path) -> None:
    from dataclasses import replace

    # 0.5 s on a trainer after 10 s on a generator; assistance costs too much to pay.
    replace(PROFILE, generate_s=10.0, update_s=0.125, assist_s=25.0, update_s_by_timestep_batch_size=None).write(
        profile
    )
    found = plan(digenrl, "--max-staleness", "0")
    assert (found["generators"], found["trainers"]) == (5, 1)
    assert found["trainer_assist"] == "off"
    assert found["staleness"] == 0


def test_staleness_is_never_above_what_is_accepted(digenrl: Digenrl) -> None:
    assert plan(digenrl, "--max-staleness", "0.1")["staleness"] in (0, 0.1)
    assert plan(digenrl, "--max_staleness", "0")["staleness"] == 0


def test_other_steps_than_the_runs_are_planned(digenrl: Digenrl) -> None:
    result = digenrl(
        "plan", "--devices", "6", "--profile", "profile.json", "--prompts-per-step", "3", "--group-size", "6"
    )
    assert result.out.startswith("# 6 devices, 3 prompts of 6 samples a step.")
    assert settings(result.out)["groups_per_micro_batch"] in (1, "all")


def test_micro_batches_are_large_enough_for_all_trainers(digenrl: Digenrl) -> None:
    result = digenrl("plan", "--devices", "16", "--profile", "profile.json")
    found = settings(result.out)
    groups = 8 if found["groups_per_micro_batch"] == "all" else found["groups_per_micro_batch"]
    assert groups * 4 >= found["trainers"]  # type: ignore[operator]


def test_help_is_printed(digenrl: Digenrl) -> None:
    assert digenrl("plan", "--help").out.startswith("usage: digenrl plan --devices N --profile FILE")


def test_neither_torch_nor_lightning_is_imported(profile: Path) -> None:
    code = (
        "import sys; from digenrl.cli import main;"
        f"code = main(['plan', '--devices', '2', '--profile', {str(profile)!r}]);"
        "print(code, [name for name in ('torch', 'lightning', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []"


WRONG = [
    ("--devices 1 --profile profile.json", "`--devices` is a count and must be at least 2, got 1."),
    ("--devices many --profile profile.json", "`--devices` must be a whole number, got 'many'."),
    ("--devices 4", "`--profile FILE` is missing."),
    ("--profile profile.json", "`--devices N` is missing."),
    (
        "--devices 4 --profile profil.json",
        "`--profile`: profil.json: there is no such file; did you mean `profile.json`",
    ),
    ("--devices 4 --profile toy.yaml", "`--profile`: toy.yaml: not valid JSON in line 1: Expecting value."),
    ("--device 4 --profile profile.json", "`--device` is not an option of `digenrl plan`; did you mean `--devices`?"),
    (
        "--devices 4 --config toy.yaml",
        "`--config` is not an option of `digenrl plan`; costs come from `--profile FILE`",
    ),
    ("--devices 4 --profile profile.json --max-staleness 1", "`--max-staleness` is the largest stale fraction of a st"),
    ("--devices 4 --profile profile.json --max-staleness x", "`--max-staleness` must be a number, got 'x'."),
    ("--devices 4 --profile profile.json --group-size 0", "`--group-size` is a count and must be at least 1, got 0."),
    ("--devices [4] --profile profile.json", "`--devices` must be a whole number, got [4]."),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_options_are_refused_on_one_line(digenrl: Digenrl, words: str, message: str) -> None:
    assert message in digenrl("plan", *words.split()).error


def test_wrong_profiles_are_refused_on_one_line(digenrl: Digenrl, profile: Path) -> None:
    profile.write_text(profile.read_text().replace('"score"', '"scor"'))
    error = digenrl("plan", "--devices", "4", "--profile", "profile.json").error
    assert "`seconds_per_sample.scor` is not a key of a profile; did you mean `seconds_per_sample.score`?" in error


def test_trainers_never_outnumber_the_samples_of_a_micro_batch(digenrl: Digenrl) -> None:
    result = digenrl("plan", "--devices", "512", "--profile", "profile.json", "--prompts-per-step", "1")
    found = settings(result.out)
    assert found["trainers"] <= 4  # type: ignore[operator]
