"""How well the simulator foretells a real run: digits with tasks of known durations, on one generator and one trainer.

    python -m benchmarks.calibration

Each task sleeps until it has lasted its duration, so that the machine's own speed does not matter. The exchange of
weights and the optimizer step are taken from the run's profile. Prints seconds per step, real and simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptData, Trainer
from digenrl.algorithms import FlowGRPO
from digenrl.scheduling import SchedulingPolicy
from digenrl.scheduling.simulate import Cluster, Workload, simulate
from digenrl.types import PromptBatch, TimestepBatch, Trajectory
from examples.digits.policy import DIGIT_WORDS, DigitsPolicy

GROUP_SIZE = 8
NUM_GROUPS = 8
GENERATE_S, SCORE_S = 0.24, 0.02
"""Seconds of a slice, one group."""
NUM_STEPS = 12
WARM_UP = 3


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """Sleep away what is left of `seconds` when the block is done."""
    end_s = time.monotonic() + seconds
    yield
    time.sleep(max(end_s - time.monotonic(), 0.0))


class PacedFlowGRPO(FlowGRPO):
    """FlowGRPO whose tasks have the durations they are given."""

    update_s = 0.0

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Sample, in `GENERATE_S` per group."""
        with lasting(GENERATE_S * len(prompts) / GROUP_SIZE):
            return super().rollout(prompts)

    def score(self, trajectory: Trajectory) -> Tensor:
        """Score, in `SCORE_S` per group."""
        with lasting(SCORE_S * len(trajectory) / GROUP_SIZE):
            return super().score(trajectory)

    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Compute the loss and sleep, so that with its gradient, about 15 ms, it takes `update_s` per group."""
        with lasting(self.update_s - 0.015):
            return super().timestep_loss(batch)


def brightness(media: Tensor, prompts: PromptBatch) -> Tensor:
    """Reward bright samples."""
    return media.flatten(1).mean(1)


class StepClock(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Note the time."""
        self.ends_s.append(time.monotonic())


def real_and_simulated(policy: SchedulingPolicy, update_s: float) -> tuple[float, float]:
    """Run the job and simulate it; returns mean seconds per step of both."""
    module = PacedFlowGRPO(DigitsPolicy(), brightness, group_size=GROUP_SIZE, num_steps=4, timestep_fraction=0.5)
    module.update_s = update_s
    strategy = DisaggregatedStrategy(
        trainer_assist=policy.trainer_assist, staleness=policy.staleness, staleness_mode=policy.staleness_mode
    )
    clock = StepClock()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=NUM_STEPS,
        callbacks=[clock],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptData(list(DIGIT_WORDS), prompts_per_step=NUM_GROUPS))
    profile = strategy.profile()
    strategy.shutdown()
    assert profile is not None, "the run has taken steps"
    workload = Workload(
        num_groups=NUM_GROUPS,
        group_size=GROUP_SIZE,
        generate_s=GENERATE_S / GROUP_SIZE,
        score_s=SCORE_S / GROUP_SIZE,
        update_s=profile.update_s,
        load_s=profile.load_s,
        optimizer_s=profile.optimizer_s,
        publish_s=profile.publish_s,
    )
    simulated = simulate(Cluster(generators=1, trainers=1), workload, policy, num_steps=NUM_STEPS)
    real_s = (clock.ends_s[-1] - clock.ends_s[WARM_UP - 1]) / (NUM_STEPS - WARM_UP)
    return real_s, sum(simulated.step_s[WARM_UP:]) / (NUM_STEPS - WARM_UP)


def main() -> None:
    """Compare real and simulated steps of four policies and two workloads."""
    torch.set_num_threads(1)
    table = Table(title="Seconds per step, one generator and one trainer")
    for column in ("update / generate", "policy", "real", "simulated", "difference"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    policies = {
        "pipelined": SchedulingPolicy(),
        "assisted, search": SchedulingPolicy("search"),
        "assisted, optimal": SchedulingPolicy("optimal"),
        "assisted and stale 0.25": SchedulingPolicy("optimal", 0.25),
    }
    for update_s in (0.08, 0.24):
        for name, policy in policies.items():
            real_s, simulated_s = real_and_simulated(policy, update_s)
            difference = real_s / simulated_s - 1
            table.add_row(
                f"{update_s / GENERATE_S:.2f}", name, f"{real_s:.3f}", f"{simulated_s:.3f}", f"{difference:+.1%}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
