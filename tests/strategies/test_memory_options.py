"""Options that save memory, in whole runs: they change what is kept where and how precisely, not what is learnt."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from digenrl.callbacks import RunCheckpoint
from tests.integration.toy_runs import fit, relative_difference
from tests.strategies.test_timestep_batch_size import SmallMemory, module
from tests.toy import ToyCondition, ToyPolicy, level_reward, toy_module


@cache
def usual_weights() -> dict[str, Tensor]:
    """Of the toy after three steps."""
    return fit(DisaggregatedStrategy(engine="inline"), max_steps=3)[2]


def test_the_fused_optimizer_steps_as_the_plain_one_does() -> None:
    here = toy_module(optimizer="fused_adamw")
    here.configure_model()
    assert here.configure_optimizers().defaults["fused"] is True
    _, _, weights = fit(DisaggregatedStrategy(engine="inline"), module=toy_module(optimizer="fused_adamw"), max_steps=3)
    expected = usual_weights()
    assert relative_difference(weights, expected) <= 1e-6


def test_an_optimizer_that_cannot_be_had_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`optimizer` must be one of adamw, fused_adamw, adamw_8bit, got 'adam'"):
        toy_module(optimizer="adam")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"`optimizer` adamw_8bit is torchao's \(.*\): pip install torchao"):
        toy_module(optimizer="adamw_8bit")


def test_an_offloaded_optimizer_makes_the_same_run() -> None:
    expected = usual_weights()
    _, _, weights = fit(
        DisaggregatedStrategy(engine="inline", offload_optimizer=True, assist_switch="offload"), max_steps=3
    )
    assert relative_difference(weights, expected) <= 1e-6


def test_a_backward_that_runs_out_of_memory_lets_the_step_be_trained_again_with_the_same_weights() -> None:
    _, _, expected = fit("auto", module=module(), max_steps=2)
    strategy = DisaggregatedStrategy(engine="inline", timestep_batch_size="auto")
    trainer, _, weights = fit(strategy, module=module(SmallMemory(8, "backward", num_free=2)), max_steps=2)
    assert relative_difference(weights, expected) <= 1e-5  # of weights that moved by as much as they are large
    assert trainer.callback_metrics["timestep_batch_size"] == 2


class Adapted(ToyPolicy):
    """A frozen base in bfloat16, and low-rank adapters in float32 that are trained."""

    def build(self) -> None:
        super().build()
        self.requires_grad_(False).to(torch.bfloat16)
        self.down = nn.ModuleList(nn.Linear(self.hidden, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, self.hidden, bias=False) for _ in range(2))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
        hidden = self.input(torch.cat([latents.flatten(1), sigma[:, None], condition.level[:, None]], dim=1))
        for base, down, up in zip(self.blocks_, self.down, self.up, strict=True):
            inner = nn.functional.silu(hidden)
            hidden = hidden + base(inner) + up(down(inner))
        return self.output(hidden).view_as(latents)


def test_a_frozen_half_precision_base_and_trained_float32_adapters_keep_their_dtypes(tmp_path: Path) -> None:
    def adapted(**settings: Any) -> FlowGRPO:
        return FlowGRPO(
            Adapted(), level_reward, group_size=4, num_steps=5, timestep_fraction=0.8, seed=0, lr=1e-2, **settings
        )

    strategy = DisaggregatedStrategy(2, engine="inline", timestep_batch_size=2)
    trainer, trained, weights = fit(
        strategy,
        module=adapted(),
        max_steps=2,
        precision="bf16-mixed",
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        callbacks=[RunCheckpoint()],
    )
    assert trainer.callback_metrics["ratio/max_abs_dev"] <= 5e-4
    path = next(iter(tmp_path.rglob("*.ckpt")))
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["optimizer_states"][0]["state"]
    for name, value in weights.items():
        is_adapter = name.split(".")[1] in ("down", "up")
        dtype = torch.float32 if is_adapter else torch.bfloat16
        assert value.dtype == checkpoint["state_dict"][name].dtype == dtype, name
        assert (name in state) == is_adapter
    assert {entry["exp_avg"].dtype for entry in state.values()} == {torch.float32}
    start = adapted()
    start.configure_model()
    changed = {name for name, value in start.state_dict().items() if not torch.equal(value, weights[name])}
    assert changed == set(state)
    resumed, _, _ = fit(
        DisaggregatedStrategy(engine="inline"),
        module=adapted(),
        max_steps=3,
        precision="bf16-mixed",
        ckpt_path=str(path),
    )
    assert resumed.callback_metrics["ratio/max_abs_dev"] <= 5e-4
