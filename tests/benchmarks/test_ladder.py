"""The ladder runs and its figures make sense; nothing here asserts a time."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import jobs, ladder
from benchmarks.baselines.flow_grpo_loop import FlowGRPOLoop
from benchmarks.contestants import Round, StageCosts, bubble_share, stage_costs
from digenrl.algorithms import FlowGRPO
from digenrl.diffusion.noise import sample_noise
from digenrl.strategies.driver import WorkerSpan
from digenrl.strategies.span import Span
from digenrl.types import PromptBatch
from tests.integration.toy_runs import fit, largest_difference

EPS = 1e-3  # of AdamW: steps then depend smoothly on gradients near 0, and rounding cannot turn their sign
LR = 1e-3
PROMPTS = jobs.PROMPTS[:3]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Smooth:
    """Replaces the optimizer by one whose weights can be compared."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=jobs.WEIGHT_DECAY, eps=EPS)  # type: ignore[attr-defined]


class SmoothFlowGRPO(Smooth, FlowGRPO):
    pass


class SmoothBestAndWorst(Smooth, jobs.BestAndWorst):
    pass


class Steps:
    """A data loader of one batch again and again; a list of lists would be several loaders to Lightning."""

    def __iter__(self) -> Any:
        while True:
            yield list(PROMPTS)


def make_smooth_module(algorithm: type[FlowGRPO]) -> FlowGRPO:
    settings = {"group_size": 8, "num_steps": 10, "timestep_fraction": 0.5, "clip_range": 1e-2, "seed": 0}
    return algorithm(jobs.SmallSD3Policy(jobs.SIZES["S"]), jobs.brightness, **settings)


def digenrl_noise(step: int, group: int, index: int | None) -> Tensor:
    """Noise of digenrl's samples, for the hand-written loop."""
    prompts = SmoothFlowGRPO.prompt_batch(make_smooth_module(SmoothFlowGRPO), list(PROMPTS), step=step)
    seeds = prompts.seeds[group * 8 : (group + 1) * 8]
    stream = "initial" if index is None else f"step {index}"
    return sample_noise(seeds, stream, jobs.SmallSD3Policy.latent_shape)


@pytest.mark.parametrize("batches_timesteps", [False, True])
@pytest.mark.parametrize(("algorithm", "num_extremes"), [(SmoothFlowGRPO, None), (SmoothBestAndWorst, 2)])
def test_hand_written_loop_trains_as_digenrl_does(
    algorithm: type[FlowGRPO], num_extremes: int | None, batches_timesteps: bool
) -> None:
    module = make_smooth_module(algorithm)
    module.configure_model()
    before = {name: value.clone() for name, value in module.policy.state_dict().items()}
    policy = jobs.SmallSD3Policy(jobs.SIZES["S"])
    policy.build()
    policy.load_state_dict(before)
    loop = FlowGRPOLoop(
        policy,
        jobs.brightness_reward,
        PROMPTS,
        batches_timesteps=batches_timesteps,
        num_extremes=num_extremes,
        clip_range=1e-2,
        lr=LR,
        eps=EPS,
        noise=digenrl_noise,
    )
    for _ in range(2):
        loop.step()
    _, module, _ = fit("auto", module=module, data=Steps(), max_steps=2)
    after = module.policy.state_dict()
    assert largest_difference(before, after) > 1e-4
    assert largest_difference(policy.state_dict(), after) <= 1e-5


@pytest.mark.parametrize("size", jobs.SIZES)
def test_sizes_build_and_keep_the_shape_of_latents(size: str) -> None:
    policy = jobs.SmallSD3Policy(jobs.SIZES[size])
    policy.build()
    latents = torch.randn(2, *policy.latent_shape)
    velocity = policy(latents, torch.tensor([0.9, 0.3]), policy.encode(jobs.PROMPTS[:2]))
    assert velocity.shape == latents.shape
    assert policy.decode(latents).shape == (2, 3, 16, 16)


def test_extreme_rows_are_the_best_and_worst_of_each_group() -> None:
    advantages = torch.tensor([0.1, -2.0, 0.3, 3.0, 5.0, 4.0, 3.0, -1.0])
    assert jobs.extreme_rows(advantages, group_size=4, num_extremes=1).tolist() == [1, 3, 4, 7]


def test_slow_process_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module = jobs.make_module("S", "mixed-speed")
    module.configure_model()
    prompts: PromptBatch = module.prompt_batch(list(jobs.PROMPTS[:1]), step=0)
    fast = module.rollout(prompts)
    monkeypatch.setenv(jobs.SLOW_PROCESS, "1")
    assert torch.equal(module.rollout(prompts).final_latents, fast.final_latents)


def test_rungs_and_ranks_give_sane_figures() -> None:
    contestants = ("naive", "+TCSS", "batched loop")
    result = ladder.measure_job(
        "S", "reference", num_steps=1, num_rounds=1, num_warm_up=1, contestants=contestants, num_tries=1
    )
    assert tuple(row.contestant for row in result.rows) == contestants
    for row in result.rows:
        assert row.samples_per_s > 0
        assert row.step_s == pytest.approx(jobs.NUM_SAMPLES / row.samples_per_s)
        assert row.fluid_bound_s is not None
        assert row.efficiency is not None
        assert 0 < row.efficiency <= 1.05
        assert 0 <= row.others_cpu <= 1
    naive, stale, loop = result.rows
    assert naive.ratio_to_naive == pytest.approx(1.0)
    assert loop.ratio_to_batched_loop == pytest.approx(1.0)
    assert set(naive.bubbles) == {"generator-0", "trainer-0"}
    assert all(0 <= share < 1 for share in (*naive.bubbles.values(), *stale.bubbles.values()))
    assert naive.stale_fraction == 0
    assert stale.stale_fraction <= 0.25
    check_schema(json.loads(json.dumps(ladder.as_json([result]))))
    assert ladder.table_of(result).row_count == 3


def check_schema(report: dict[str, Any]) -> None:
    """All fields are there and all numbers are finite."""
    assert set(report) == {"machine", "job", "results"}
    (result,) = report["results"]
    assert set(result) == {entry.name for entry in fields(ladder.JobResult)}
    for row in result["rows"]:
        assert set(row) == {entry.name for entry in fields(ladder.Row)}
        assert set(row["costs"]) == {entry.name for entry in fields(StageCosts)}
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in numbers)


def test_stage_costs_count_samples_of_slices() -> None:
    def span(worker: str, task: str, detail: str, start_s: float, end_s: float) -> WorkerSpan:
        return WorkerSpan(worker, task, detail, Span(start_s, end_s))

    spans = [
        span("generator-0", "generate", "samples 0-7 of step 3", 0.0, 4.0),
        span("generator-0", "score", "samples 0-7 of step 3", 4.0, 4.8),
        span("trainer-0", "update", "micro-batch 0 of step 3", 5.0, 6.28),
        span("trainer-0", "optimizer", "version 4", 6.5, 7.0),
        span("trainer-0", "sync", "version 4", 7.0, 7.25),
        span("generator-0", "sync", "version 4", 7.25, 8.0),
    ]
    costs = stage_costs(spans, num_steps=1)
    assert (costs.generate_s, costs.score_s, costs.update_s) == pytest.approx((0.5, 0.1, 0.02))
    assert (costs.optimizer_s, costs.publish_s, costs.load_s) == pytest.approx((0.5, 0.25, 0.75))
    assert costs.assist_s is None
    assert bubble_share(spans, "generator-0", 2.0, 8.0) == pytest.approx(1 - 3.55 / 6)


def test_bound_of_equal_ranks_is_half_of_the_work() -> None:
    costs = StageCosts(0.02, 0.0, 0.01, None, 0.04, 0.0, 0.0)
    assert ladder.bound_s("batched loop", Round(wall_s=(1.0,), costs=costs)) == pytest.approx(1.0)
