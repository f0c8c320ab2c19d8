"""However weights travel, a run ends with the same ones."""

from __future__ import annotations

import pytest

from digenrl import DisaggregatedStrategy
from digenrl.strategies.checks import check_weight_plane
from digenrl.strategies.weight_planes import PLANES
from tests.integration.toy_runs import fit, relative_difference


def test_a_run_ends_with_the_same_weights_over_every_plane() -> None:
    runs = {}
    for plane in PLANES:
        strategy = DisaggregatedStrategy(generators=2, trainers=2, engine="local", weight_plane=plane)  # type: ignore[arg-type]
        runs[plane] = fit(strategy, max_steps=3)[2]
    inline = fit(DisaggregatedStrategy(generators=2, trainers=1, engine="inline"), max_steps=3)[2]
    assert {plane: relative_difference(run, inline) < 1e-6 for plane, run in runs.items()} == dict.fromkeys(
        PLANES, True
    )


def test_planes_that_cannot_be_are_found_before_workers_start() -> None:
    with pytest.raises(ValueError, match="`weight_plane` must not be collective with engine `inline`"):
        fit(DisaggregatedStrategy(engine="inline", weight_plane="collective"))
    with pytest.raises(
        ValueError, match="`weight_plane` shared_memory needs all workers on one host, but `num_nodes` is 2"
    ):
        check_weight_plane("shared_memory", engine="ray", num_nodes=2)
