"""Options of which each is wrong by itself."""

from __future__ import annotations

import re
from typing import Any

import pytest

from digenrl import DisaggregatedStrategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generators": 0}, "`generators` is a count and must be at least 1, got 0."),
        ({"trainers": 1.5}, "`trainers` is a count and must be at least 1, got 1.5."),
        ({"generation_batch_size": -1}, "`generation_batch_size` is a count and must be at least 1, got -1."),
        ({"groups_per_micro_batch": "auto"}, "`groups_per_micro_batch` is a count and must be at least 1, got 'auto'."),
        ({"timestep_batch_size": "most"}, "`timestep_batch_size` is a count and must be at least 1, got 'most'."),
        ({"reward_workers": -1}, "`reward_workers` is a count and must be at least 0, got -1."),
        ({"max_restarts": "2"}, "`max_restarts` is a count and must be at least 0, got '2'."),
        ({"assist_switch": "drop"}, "`assist_switch` must be one of none, offload, got 'drop'."),
        ({"engine": "rays"}, "`engine` must be one of auto, local, ray, inline, got 'rays'."),
        ({"sharding": "zero"}, "`sharding` must be one of none, fsdp, hybrid, got 'zero'."),
        ({"parity_check": "log"}, "`parity_check` must be one of raise, warn, off, got 'log'."),
        ({"task_timeout_s": 0}, "`task_timeout_s` must be above 0, got 0."),
    ],
)
def test_an_option_outside_its_bounds_is_refused_with_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DisaggregatedStrategy(**settings)


def test_words_that_stand_for_a_count_are_kept() -> None:
    strategy = DisaggregatedStrategy(groups_per_micro_batch="all", timestep_batch_size="auto", reward_workers=0)
    assert (strategy.groups_per_micro_batch, strategy.timestep_batch_size) == ("all", "auto")
    assert (strategy.generation_batch_size, strategy.reward_workers) == (None, 0)
