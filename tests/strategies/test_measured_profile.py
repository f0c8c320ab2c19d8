from __future__ import annotations

from digenrl.strategies.measured_profile import measured_profile

MEASURED_S = {"generate": 2.0, "score": 0.5, "update": 0.25, "load": 0.1, "optimizer": 0.2, "publish": 0.3}
STEP = {"num_groups": 8, "group_size": 4, "generators": 2, "trainers": 4}


def test_there_is_no_profile_before_every_part_of_a_step_was_measured() -> None:
    for task in MEASURED_S:
        others = {name: seconds for name, seconds in MEASURED_S.items() if name != task}
        assert measured_profile(others, **STEP, timestep_batch_size="all") is None


def test_each_duration_is_that_of_its_task_and_assistance_may_be_missing() -> None:
    profile = measured_profile(MEASURED_S, **STEP, timestep_batch_size=3)
    assert profile is not None
    assert (profile.generate_s, profile.score_s, profile.update_s) == (2.0, 0.5, 0.25)
    assert (profile.load_s, profile.optimizer_s, profile.publish_s) == (0.1, 0.2, 0.3)
    assert (profile.assist_s, profile.switch_s, profile.timestep_batch_size) == (None, 0.0, 3)
    assert (profile.num_groups, profile.group_size, profile.generators, profile.trainers) == (8, 4, 2, 4)
    assisted = measured_profile({**MEASURED_S, "assist": 3.0, "switch": 0.7}, **STEP, timestep_batch_size="all")
    assert assisted is not None
    assert (assisted.assist_s, assisted.switch_s) == (3.0, 0.7)
