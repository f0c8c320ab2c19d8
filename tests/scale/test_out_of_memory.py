"""One of several trainers runs out of memory: all halve what they take, and the gradient is the same.

A sharded one cannot tell its peers, so the group is started again.
"""

from __future__ import annotations

import pytest

from digenrl import DisaggregatedStrategy
from digenrl.engines import WorkerError
from tests.integration.toy_runs import fit, relative_difference
from tests.strategies.test_timestep_batch_size import SmallMemory, module


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_group_goes_on_with_half_as_many_timesteps_and_the_same_gradient(where: str) -> None:
    _, _, expected = fit("auto", module=module(), max_steps=2)
    strategy = DisaggregatedStrategy(1, 2, sharding="fsdp", timestep_batch_size="auto", max_restarts=2)
    small = SmallMemory(4, where, num_free=2)  # type: ignore[arg-type]
    trainer, _, weights = fit(strategy, module=module(small), max_steps=2)
    assert trainer.callback_metrics["timestep_batch_size"] <= 2
    assert relative_difference(weights, expected) <= 1e-5


def test_without_restarts_the_run_ends_and_says_what_was_too_much() -> None:
    strategy = DisaggregatedStrategy(1, 2, sharding="fsdp", timestep_batch_size="auto")
    with pytest.raises(WorkerError, match="ran out of memory with 3 timesteps at a time.*to 1 or lower"):
        fit(strategy, module=module(SmallMemory(4, num_free=1)), max_steps=2)


def test_two_ranks_that_run_out_of_memory_train_the_step_again_and_give_the_same_weights() -> None:
    _, _, expected = fit("auto", module=module(), max_steps=2)
    strategy = DisaggregatedStrategy(1, 2, timestep_batch_size="auto")
    trainer, _, weights = fit(strategy, module=module(SmallMemory(4, "backward", num_free=2)), max_steps=2)
    assert relative_difference(weights, expected) <= 1e-5  # of weights that moved by as much as they are large
    assert trainer.callback_metrics["timestep_batch_size"] == 2
