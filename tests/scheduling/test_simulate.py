"""The simulator against closed forms, its own bound, and the books of what was made, scored and trained."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.scheduling import SchedulingPolicy, plan_assist
from digenrl.scheduling.simulate import (
    Cluster,
    SimulatedSpan,
    SimulationResult,
    Workload,
    divisors,
    fluid_bound_s,
    ladder_modes,
    simulate,
    simulate_colocated,
    trace_events,
)

ONE = Cluster(generators=1, trainers=1)
OFF = SchedulingPolicy()


def micro_batches(num: int, generate_s: float, update_s: float, **others: float) -> Workload:
    """A step of micro-batches with one sample each."""
    return Workload(num_groups=num, group_size=1, generate_s=generate_s, update_s=update_s, **others)  # type: ignore[arg-type]


# ---- closed forms ------------------------------------------------------------------------------------------


def test_naive_steps_take_generation_scoring_training_optimizer_publication_and_load_one_after_another() -> None:
    work = Workload(
        num_groups=3,
        group_size=4,
        groups_per_micro_batch="all",
        generate_s=1.0,
        score_s=0.25,
        update_s=0.5,
        generate_call_s=0.1,
        score_call_s=0.2,
        update_call_s=0.3,
        optimizer_s=0.6,
        publish_s=0.7,
        load_s=0.9,
    )
    result = simulate(ONE, work, OFF, num_steps=3)
    step_s = 12 * (1.0 + 0.25 + 0.5) + 0.1 + 0.2 + 0.3 + 0.6 + 0.7
    assert result.step_s == pytest.approx((step_s, step_s + 0.9, step_s + 0.9))
    assert result.samples_per_s == pytest.approx(36 / (3 * step_s + 1.8))


@pytest.mark.parametrize(("generate_s", "update_s"), [(2.0, 1.0), (1.0, 2.0), (1.5, 1.5)])
def test_pipelined_micro_batches_take_the_slower_stage_and_one_of_the_other(generate_s: float, update_s: float) -> None:
    result = simulate(ONE, micro_batches(6, generate_s, update_s), OFF, num_steps=1)
    assert result.makespan_s == pytest.approx(generate_s + 5 * max(generate_s, update_s) + update_s)


def test_micro_batches_are_split_over_generators_and_over_trainers() -> None:
    work = Workload(num_groups=2, group_size=6, generate_s=1.0, update_s=1.0)
    # 6 samples: 2 on each of 3 generators, and at most 2 on each of 4 trainers.
    assert simulate(Cluster(3, 4), work, OFF, num_steps=1).makespan_s == pytest.approx(2 + 2 + 2)


def test_colocated_devices_do_everything_and_wait_for_the_slowest() -> None:
    work = Workload(
        num_groups=4, group_size=4, generate_s=1.0, score_s=0.5, update_s=2.0, optimizer_s=0.3, switch_s=0.1,
        generate_call_s=0.2, generation_batch_size=2,
    )  # fmt: skip
    even = simulate_colocated(Cluster(2, 2), work, num_steps=2)
    assert even.step_s == pytest.approx((4 * 3.5 + 2 * 0.2 + 2 * 0.1 + 0.3,) * 2)
    mixed = simulate_colocated(Cluster(2, 2, generator_speeds=(1.0, 0.5)), work, num_steps=1)
    assert mixed.makespan_s == pytest.approx(2 * (4 * 3.5 + 2 * 0.2) + 2 * 0.1 + 0.3)


def test_faster_generators_make_more() -> None:
    result = simulate(Cluster(2, 1, generator_speeds=(1.0, 3.0)), micro_batches(8, 3.0, 0.01), OFF, num_steps=1)
    made = Counter(span.worker for span in result.spans if span.task == "generate")
    assert made == {"generator-0": 2, "generator-1": 6}


def test_separate_devices_of_mixed_speed_beat_colocated_ones() -> None:
    cluster = Cluster(1, 1, generator_speeds=(0.5,))
    modes = ladder_modes(micro_batches(32, 1.0, 1.0, assist_s=1.0))
    by_name = {mode.name: mode.simulate(cluster, num_steps=4).samples_per_s for mode in modes}
    assert by_name["+TCSS"] > 1.25 * by_name["colocated"]


def test_reward_workers_overlap_scoring_with_generation() -> None:
    work = micro_batches(4, 1.0, 0.1, score_s=1.0)
    assert simulate(ONE, work, OFF, num_steps=1).makespan_s == pytest.approx(4 * 2 + 0.1)
    result = simulate(Cluster(1, 1, reward_workers=1), work, OFF, num_steps=1)
    assert result.makespan_s == pytest.approx(4 + 1 + 0.1)
    assert result.utilization["reward-workers"] == pytest.approx(4 / 5.1)


# ---- on-policy, assistance, staleness ----------------------------------------------------------------------


def test_on_policy_generation_waits_for_the_weights_of_the_step_before() -> None:
    work = micro_batches(4, 1.0, 1.0, publish_s=0.5, load_s=0.25)
    result = simulate(Cluster(2, 1), work, OFF, num_steps=4)
    ends_s = [sum(result.step_s[: step + 1]) for step in range(4)]
    for span in result.spans:
        if span.task == "generate" and (step := step_of(span)) > 0:
            assert span.start_s >= ends_s[step - 1] + 0.25 - 1e-9
    assert result.stale_fraction == (0.0,) * 4


@pytest.mark.parametrize("num", [2, 5, 12])
@pytest.mark.parametrize("update_s", [0.5, 3.0])
@pytest.mark.parametrize("assist_s", [1.0, 7.0, 25.0])
@pytest.mark.parametrize("switch_s", [0.0, 0.75])
@pytest.mark.parametrize("method", ["off", "static:2", "search", "optimal"])
def test_assisted_step_takes_as_long_as_the_plan_says(
    num: int, update_s: float, assist_s: float, switch_s: float, method: str
) -> None:
    costs = {"generate_s": 9.0, "score_s": 1.0, "update_s": update_s, "switch_s": switch_s}
    plan = plan_assist(num, assist_s=assist_s, method=method, **costs)  # type: ignore[arg-type]
    work = Workload(num_groups=num, group_size=1, assist_s=assist_s + 1.0, **costs)  # type: ignore[arg-type]
    result = simulate(ONE, work, SchedulingPolicy(method), num_steps=8)
    # Estimates are exact once each task was measured.
    assert result.step_s[-1] == pytest.approx(plan.makespan_s)
    assert result.num_assisted[-1] == plan.num_assisted


def test_stale_samples_fill_the_pipeline_while_the_step_before_is_trained() -> None:
    work = micro_batches(4, 1.0, 1.0)
    on_policy = simulate(ONE, work, OFF, num_steps=5)
    assert on_policy.step_s == (5.0,) * 5
    for mode in ("cap", "exact"):
        stale = simulate(ONE, work, SchedulingPolicy(staleness=0.25, staleness_mode=mode), num_steps=5)  # type: ignore[arg-type]
        assert stale.step_s == (5.0, 4.0, 4.0, 4.0, 4.0)
        assert stale.stale_fraction == (0.0, 0.25, 0.25, 0.25, 0.25)
        assert stale.utilization == pytest.approx({"generators": 20 / 21, "trainers": 20 / 21})


def test_stale_samples_hide_the_load_of_weights() -> None:
    work = micro_batches(8, 1.0, 1.0, optimizer_s=0.5, publish_s=0.5, load_s=1.0)
    on_policy = simulate(ONE, work, OFF, num_steps=6)
    stale = simulate(ONE, work, SchedulingPolicy(staleness=0.25), num_steps=6)
    # A step costs its updates, the optimizer step and the publication, and no more.
    assert on_policy.step_s[2:] == pytest.approx([11.0] * 4)
    assert stale.step_s[2:] == pytest.approx([9.0] * 4)


# ---- books -------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, Workload, SchedulingPolicy, int]:
    num_generators, num_reward_workers = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 1, 2]))
    num_groups = draw(st.sampled_from([1, 2, 4, 6]))
    restart_s = draw(st.sampled_from([None, 0.0, 2.0]))
    may_fail = [f"generator-{index}" for index in range(num_generators - (restart_s is None))]
    may_fail += [f"reward-worker-{index}" for index in range(num_reward_workers - 1)]
    fails = draw(st.lists(st.sampled_from(may_fail), unique=True, max_size=3)) if may_fail else []
    seconds = st.sampled_from([0.0, 0.25, 1.0])
    cluster = Cluster(
        generators=num_generators,
        trainers=draw(st.integers(1, 3)),
        reward_workers=num_reward_workers,
        generator_speeds=tuple(draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in range(num_generators)),
        trainer_speed=draw(st.sampled_from([0.5, 1.0, 2.0])),
        failures=tuple((draw(st.floats(0, 20)), worker) for worker in fails),
        restart_s=restart_s,
    )
    workload = Workload(
        num_groups=num_groups,
        group_size=draw(st.integers(1, 5)),
        generate_s=draw(st.sampled_from([0.5, 1.0, 2.0])),
        score_s=draw(seconds),
        update_s=draw(st.sampled_from([0.1, 0.5, 1.0, 3.0])),
        assist_s=draw(st.sampled_from([None, 0.2, 1.0])),
        groups_per_micro_batch=draw(st.sampled_from([*divisors(num_groups), "all"])),
        generation_batch_size=draw(st.sampled_from([None, 1, 2])),
        generate_call_s=draw(st.sampled_from([0.0, 0.1])),
        optimizer_s=draw(seconds),
        publish_s=draw(seconds),
        load_s=draw(seconds),
        switch_s=draw(seconds),
        jitter=draw(st.sampled_from([0.0, 0.3])),
    )
    policy = SchedulingPolicy(
        trainer_assist=draw(st.sampled_from(["off", "static:1", "search", "optimal"])),
        staleness=draw(st.sampled_from([0.0, 0.25, 0.5, 0.9])),
        staleness_mode=draw(st.sampled_from(["cap", "exact"])),
    )
    return cluster, workload, policy, draw(st.integers(1, 4))


def step_of(span: SimulatedSpan) -> int:
    return int(span.detail.rpartition(" ")[2])


def samples_of(spans: Iterable[SimulatedSpan], size: int) -> Counter[tuple[int, int]]:
    """Count (step, sample) over spans of slices and of micro-batches of `size` samples."""
    counts: Counter[tuple[int, int]] = Counter()
    for span in spans:
        if found := re.fullmatch(r"samples (\d+)-(\d+) of step \d+", span.detail):
            start, stop = int(found[1]), int(found[2]) + 1
        else:
            start = size * int(span.detail.split()[1])
            stop = start + size
        counts.update((step_of(span), sample) for sample in range(start, stop))
    return counts


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_sample_is_made_scored_and_trained_once_and_the_bound_holds(
    case: tuple[Cluster, Workload, SchedulingPolicy, int],
) -> None:
    cluster, workload, policy, num_steps = case
    result = simulate(cluster, workload, policy, num_steps=num_steps, seed=3)
    size = workload.micro_batch_groups * workload.group_size
    everything = {(step, sample) for step in range(num_steps) for sample in range(workload.num_samples)}

    def count(*tasks: str) -> Counter[tuple[int, int]]:
        spans = [span for span in result.spans if span.task in tasks and span.worker != "trainer-1"]
        return samples_of([span for span in spans if span.worker != "trainer-2"], size)

    assert count("update") == dict.fromkeys(everything, 1)
    made = count("generate", "assist")
    assert set(made) == everything
    if not cluster.failures:
        assert set(made.values()) == {1}
        if workload.score_s:
            scoring = ("score",) if cluster.reward_workers else ("score", "assist")
            assert count(*scoring) == dict.fromkeys(everything, 1)
    assert max(result.stale_fraction) <= policy.staleness + 1e-9
    assert result.fluid_bound_s <= result.makespan_s * (1 + 1e-9)
    assert no_worker_does_two_things_at_once(result)
    colocated = simulate_colocated(cluster, workload, num_steps=num_steps, seed=3)
    assert colocated.fluid_bound_s <= colocated.makespan_s * (1 + 1e-9)


def no_worker_does_two_things_at_once(result: SimulationResult) -> bool:
    by_worker: dict[str, list[SimulatedSpan]] = {}
    for span in sorted(result.spans, key=lambda span: (span.start_s, span.end_s)):
        by_worker.setdefault(span.worker, []).append(span)
    return all(
        before.end_s <= after.start_s + 1e-9
        for spans in by_worker.values()
        for before, after in zip(spans, spans[1:], strict=False)
    )


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_one_seed_gives_one_result(case: tuple[Cluster, Workload, SchedulingPolicy, int], seed: int) -> None:
    cluster, workload, policy, num_steps = case
    first, second = (simulate(cluster, workload, policy, num_steps=num_steps, seed=seed) for _ in range(2))
    assert first == second
    bare = simulate(cluster, workload, policy, num_steps=num_steps, seed=seed, record_spans=False)
    assert dataclasses.replace(first, spans=()) == bare


def test_jitter_gives_all_modes_the_same_work() -> None:
    work = Workload(num_groups=8, group_size=3, generate_s=1.0, update_s=1.0, jitter=0.5)
    modes = [mode for mode in ladder_modes(work) if mode.policy is not None]
    bounds = {round(mode.simulate(Cluster(2, 2), num_steps=2, seed=5).fluid_bound_s, 9) for mode in modes}
    assert len(bounds) == 1
    assert bounds != {round(modes[0].simulate(Cluster(2, 2), num_steps=2, seed=6).fluid_bound_s, 9)}


def test_lost_generators_cost_time_and_come_back() -> None:
    work = micro_batches(8, 1.0, 0.1)
    whole = simulate(Cluster(2, 1), work, OFF, num_steps=2)
    lost = simulate(Cluster(2, 1, failures=((1.5, "generator-1"),)), work, OFF, num_steps=2)
    back = simulate(Cluster(2, 1, failures=((1.5, "generator-1"),), restart_s=2.0), work, OFF, num_steps=2)
    assert whole.makespan_s == pytest.approx(2 * 4.2)
    # After 1.5 s two are made, one of them is trained and its maker's next one is lost.
    assert lost.makespan_s == pytest.approx((7.0 + 0.1) + (8.0 + 0.1))
    assert whole.makespan_s < back.makespan_s < lost.makespan_s


# ---- bound and ladder --------------------------------------------------------------------------------------


def test_fluid_bound_balances_generators_and_assisting_trainers() -> None:
    work = micro_batches(10, 3.0, 1.0, assist_s=1.0)
    # 30 (1 - x) = 10 + 10 x at x = 1/2.
    assert fluid_bound_s(ONE, work, num_steps=1) == pytest.approx(15.0)
    assert fluid_bound_s(Cluster(3, 1), work, num_steps=1) == pytest.approx(10.0)
    assert simulate(ONE, work, SchedulingPolicy("optimal"), num_steps=3).efficiency > 0.8


def test_many_small_micro_batches_come_near_the_fluid_bound() -> None:
    work = micro_batches(400, 1.0, 0.5, assist_s=1.0)
    assert simulate(ONE, work, SchedulingPolicy("optimal", 0.25), num_steps=4, record_spans=False).efficiency > 0.98


def test_each_rung_of_the_ladder_gains_on_a_balanced_cluster() -> None:
    work = Workload(
        num_groups=16, group_size=8, generate_s=3.0, score_s=0.1, update_s=2.0, optimizer_s=1.0, publish_s=1.0,
        load_s=2.0, switch_s=1.0, jitter=0.05,
    )  # fmt: skip
    modes = ladder_modes(work, one_timestep_update_s=3.5)
    results = {mode.name: mode.simulate(Cluster(4, 4), num_steps=5) for mode in modes}
    assert list(results) == ["colocated", "colocated +TSP", "naive", "+GAP", "+TSP", "+TAG", "+TCSS"]
    speeds = [results[name].samples_per_s for name in ("naive", "+GAP", "+TSP", "+TAG", "+TCSS")]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.9 * speeds[0]
    bubbles = [results[name].bubble_share for name in ("naive", "+GAP", "+TAG", "+TCSS")]
    assert bubbles == sorted(bubbles, reverse=True)


def test_ladder_leaves_out_what_is_not_used() -> None:
    work = micro_batches(4, 1.0, 1.0)
    modes = ladder_modes(work, trainer_assist="off", staleness=0)
    assert [mode.name for mode in modes] == ["colocated", "naive", "+GAP"]
    whole = dataclasses.replace(work, groups_per_micro_batch="all")
    assert [mode.name for mode in ladder_modes(whole, staleness=0.5)] == ["colocated", "naive", "+TAG", "+TCSS"]


# ---- size, timeline, wrong input ---------------------------------------------------------------------------


def test_events_of_a_large_cluster_grow_with_the_work_only() -> None:
    work = Workload(num_groups=1024, group_size=4, generate_s=1.0, update_s=0.001, load_s=0.5)
    for num_workers in (64, 1024):
        result = simulate(Cluster(num_workers, num_workers), work, OFF, num_steps=2, record_spans=False)
        num_slices, num_updates, num_loads = 2 * 4096, 2 * 1024, num_workers
        # Each step is added and started; the second step's weights are published and loaded.
        assert result.num_events == 2 * num_slices + num_updates + num_loads + 2 * 2 + 1


def test_busy_moving_and_idle_time_add_up() -> None:
    work = micro_batches(6, 1.0, 0.5, optimizer_s=0.3, publish_s=0.2, load_s=0.4, switch_s=0.25)
    result = simulate(Cluster(2, 2), work, SchedulingPolicy("static:2"), num_steps=3)
    for worker in result.workers:
        spans = [span for span in result.spans if span.worker == worker]
        moving_s = sum(span.end_s - span.start_s for span in spans if span.task in ("sync", "switch"))
        busy_s = sum(span.end_s - span.start_s for span in spans) - moving_s
        assert result.busy_s[worker] == pytest.approx(busy_s)
        assert result.moving_s[worker] == pytest.approx(moving_s)
        idle_s = result.makespan_s - busy_s - moving_s
        assert result.bubbles[worker] == pytest.approx(idle_s / result.makespan_s)


def test_timeline_has_the_form_of_a_real_run() -> None:
    from digenrl.callbacks import timeline
    from digenrl.strategies.driver import WorkerSpan
    from digenrl.strategies.span import Span

    work = micro_batches(4, 1.0, 1.0, score_s=0.1, load_s=0.1, optimizer_s=0.1, publish_s=0.1)
    result = simulate(Cluster(2, 1), work, SchedulingPolicy("optimal"), num_steps=2)
    real = [WorkerSpan(s.worker, s.task, s.detail, Span(s.start_s, s.end_s)) for s in result.spans]
    events = trace_events(result.spans, result.workers, name="digenrl", process=1)
    assert [event for event in events if event["name"] != "process_sort_index"] == timeline.trace_events(real)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generators": 0}, "`generators` counts workers that make samples and must be at least 1, got 0"),
        ({"trainers": 1.5}, "`trainers` counts workers that train and must be a whole number, got 1.5"),
        ({"generator_speeds": (1.0,)}, "`generator_speeds` gives a factor for each of the 2 generators, got 1"),
        ({"generator_speeds": (1.0, 0.0)}, "`generator_speeds` is the factor of a generator's speed and must be above"),
        ({"failures": ((1.0, "generator-2"),)}, "`failures` names no generator or reward worker.*'generator-2'"),
        ({"failures": ((1.0, "generator-0"), (2.0, "generator-1"))}, "`failures` must leave at least 1 of the 2 gene"),
        ({"restart_s": -1.0}, "`restart_s` is the time until a lost generator is back and must be at least 0, got -1"),
    ],
)
def test_wrong_clusters_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**{"generators": 2, "trainers": 1, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_size": 0}, "`group_size` counts samples per prompt and must be at least 1, got 0"),
        ({"groups_per_micro_batch": 3}, "`groups_per_micro_batch` must divide the 4 groups of a step, got 3; the nea"),
        ({"generate_s": 0.0}, "`generate_s` is the cost of a sample and must be above 0, got 0.0"),
        ({"load_s": float("nan")}, "`load_s` is the cost and must be at least 0, got nan"),
        ({"jitter": 9.0}, "`jitter` is the sigma of a lognormal factor, at most 2.0, got 9.0"),
    ],
)
def test_wrong_workloads_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**{"num_groups": 4, "group_size": 2, "generate_s": 1.0, "update_s": 1.0, **given})  # type: ignore[arg-type]


def test_at_least_one_step_is_simulated() -> None:
    with pytest.raises(ValueError, match="`num_steps` counts optimizer steps and must be at least 1, got 0"):
        simulate(ONE, micro_batches(1, 1.0, 1.0), OFF, num_steps=0)
