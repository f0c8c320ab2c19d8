"""The 8-bit optimizer through whole runs; its first step compiles for half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from digenrl.callbacks import RunCheckpoint
from tests.integration.toy_runs import fit, largest_difference, relative_difference
from tests.toy import ToyPolicy, level_reward

torchao = pytest.importorskip("torchao")


def eight_bit() -> FlowGRPO:
    # Tensors of at least 4096 numbers are quantized.
    return FlowGRPO(ToyPolicy(64), level_reward, group_size=4, num_steps=4, seed=0, optimizer="adamw_8bit")


@pytest.mark.parametrize(("engine", "offload_optimizer"), [("inline", False), ("local", True)])
def test_its_state_survives_checkpoint_and_resume(tmp_path: Path, engine: Any, offload_optimizer: bool) -> None:
    def run(max_steps: int, **settings: Any) -> dict[str, torch.Tensor]:
        strategy = DisaggregatedStrategy(engine=engine, trainer_assist="off", offload_optimizer=offload_optimizer)
        return fit(strategy, module=eight_bit(), max_steps=max_steps, **settings)[2]

    whole = run(4)
    run(2, enable_checkpointing=True, default_root_dir=tmp_path, callbacks=[RunCheckpoint()])
    path = next(iter(tmp_path.rglob("*.ckpt")))
    state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    assert type(state["policy.blocks_.0.weight"]["exp_avg"]).__name__ == "OptimState8bit"
    assert largest_difference(run(4, ckpt_path=str(path)), whole) == 0


def test_it_is_close_to_the_optimizer_in_full_precision() -> None:
    weights = fit(DisaggregatedStrategy(engine="inline"), module=eight_bit(), max_steps=3)[2]
    module = FlowGRPO(ToyPolicy(64), level_reward, group_size=4, num_steps=4, seed=0)
    expected = fit(DisaggregatedStrategy(engine="inline"), module=module, max_steps=3)[2]
    assert 0 < relative_difference(weights, expected) <= 1e-2
