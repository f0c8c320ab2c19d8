"""The durations of a run, in the form that the planner and the simulator read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from digenrl.scheduling.profile import Profile

_NEEDED = {"generate", "score", "update", "load", "optimizer", "publish"}


def measured_profile(
    measured_s: Mapping[str, float],
    *,
    num_groups: int,
    group_size: int,
    generators: int,
    trainers: int,
    timestep_batch_size: int | Literal["all"] | None,
) -> Profile | None:
    """Give the profile of what was measured, in seconds by task; None before a first step is over."""
    if not measured_s.keys() >= _NEEDED:
        return None
    return Profile(
        generate_s=measured_s["generate"],
        score_s=measured_s["score"],
        update_s=measured_s["update"],
        assist_s=measured_s.get("assist"),
        load_s=measured_s["load"],
        optimizer_s=measured_s["optimizer"],
        publish_s=measured_s["publish"],
        switch_s=measured_s.get("switch", 0.0),
        num_groups=num_groups,
        group_size=group_size,
        generators=generators,
        trainers=trainers,
        timestep_batch_size=timestep_batch_size,
    )
