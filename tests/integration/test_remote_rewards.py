"""Whole runs whose reward is asked of a server: the same results, whatever becomes of the server meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptBatch
from digenrl.algorithms import FlowGRPO
from digenrl.rewards import RewardError
from digenrl.rewards.remote import connection
from digenrl.rewards.remote.connection import Backoff
from digenrl.rewards.remote.http import HTTPReward
from digenrl.strategies.driver import WorkerSpan
from tests.integration.toy_runs import fit
from tests.rewards.remote.served import ServerThread, served
from tests.toy import ToyPolicy, level_reward


class Steps(pl.Callback):
    """Keeps each step's mean reward and what its workers did."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.spans: list[WorkerSpan] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rewards.append(trainer.callback_metrics["reward/mean"].item())
        self.spans += getattr(trainer.strategy, "last_step_spans", ())


def run(reward: Any, strategy: DisaggregatedStrategy, **settings: Any) -> tuple[Steps, dict[str, Tensor]]:
    steps = Steps()
    _, _, weights = fit(strategy, module=grpo(reward, **settings), max_steps=3, callbacks=[steps])
    return steps, weights


def grpo(reward: Any, policy: ToyPolicy | None = None, **settings: Any) -> FlowGRPO:
    return FlowGRPO(
        policy or ToyPolicy(), reward, group_size=4, num_steps=5, timestep_fraction=0.8, lr=1e-3, seed=0, **settings
    )


def inline() -> DisaggregatedStrategy:
    return DisaggregatedStrategy(engine="inline", groups_per_micro_batch=1, trainer_assist="off")


def test_a_server_that_is_killed_in_mid_run_and_comes_back_changes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float | None] = []

    class Counted(Backoff):
        def pause_s(self, *args: Any, **kwargs: Any) -> float | None:
            pauses.append(super().pause_s(*args, **kwargs))
            return pauses[-1]

    monkeypatch.setattr(connection, "Backoff", partial(Counted, first_wait_s=0.01))
    expected, expected_weights = run(level_reward, inline())
    reached, gone, calls = threading.Event(), threading.Event(), []

    def dies(media: Tensor, prompts: PromptBatch) -> Tensor:
        calls.append(prompts.step)
        if len(calls) == 6:  # of 12: in the second step
            reached.set()
            gone.wait()
        return level_reward(media, prompts)

    first = ServerThread(dies)
    second: list[ServerThread] = []

    def kill_and_restart() -> None:
        reached.wait()
        first.kill()
        gone.set()
        while len(pauses) < 2:  # the second time there is nobody to connect to
            time.sleep(0.01)
        second.append(ServerThread(level_reward, port=first.port))

    other = threading.Thread(target=kill_and_restart)
    other.start()
    try:
        with caplog.at_level(logging.WARNING):
            steps, weights = run(HTTPReward(first.url), inline(), on_reward_error="raise")
    finally:
        reached.set()
        other.join()
        for server in second:
            server.stop()
    assert calls == [0] * 4 + [1] * 2, "the first server was asked for six micro-batches"
    assert steps.rewards == expected.rewards
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


def test_generation_goes_on_while_a_slow_server_scores() -> None:
    def slow(media: Tensor, prompts: PromptBatch) -> Tensor:
        time.sleep(0.05)
        return level_reward(media, prompts)

    strategy = DisaggregatedStrategy(reward_workers=1, groups_per_micro_batch=1, trainer_assist="off")
    with served(slow) as server:
        steps, _ = run(HTTPReward(server.url), strategy)
    made = [entry.span for entry in steps.spans if entry.task == "generate"]
    scored = [entry.span for entry in steps.spans if entry.task == "score"]
    assert {entry.worker for entry in steps.spans if entry.task == "score"} == {"reward-worker-0"}
    assert len(made) == len(scored) == 12
    begun_meanwhile = [span for span in made if any(other.start_s < span.start_s < other.end_s for other in scored)]
    assert len(begun_meanwhile) >= 3, "samples were made only when nothing waited for its reward"
    assert steps.rewards == pytest.approx(run(level_reward, inline())[0].rewards, abs=1e-6)


def test_a_server_that_is_not_there_ends_the_run_before_anything_is_generated() -> None:
    with served(level_reward) as server:
        pass
    generated: list[int] = []

    class Noted(ToyPolicy):
        def encode(self, prompts: Any) -> Any:
            generated.append(len(prompts))
            return super().encode(prompts)

    module = grpo(HTTPReward(server.url, "level_reward"), Noted())
    with pytest.raises(RewardError, match="`level_reward` cannot be set up: .* no server .*`digenrl serve-reward"):
        fit(inline(), module=module)
    assert generated == []
