"""Advantages that the std of the whole step divides, while its groups are trained one by one."""

from __future__ import annotations

import logging
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import DGPO, FlowGRPO
from digenrl.rewards import SeveralRewards
from digenrl.types import RowLosses
from tests.algorithms.cases import make
from tests.integration.toy_runs import fit, largest_difference, toy_data
from tests.rewards.test_several import calm
from tests.toy import ToyPolicy, level_reward


def streamed(**settings: Any) -> DisaggregatedStrategy:
    return DisaggregatedStrategy(engine="inline", groups_per_micro_batch=1, **settings)


def test_logged_advantages_are_those_of_the_whole_step() -> None:
    ours, _, _ = fit(streamed(), module=make("FlowGRPO-batch"))
    theirs, _, _ = fit("auto", module=make("FlowGRPO-batch"))
    sizes = [trainer.callback_metrics["advantage/abs_mean"].item() for trainer in (ours, theirs)]
    assert sizes[0] == pytest.approx(sizes[1])


class OnlyBetter(FlowGRPO):
    """Homogeneous in the advantages, and not 0 on average as PPO's surrogate is before the first update."""

    def timestep_loss(self, batch: Any) -> Any:
        losses = -batch.advantages.clamp(min=0) * self.log_probs(batch)
        return RowLosses(losses, torch.full_like(losses, 0.25))


@pytest.mark.parametrize("advantage_clip", [5.0, 0.5])
def test_the_logged_loss_is_that_of_the_whole_steps_advantages(advantage_clip: float) -> None:
    settings: dict[str, Any] = {"advantage_scope": "batch", "group_size": 4, "num_steps": 5, "seed": 0}

    def loss(strategy: Any) -> float:
        module = OnlyBetter(ToyPolicy(), level_reward, advantage_clip=advantage_clip, **settings)
        trainer, _, _ = fit(strategy, module=module)
        value: float = trainer.callback_metrics["loss"].item()
        return value

    assert loss(streamed()) == pytest.approx(loss("auto"), rel=1e-5)


def test_gradient_clipping_sees_the_scaled_gradient() -> None:
    settings: dict[str, Any] = {"gradient_clip_val": 1e-3, "max_steps": 3}
    ours, _, our_weights = fit(streamed(), module=make("FlowGRPO-batch-KL"), **settings)
    theirs, _, their_weights = fit("auto", module=make("FlowGRPO-batch-KL"), **settings)
    norms = [trainer.callback_metrics["grad_norm"].item() for trainer in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert largest_difference(our_weights, their_weights) <= 1e-6


def test_a_step_whose_advantages_are_clipped_is_trained_again_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="digenrl"):
        trainer, _, _ = fit(streamed(), module=make("FlowGRPO-batch-clipped"), max_steps=3)
    said = [record for record in caplog.records if "advantage_clip" in record.message]
    assert len(said) == 1
    assert trainer.global_step == 3


def test_nothing_is_trained_again_where_no_advantage_is_clipped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="digenrl"):
        fit(streamed(), module=make("FlowGRPO-batch"), max_steps=2)
    assert not [record for record in caplog.records if "advantage_clip" in record.message]


def test_equal_rewards_everywhere_leave_the_weights_alone() -> None:
    module = make("FlowGRPO-batch", weight_decay=0.0)
    module._reward = (lambda media, prompts: media.flatten(1).sum(1) * 0,)
    before = make("FlowGRPO-batch")
    before.configure_model()
    _, _, after = fit(streamed(), module=module)
    assert largest_difference(after, before.state_dict()) == 0


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (lambda: DGPO(ToyPolicy(), level_reward, group_size=4, advantage_scope="batch"), {}, "with DGPO: its gradient"),
        (lambda: make("FlowGRPO-batch"), {"accumulate_grad_batches": 2}, "`accumulate_grad_batches` 2"),
        (lambda: make("FlowGRPO-batch", reward=SeveralRewards([level_reward, calm])), {}, "with several rewards"),
    ],
)
def test_where_streaming_is_not_exact_it_is_refused_with_the_remedy(
    module: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"`groups_per_micro_batch: all` .*{message}"):
        fit(streamed(), module=module(), **settings)


def test_any_algorithm_may_wait_for_the_whole_step() -> None:
    def module() -> DGPO:
        settings: dict[str, Any] = {"num_steps": 5, "num_trained_timesteps": 2, "seed": 0, "lr": 1e-3}
        return DGPO(ToyPolicy(), level_reward, group_size=4, advantage_scope="batch", **settings)

    strategy = DisaggregatedStrategy(engine="inline", groups_per_micro_batch="all")
    _, _, ours = fit(strategy, module=module(), max_steps=2, data=toy_data())
    _, _, theirs = fit("auto", module=module(), max_steps=2, data=toy_data())
    assert largest_difference(ours, theirs) <= 1e-5


def test_an_algorithm_with_advantages_of_its_own_is_refused_where_they_would_be_left_out() -> None:
    class Positive(FlowGRPO):
        def advantages(self, rewards: Any, group_ids: Any) -> Any:
            return super().advantages(rewards, group_ids).clamp(min=0)

    module = Positive(ToyPolicy(), level_reward, group_size=4, num_steps=5, advantage_scope="batch")
    with pytest.raises(ValueError, match="`groups_per_micro_batch: all` with Positive: it defines `advantages`"):
        fit(streamed(), module=module)


def test_metrics_of_rollouts_survive_a_step_that_is_trained_again() -> None:
    class Tracking(FlowGRPO):
        def rollout(self, prompts: Any) -> Any:
            self.track("rollouts/one", torch.ones(len(prompts)))
            return super().rollout(prompts)

    settings: dict[str, Any] = {"advantage_scope": "batch", "advantage_clip": 0.5, "group_size": 4, "num_steps": 5}
    trainer, _, _ = fit(streamed(), module=Tracking(ToyPolicy(), level_reward, **settings))
    assert trainer.callback_metrics["rollouts/one"].item() == 1.0


def test_a_regularizer_without_gradient_is_no_error() -> None:
    class Constant(FlowGRPO):
        def timestep_loss(self, batch: Any) -> Any:
            losses = super().timestep_loss(batch)
            return RowLosses(losses, torch.ones_like(losses))

    settings: dict[str, Any] = {"advantage_scope": "batch", "group_size": 4, "num_steps": 5, "lr": 1e-3, "seed": 0}
    _, _, ours = fit(streamed(), module=Constant(ToyPolicy(), level_reward, **settings))
    _, _, theirs = fit("auto", module=Constant(ToyPolicy(), level_reward, **settings))
    assert largest_difference(ours, theirs) <= 1e-5


DATA_PARALLEL = """
import os
import sys
import torch
from digenrl import Prompt
from tests.algorithms.cases import make
from tests.integration.toy_runs import fit
from tests.toy import WORDS

class Batches:
    def __init__(self, prompts):
        self.prompts = prompts

    def __iter__(self):
        return iter([self.prompts] * 2)

def train(rank, ranks):
    share = len(WORDS) // ranks
    prompts = [Prompt(word, uid) for uid, word in enumerate(WORDS)][rank * share : (rank + 1) * share]
    module = make("FlowGRPO-batch", lr=1e-2)
    strategy, devices = ("ddp", ranks) if ranks > 1 else ("auto", 1)
    _, _, weights = fit(strategy, module=module, data=Batches(prompts), devices=devices, max_steps=2)
    return weights

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    weights = train(rank, int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        torch.save(weights, sys.argv[1])
"""


def test_data_parallel_ranks_share_the_std_of_the_whole_step(tmp_path: Path) -> None:
    script, saved = tmp_path / "ranks.py", tmp_path / "weights.pt"
    script.write_text(DATA_PARALLEL)
    shared = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(saved)],
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
        )
        for rank in ("0", "1")
    ]
    alone = runpy.run_path(str(script))["train"](rank=0, ranks=1)
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert largest_difference(torch.load(saved), alone) <= 1e-5


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
