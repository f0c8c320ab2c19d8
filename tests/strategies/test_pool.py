"""What the pool sends to all workers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from tests.integration.toy_runs import fit
from tests.toy import ToyPolicy, level_reward


class Decoding(ToyPolicy):
    """Its decoder is frozen, so trainers do not publish it."""

    def build(self) -> None:
        super().build()
        self.decoder = nn.Linear(8, 8).requires_grad_(False)

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents.flatten(1)).sigmoid().view_as(latents).unsqueeze(1)


class OtherDecoder(Callback):
    """Replaces the decoder's weights after the first step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.rewards.append(float(trainer.callback_metrics["reward/mean"]))
        if trainer.global_step == 1:
            state = pl_module.state_dict()
            pl_module.load_state_dict(
                {name: torch.full_like(value, 0.5) if "decoder" in name else value for name, value in state.items()}
            )


def test_frozen_weights_that_are_loaded_in_mid_run_reach_reward_workers() -> None:
    rewards = []
    for reward_workers in (0, 1):
        callback = OtherDecoder()
        module = FlowGRPO(Decoding(), level_reward, group_size=4, num_steps=5, lr=1e-3, seed=0)
        strategy = DisaggregatedStrategy(engine="inline", reward_workers=reward_workers)
        fit(strategy, module=module, max_steps=2, callbacks=[callback])
        rewards.append(callback.rewards)
    assert rewards[1] == rewards[0]
    assert abs(rewards[0][1] - rewards[0][0]) > 0.01, "the decoder must matter"
