"""Rewards that fail: what becomes of their samples, and of the gradient of the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader

from digenrl import DisaggregatedStrategy, PromptBatch
from digenrl.algorithms import DGPO, DiffusionNFT, FlowGRPO
from digenrl.module import NonFiniteGradientError, as_prompts
from digenrl.rewards import RewardError, SeveralRewards, score_samples
from digenrl.types import TimestepBatch
from tests.integration.toy_runs import fit, relative_difference, toy_data
from tests.toy import ToyPolicy, level_reward, toy_module

TOLERANCE = 1e-6


class Flaky:
    """The level reward, which fails for one sample of some prompts; an exception is raised for its whole batch."""

    def __init__(self, bad: tuple[str, ...], how: Any = math.nan, sample: int = 1) -> None:
        self.bad, self.how, self.sample = bad, how, sample

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
        rewards: list[Any] = level_reward(media, prompts).tolist()
        for row, (text, index) in enumerate(zip(prompts.texts, prompts.sample_indices, strict=True)):
            if text in self.bad and index == self.sample:
                if isinstance(self.how, Exception):
                    raise self.how
                rewards[row] = self.how
        return rewards


def calm(media: Tensor, prompts: PromptBatch) -> Tensor:
    return -100 * media.flatten(1).std(1)


def module_with(reward: Any, algorithm: type = FlowGRPO, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"group_size": 4, "num_steps": 5, "lr": 1e-3, "seed": 0, "on_reward_error": "drop_group"}
    if issubclass(algorithm, FlowGRPO):
        defaults |= {"timestep_fraction": 0.8, "clip_range": 1e-2}
    elif algorithm is DiffusionNFT:
        defaults |= {"num_trained_timesteps": 3}
    module = algorithm(ToyPolicy(), reward, **{**defaults, "reward_retries": 1, **settings})
    module.reward_errors = replace(module.reward_errors, wait_s=0.0)
    return module


STRATEGIES: dict[str, dict[str, Any]] = {
    "one generator": {"engine": "inline"},
    "two groups a micro-batch": {"engine": "inline", "groups_per_micro_batch": 2, "timestep_batch_size": 1},
    "two of each": {"generators": 2, "trainers": 2, "generation_batch_size": 1, "trainer_assist": "off"},
    "reward workers": {"engine": "inline", "reward_workers": 1, "trainer_assist": "static:1"},
}


@pytest.mark.parametrize("algorithm", [FlowGRPO, DGPO])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dropped_group_leaves_the_gradient_of_the_step_without_it(name: str, algorithm: type) -> None:
    # SGD makes the weights' change the gradient itself; both runs have the seeds of the same rows.
    def run(strategy: Any, reward: Any, data: Any) -> dict[str, Tensor]:
        module = module_with(reward, algorithm)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
        return fit(strategy, module=module, data=DataLoader(data, batch_size=len(data), collate_fn=list))[2]

    colocated = run("auto", level_reward, ["low", "middle", "high"])
    before = fit("auto", module=module_with(level_reward, algorithm, lr=0.0, weight_decay=0.0))[2]
    dropped = run(DisaggregatedStrategy(**STRATEGIES[name]), Flaky(("top",)), ["low", "middle", "high", "top"])
    change = {key: colocated[key] - before[key] for key in before}
    assert relative_difference({key: dropped[key] - before[key] for key in before}, change) <= TOLERANCE
    assert max(value.abs().max() for value in change.values()) > 1e-4


@pytest.mark.parametrize("how", [math.nan, math.inf, None, "high", ValueError("no face found")])
def test_colocated_and_disaggregated_agree_whatever_is_wrong(how: Any) -> None:
    reward = Flaky(("middle",), how)
    _, _, colocated = fit("auto", module=module_with(reward))
    trainer, _, weights = fit(DisaggregatedStrategy(engine="inline"), module=module_with(reward))
    assert relative_difference(weights, colocated) <= TOLERANCE
    assert trainer.callback_metrics["reward/dropped_groups"] == 1


def test_one_of_several_rewards_drops_the_group() -> None:
    reward = SeveralRewards([calm, Flaky(("middle", "top"))])
    _, _, colocated = fit("auto", module=module_with(reward))
    trainer, _, weights = fit(DisaggregatedStrategy(engine="inline"), module=module_with(reward))
    assert relative_difference(weights, colocated) <= TOLERANCE
    assert trainer.callback_metrics["reward/dropped_groups"] == 2


@pytest.mark.parametrize("reward", [Flaky(("low",)), SeveralRewards([calm, Flaky(("low",))], mode="sum")])
def test_the_std_of_the_step_is_that_of_the_groups_that_are_left(reward: Any) -> None:
    settings = {"advantage_scope": "batch", "advantage_clip": 100.0}
    _, _, colocated = fit("auto", module=module_with(reward, **settings))
    _, _, streamed = fit(DisaggregatedStrategy(engine="inline"), module=module_with(reward, **settings))
    assert relative_difference(streamed, colocated) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_a_step_with_no_group_left_does_not_move_the_weights(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    everything = Flaky(("low", "middle", "high", "top"))
    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    before = fit("auto", module=module_with(level_reward, lr=0.0, weight_decay=0.0))[2]
    trainer, _, after = fit(chosen, module=module_with(everything, weight_decay=0.5))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert trainer.callback_metrics["reward/dropped_groups"] == 4
    assert "reward `Flaky` for prompt 'low' returned nan; left out with its group." in caplog.text


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_three_steps_in_a_row_with_no_group_left_end_the_run(strategy: str) -> None:
    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    module = module_with(Flaky(("low", "middle", "high", "top")))
    with pytest.raises(RewardError, match="failed for every group of 3 steps in a row"):
        fit(chosen, module=module, max_steps=5)


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
@pytest.mark.parametrize("policy", ["raise", "retry"])
def test_without_dropping_the_run_ends_and_names_reward_and_prompt(policy: str, strategy: str) -> None:
    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    module = module_with(Flaky(("high",), None), on_reward_error=policy)
    with pytest.raises(Exception, match="reward `Flaky` returned None for 1 of .*'high'"):
        fit(chosen, module=module)


class BackAfter:
    """Fails until a file has as many lines as it is told to."""

    def __init__(self, path: Path, num_failures: int) -> None:
        self.path, self.num_failures = path, num_failures

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        with self.path.open("a+") as calls:
            calls.seek(0)
            num_calls = len(calls.readlines())
            calls.write("\n")
        if num_calls < self.num_failures:
            raise ConnectionError("the server is starting")
        return level_reward(media, prompts)


def test_a_reward_that_comes_back_leaves_no_trace(tmp_path: Path) -> None:
    module = module_with(BackAfter(tmp_path / "calls", 2), on_reward_error="retry", reward_retries=2)
    _, _, weights = fit(DisaggregatedStrategy(trainer_assist="off"), module=module)
    _, _, expected = fit(DisaggregatedStrategy(trainer_assist="off"), module=module_with(level_reward))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


class Poisoned(ToyPolicy):
    """Starts one sample of one prompt from infinity, as a policy does that has overflown."""

    def initial_latents(self, seeds: Any) -> Tensor:
        latents = super().initial_latents(seeds)
        latents[[seed == self.seed for seed in seeds]] = math.inf
        return latents


@pytest.mark.parametrize("algorithm", [FlowGRPO, DGPO, DiffusionNFT])
@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_what_made_a_reward_fail_does_not_reach_the_weights(strategy: str, algorithm: type) -> None:
    def run(policy: Any, reward: Any) -> dict[str, Tensor]:
        module = module_with(reward, algorithm)
        module.policy = policy
        policy.seed = module.prompt_batch(["low", "middle", "high", "top"]).seeds[5]
        chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
        return fit(chosen, module=module, data=toy_data(shuffle=False))[2]

    poisoned = run(Poisoned(), level_reward)
    assert all(value.isfinite().all() for value in poisoned.values())
    assert relative_difference(poisoned, run(ToyPolicy(), Flaky(("middle",)))) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_metrics_are_those_of_the_groups_that_are_left(strategy: str) -> None:
    class Levels(FlowGRPO):
        def timestep_loss(self, batch: TimestepBatch) -> Any:
            self.track("levels", torch.tensor([float(text == "low") for text in batch.prompts.texts]))
            return super().timestep_loss(batch)

    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    trainer, *_ = fit(chosen, module=module_with(Flaky(("high", "top")), Levels))
    assert trainer.callback_metrics["levels"] == 0.5


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_validation_leaves_failed_samples_out_and_an_empty_one_is_an_error(strategy: str) -> None:
    def validate(reward: Any) -> Any:
        chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
        data = toy_data(validation_prompts=["low", "middle"])
        return fit(chosen, module=module_with(reward, lr=0.0), data=data)[0].callback_metrics["val/reward/mean"]

    without_low = validate(Flaky(("low",), 0.0, sample=0))
    torch.testing.assert_close(validate(Flaky(("low",), sample=0)), 2 * without_low)
    with pytest.raises(RewardError, match="failed for all validation samples"):
        validate(Flaky(("low", "middle"), sample=0))


@pytest.mark.parametrize("settings", [{"generators": 2}, {"generators": 2, "reward_workers": 1}])
def test_a_share_of_a_validation_may_be_empty(settings: dict[str, Any]) -> None:
    def validate(strategy: Any, **data_settings: Any) -> Any:
        data = toy_data(validation_prompts=["low", "middle"], **data_settings)
        module = module_with(Flaky(("low",), sample=0), lr=0.0)
        return fit(strategy, module=module, data=data)[0].callback_metrics["val/reward/mean"]

    whole = validate("auto")
    torch.testing.assert_close(validate(DisaggregatedStrategy(engine="inline", **settings)), whole)
    torch.testing.assert_close(validate("auto", validation_batch_size=1), whole)


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_dropping_is_refused_where_batches_of_a_window_would_be_weighed_wrongly(strategy: str) -> None:
    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    with pytest.raises(ValueError, match="`on_reward_error` must be raise or retry with `accumulate_grad_batches` 2"):
        fit(chosen, module=module_with(level_reward), accumulate_grad_batches=2)
    chosen = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    scheduler = GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="`on_reward_error` must be raise or retry with `accumulate_grad_batches` 2"):
        fit(chosen, module=module_with(level_reward), callbacks=[scheduler])


def test_a_gradient_that_is_not_finite_ends_a_colocated_run_before_the_weights_change() -> None:
    module = module_with(level_reward)
    loss = module.timestep_loss
    module.timestep_loss = lambda batch: loss(batch) * math.inf
    with pytest.raises(NonFiniteGradientError, match="the weights are unchanged"):
        fit("auto", module=module)
    assert all(value.isfinite().all() for value in module.state_dict().values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"on_reward_error": "ignore"}, "must be raise, retry or drop_group"), ({"reward_retries": -1}, "at least 0")],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_module(**settings)


class Once:
    """The level reward in the first step; fails for everything later."""

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return level_reward(media, prompts) if prompts.step == 0 else torch.full((len(prompts),), math.nan)


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_the_momentum_of_earlier_steps_does_not_move_the_weights_in_an_empty_one(strategy: str) -> None:
    def run(max_steps: int) -> dict[str, Tensor]:
        chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
        return fit(chosen, module=module_with(Once(), weight_decay=0.5), max_steps=max_steps)[2]

    after_one, after_two = run(1), run(2)
    assert all(torch.equal(after_one[name], after_two[name]) for name in after_one)


@pytest.mark.parametrize("strategy", ["auto", "disaggregated"])
def test_a_step_with_no_group_left_logs_no_value_of_the_step_before(strategy: str) -> None:
    chosen: Any = DisaggregatedStrategy(engine="inline") if strategy != "auto" else strategy
    metrics = fit(chosen, module=module_with(Once()), max_steps=2)[0].callback_metrics
    assert metrics["reward/dropped_groups"] == 4
    for name in ("reward/mean", "reward/Once", "reward/zero_std_group_frac", "advantage/abs_mean", "loss"):
        assert math.isnan(metrics[name]), name
    assert math.isnan(metrics["ratio/max_abs_dev"])


def test_a_wait_looks_for_signals() -> None:
    class EndedError(Exception):
        pass

    def poll() -> None:
        raise EndedError

    policy = replace(module_with(level_reward).reward_errors, on_error="retry", wait_s=3600.0)
    prompts = PromptBatch.for_validation(as_prompts(["low"]), seed=0)
    with pytest.raises(EndedError):
        score_samples(lambda media, prompts: [None], torch.zeros(1, 1, 2, 4), prompts, policy, poll=poll)
