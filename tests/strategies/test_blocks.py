"""Options of blocks change memory and speed, never names, gradients or samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from digenrl import DiffusionPolicy, DisaggregatedStrategy
from digenrl.engines import WorkerError
from digenrl.strategies.blocks import apply_block_options
from digenrl.strategies.checks import check_blocks
from digenrl.strategies.workers import WorkerSettings
from digenrl.strategies.workers.memory import MemoryMeter
from examples.digits.policy import DigitsPolicy
from tests.integration.test_equivalence import STEP_SIZE, Descent
from tests.integration.toy_runs import fit, relative_difference
from tests.strategies.workers_at_hand import TrainersAtHand
from tests.toy import ToyCondition, ToyPolicy, level_reward


class Block(nn.Module):
    """Keeps several activations."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, 4 * hidden)
        self.outer = nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor, *, gain: float = 1.0) -> Tensor:
        return hidden + gain * self.outer(nn.functional.silu(self.inner(nn.functional.silu(hidden))))


class BlockPolicy(ToyPolicy):
    def build(self) -> None:
        super().build()
        self.blocks_ = nn.ModuleList(Block(self.hidden) for _ in range(2))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
        hidden = self.input(torch.cat([latents.flatten(1), sigma[:, None], condition.level[:, None]], dim=1))
        for block in self.blocks_:
            hidden = block(hidden, gain=0.5)
        return (self.output(hidden) + 0.1 * self.frozen(latents.flatten(1))).view_as(latents)

    def blocks(self) -> Iterable[nn.Module]:
        return self.blocks_


def built(policy: ToyPolicy | None = None, **settings: Any) -> ToyPolicy:
    policy = policy or BlockPolicy()
    torch.manual_seed(0)
    policy.build()
    apply_block_options(policy, WorkerSettings(**settings))
    return policy


def velocity_gradient(policy: ToyPolicy) -> tuple[dict[str, Tensor], int]:
    """The gradient of some velocities, and the bytes that were kept for it."""
    latents = torch.randn(16, 2, 4, generator=torch.Generator().manual_seed(1))
    meter = MemoryMeter(torch.device("cpu"), policy.parameters())
    with meter.forward():
        velocity = policy(latents, torch.linspace(0.1, 0.9, 16), ToyCondition(torch.linspace(0, 1, 16)))
        loss = velocity.square().sum()
    loss.backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}, meter.num_bytes


def step_gradient(**settings: Any) -> dict[str, Tensor]:
    module = Descent(BlockPolicy(), level_reward, group_size=4, num_steps=5, timestep_fraction=0.8, seed=0)
    trainers = TrainersAtHand(module, **settings)
    before = {name: value.clone() for name, value in trainers.weights[0].items()}
    trainers.train(2)
    trainers.step(lr=STEP_SIZE)
    return {name: (before[name] - value) / STEP_SIZE for name, value in trainers.weights[0].items()}


def test_recomputed_activations_are_not_kept_and_give_the_same_gradient() -> None:
    plain, recomputing = built(), built(gradient_checkpointing=True)
    assert plain.state_dict().keys() == recomputing.state_dict().keys()
    gradient, kept_bytes = velocity_gradient(plain)
    recomputed, fewer_bytes = velocity_gradient(recomputing)
    assert relative_difference(recomputed, gradient) <= 1e-6
    # Of each block 16 rows of 32 inputs are kept, instead of these and 32, 128 and 128 numbers within it.
    assert kept_bytes - fewer_bytes == 2 * 16 * (32 + 128 + 128) * 4


def test_a_step_with_recomputed_activations_has_the_same_gradient() -> None:
    assert relative_difference(step_gradient(gradient_checkpointing=True), step_gradient()) <= 1e-6


def test_without_gradient_nothing_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = built(gradient_checkpointing=True)
    monkeypatch.setattr("digenrl.strategies.blocks.checkpoint", None)  # whoever calls it fails
    inputs = torch.zeros(1, 2, 4), torch.ones(1), ToyCondition(torch.zeros(1))
    with torch.no_grad():
        policy(*inputs)
    with pytest.raises(TypeError):
        policy(*inputs)


def test_sharded_blocks_gather_their_weights_again_to_recompute() -> None:
    """On one rank; what a hook of the block does, it does for the recomputation, too."""
    import torch.distributed as dist

    gradient, _ = velocity_gradient(built())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = built(gradient_checkpointing=True)
        mesh = init_device_mesh("cpu", (1,))
        for block in policy.blocks():
            fully_shard(block, mesh=mesh)  # type: ignore[call-overload]
        latents = torch.randn(16, 2, 4, generator=torch.Generator().manual_seed(1))
        velocity = policy(latents, torch.linspace(0.1, 0.9, 16), ToyCondition(torch.linspace(0, 1, 16)))
        velocity.square().sum().backward()
        found = {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in policy.named_parameters()}
        found = {name: value for name, value in found.items() if value is not None}
    finally:
        dist.destroy_process_group()
    assert relative_difference(found, gradient) <= 1e-6


class FluxBlockPolicy(ToyPolicy):
    """Has a model of diffusers with a dispatcher of attention."""

    def build(self) -> None:
        from diffusers import FluxTransformer2DModel

        super().build()
        self.transformer = FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=1,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(2, 2, 4),
        )

    def attend(self) -> Tensor:
        """What the model gives for some input."""
        ids = torch.zeros(3, 3)
        given = {"hidden_states": torch.linspace(-1, 1, 12).view(1, 3, 4), "img_ids": ids, "txt_ids": ids}
        text = {"encoder_hidden_states": torch.ones(1, 3, 8), "pooled_projections": torch.ones(1, 8)}
        out: Tensor = self.transformer(**given, **text, timestep=torch.ones(1), return_dict=False)[0]
        return out


def test_models_of_diffusers_get_the_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    policy = built(FluxBlockPolicy(), attention_backend="_native_math")
    assert isinstance(policy, FluxBlockPolicy)
    usual = built(FluxBlockPolicy())
    assert isinstance(usual, FluxBlockPolicy)
    expected = usual.attend()
    calls: list[Any] = []
    native = _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH]

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return native(*args, **kwargs)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName._NATIVE_MATH, noted)
    torch.testing.assert_close(policy.attend(), expected)
    assert len(calls) == 2  # once in each block


def test_an_attention_backend_that_cannot_be_had_is_said_in_one_line() -> None:
    with pytest.raises(WorkerError, match="`attention_backend` flash cannot be had: .*flash-attn") as caught:
        built(FluxBlockPolicy(), attention_backend="flash")
    assert "\n" not in str(caught.value)
    with pytest.raises(WorkerError, match="`attention_backend` native applies to .*`BlockPolicy` has none"):
        built(attention_backend="native")
    digits = DigitsPolicy()
    digits.build()
    with pytest.raises(WorkerError, match="`attention_backend` native has no effect on SD3Transformer2DModel"):
        apply_block_options(digits, WorkerSettings(attention_backend="native"))


def test_an_unknown_attention_backend_is_refused_before_workers_start() -> None:
    with pytest.raises(ValueError, match="`attention_backend` must be one of diffusers', .*native.*, got 'natve'"):
        fit(DisaggregatedStrategy(attention_backend="natve"))


class Seamless(BlockPolicy):
    blocks = DiffusionPolicy.blocks


class Empty(BlockPolicy):
    def blocks(self) -> Iterable[nn.Module]:
        return ()


@pytest.mark.parametrize(
    ("option", "setting"),
    [("gradient_checkpointing", "gradient_checkpointing"), ("compile_blocks", "compiles_blocks")],
)
def test_options_of_blocks_need_blocks(option: str, setting: str) -> None:
    with pytest.raises(ValueError, match=rf"`{option}` applies to .*`Seamless\.blocks\(\)`"):
        check_blocks(Seamless(), attention_backend=None, **{option: True})
    check_blocks(Seamless(), attention_backend=None, **{option: False})
    check_blocks(BlockPolicy(), attention_backend=None, **{option: True})
    with pytest.raises(WorkerError, match=rf"`{option}` applies to .*`Empty\.blocks\(\)` gave none"):
        built(Empty(), **{setting: True})
