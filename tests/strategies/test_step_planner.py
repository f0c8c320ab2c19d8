"""What the driver is told of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from digenrl.strategies.step_planner import StepPlanner
from tests.algorithms.cases import make
from tests.toy import WORDS, toy_module


def planner_for(module: Any, sampler_steps: int = 0) -> StepPlanner:
    pool: Any = SimpleNamespace(sampler_steps=lambda: sampler_steps)
    return StepPlanner(
        module,
        pool,
        num_generators=2,
        generation_batch_size=None,
        micro_batch_groups=lambda num_groups: num_groups // 2,
    )


def test_a_plan_cuts_the_batch_and_says_what_its_rows_are_divided_by() -> None:
    module = toy_module()
    planner = planner_for(module)
    plan = planner.plan(WORDS, 0, policy_version=7, num_accumulated=3)
    assert planner.num_groups == 4
    assert [(part.start, part.stop) for part in plan.micro_batches] == [(0, 8), (8, 16)]
    assert [len(part.slices) for part in plan.micro_batches] == [2, 2]  # a generator each
    assert plan.num_rows == 3 * 16 * module.num_trained_timesteps
    assert not plan.shares_rollout


def test_a_step_that_is_planned_ahead_is_trained_by_later_weights() -> None:
    planner = planner_for(toy_module())
    assert planner.plan(WORDS, 0, policy_version=7, num_accumulated=1).policy_version == 7
    assert planner.plan(WORDS, 1, policy_version=7, num_accumulated=1).policy_version == 8


def test_a_round_begins_where_the_weights_say_so() -> None:
    module: Any = make("FlowGRPO-2-updates")
    module.next_step = 5  # and the copy that makes the samples has followed one step of its round
    planner = planner_for(module, sampler_steps=1)

    def shared() -> list[bool]:
        return [planner.plan(WORDS, step, policy_version=0, num_accumulated=1).shares_rollout for step in (5, 6, 7)]

    assert shared() == [True, False, True]
    module.next_step = 6
    assert shared() == [True, False, True]  # still by the count of the first time
    planner.begin_anew()
    assert shared() == [False, True, False]
