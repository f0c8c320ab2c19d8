from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from digenrl.scheduling.profile import Profile

PROFILE = Profile(
    generate_s=3.5,
    score_s=0.25,
    update_s=0.5,
    num_groups=8,
    group_size=4,
    generators=2,
    trainers=4,
    assist_s=0.75,
    load_s=1.0,
    optimizer_s=2.0,
    publish_s=3.0,
    switch_s=4.0,
    timestep_batch_size="all",
    update_s_by_timestep_batch_size={1: 0.875, 2: 0.625},
)


def content(path: Path, profile: Profile = PROFILE) -> dict[str, Any]:
    profile.write(path)
    return dict(json.loads(path.read_text()))


def test_profile_survives_writing_and_reading(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == PROFILE


def test_profile_of_a_run_without_assistance_leaves_it_out(tmp_path: Path) -> None:
    plain = Profile(generate_s=1.0, score_s=0.0, update_s=1.0, num_groups=2, group_size=2, generators=1, trainers=1)
    assert content(tmp_path / "profile.json", plain) == {
        "seconds_per_sample": {"generate": 1.0, "score": 0.0, "update": 1.0},
        "seconds": {"load": 0.0, "optimizer": 0.0, "publish": 0.0, "switch": 0.0},
        "num_groups": 2,
        "group_size": 2,
        "generators": 1,
        "trainers": 1,
    }
    assert Profile.read(tmp_path / "profile.json") == plain


def test_costs_of_the_trainer_group_become_those_of_one_trainer() -> None:
    work = PROFILE.workload()
    assert (work.generate_s, work.score_s) == (3.5, 0.25)
    assert (work.update_s, work.assist_s) == (2.0, 3.0)
    assert (work.load_s, work.optimizer_s, work.publish_s, work.switch_s) == (1.0, 2.0, 3.0, 4.0)
    assert (work.num_groups, work.group_size) == (8, 4)


def test_update_costs_hold_the_runs_own() -> None:
    assert PROFILE.update_costs == {1: 0.875, 2: 0.625, "all": 0.5}


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["secondz"], {}, "`secondz` is not a key of a profile; did you mean `seconds`?"),
        (["seconds", "load_"], 1.0, "`seconds.load_` is not a key of a profile; did you mean `seconds.load`?"),
        (["seconds_per_sample"], 3, "`seconds_per_sample` must be a mapping, got 3."),
        (["seconds_per_sample", "generate"], 0.0, "`generate` is a time and must be above 0 s, got 0.0."),
        (["seconds_per_sample", "update"], "1", "`update` is a time in seconds and must be a number, got '1'."),
        (["seconds", "publish"], -1.0, "`publish` is a time and must be at least 0 s, got -1.0."),
        (["trainers"], 0, "`trainers` is a count and must be a whole number of at least 1, got 0."),
        (["timestep_batch_size"], "some", "`timestep_batch_size` counts timesteps and must be at least 1, or `all`"),
        (["update_by_timestep_batch_size"], {"0": 1.0}, "`update_by_timestep_batch_size` counts timesteps and must"),
        (["update_by_timestep_batch_size"], {"3": -1}, "`update_by_timestep_batch_size.3` is a time and must be above"),
    ],
)
def test_wrong_profiles_are_refused_on_one_line(tmp_path: Path, keys: list[str], value: object, message: str) -> None:
    path = tmp_path / "profile.json"
    everything = content(path)
    part = everything
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(everything))
    with pytest.raises(ValueError, match=r".+") as caught:
        Profile.read(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", [("seconds",), ("seconds", "load"), ("seconds_per_sample", "score"), ("num_groups",)])
def test_missing_keys_are_named(tmp_path: Path, keys: tuple[str, ...]) -> None:
    path = tmp_path / "profile.json"
    everything = content(path)
    part = everything
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    path.write_text(json.dumps(everything))
    with pytest.raises(ValueError, match=f"`{'.'.join(keys)}` is missing"):
        Profile.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1]", "a profile must be a mapping with seconds_per_sample and seconds, got [1]."),
        (b'{"seconds": ', "not valid JSON in line 1: Expecting value."),
        (b"\xff\xfe\xfd", "is not a text file."),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r".+") as caught:
        Profile.read(path)
    assert str(caught.value) == f"{path}: {message}"


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    content(tmp_path / "profile.json")
    with pytest.raises(ValueError, match="there is no such file; did you mean `.*profile.json`?"):
        Profile.read(tmp_path / "profil.json")
    with pytest.raises(ValueError, match="is a folder; a profile is a file"):
        Profile.read(tmp_path)
