from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from digenrl import DisaggregatedStrategy, Trainer
from digenrl.scheduling.profile import Profile
from tests.integration.test_assist import paced
from tests.integration.toy_runs import QUIET, toy_data
from tests.toy import toy_module


def run(folder: Path, strategy: Any, module: Any = None, *callbacks: Callback) -> Path:
    settings = {**QUIET, "logger": None, "default_root_dir": str(folder)}
    Trainer(strategy=strategy, max_steps=3, callbacks=list(callbacks), **settings).fit(
        toy_module() if module is None else module, toy_data()
    )
    return folder / "version_0" / "profile.json"


def test_the_profile_holds_the_durations_of_the_run(tmp_path: Path) -> None:
    strategy = DisaggregatedStrategy(generators=2, trainer_assist="off", timestep_batch_size="all")
    profile = Profile.read(run(tmp_path, strategy, paced()))
    assert (profile.num_groups, profile.group_size, profile.generators, profile.trainers) == (4, 4, 2, 1)
    # A slice of two samples sleeps 80 ms, an update of four samples 10 ms.
    assert profile.generate_s >= 0.04
    assert profile.update_s >= 0.0025
    assert profile.assist_s is None
    assert profile.timestep_batch_size == "all"


def test_assistance_is_measured_where_there_is_some(tmp_path: Path) -> None:
    strategy = DisaggregatedStrategy(engine="inline", trainer_assist="static:1")
    profile = Profile.read(run(tmp_path, strategy))
    assert profile.assist_s is not None
    assert profile.assist_s > 0


@pytest.mark.parametrize("strategy", ["auto"])
def test_a_colocated_run_has_no_profile(tmp_path: Path, strategy: str) -> None:
    assert not run(tmp_path, strategy).exists()
