from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from digenrl import Condition, DiffusionPolicy
from digenrl.policies.forward_costs import ForwardCosts, trace_forward
from digenrl.policies.transformer_inputs import call_transformer, transformer_inputs
from digenrl.strategies.blocks import apply_block_options
from digenrl.strategies.workers import WorkerSettings
from digenrl.strategies.workers.memory import MemoryMeter

ROWS = 6


class PolicyOf(DiffusionPolicy):
    """A policy around one network."""

    latent_shape = (4, 8, 8)
    max_sequence_length = 5

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network = network
        self._blocks = (tuple(blocks),)

    def build(self) -> None: ...

    def encode(self, prompts: Sequence[str]) -> Condition:
        raise NotImplementedError

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Tensor:
        raise NotImplementedError

    def sigmas(self, num_steps: int) -> Tensor:
        raise NotImplementedError

    def blocks(self) -> Sequence[nn.Module]:
        return self._blocks[0]


def stable_diffusion_3(*, is_frozen: bool = False) -> PolicyOf:
    """Six blocks of three kinds, as SD3.5-medium has them; frozen but for what an adapter would be, or trained."""
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, out_channels=4, num_layers=6, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64,
        pos_embed_max_size=16, dual_attention_layers=(0, 1, 2), qk_norm="rms_norm",
    )  # fmt: skip
    if is_frozen:
        network.requires_grad_(False)
        for block in network.transformer_blocks:
            block.attn.to_q.requires_grad_(True)
    return PolicyOf(network, network.transformer_blocks)


@cache
def costs_of(*, bf16: bool, is_frozen: bool) -> ForwardCosts:
    return traced(stable_diffusion_3(is_frozen=is_frozen), bf16=bf16)


def traced(policy: PolicyOf, *, bf16: bool = False) -> ForwardCosts:
    return trace_forward(policy, lambda num_rows: call_transformer(policy.network, policy, num_rows), bf16=bf16)


def measured_bytes(policy: PolicyOf, *, bf16: bool) -> int:
    """What autograd keeps of a real forward, and what is kept for computing blocks again."""
    inputs = transformer_inputs(policy.network, policy, ROWS)
    meter = MemoryMeter(torch.device("cpu"), [*policy.parameters(), *policy.buffers()])

    def note(block: nn.Module, args: object, kwargs: object) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                meter._note(leaf)

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in policy.blocks()]
    with meter.forward(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        output = policy.network(**inputs, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    del output
    return meter.num_bytes


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_kept_bytes_are_those_of_a_real_forward(bf16: bool, is_frozen: bool) -> None:
    policy = stable_diffusion_3(is_frozen=is_frozen)
    found = costs_of(bf16=bf16, is_frozen=is_frozen).kept_bytes(ROWS, checkpointing=False)
    assert found == pytest.approx(measured_bytes(policy, bf16=bf16), rel=0.02)


@pytest.mark.parametrize("bf16", [False, True])
def test_checkpointing_keeps_the_inputs_of_blocks_and_one_block(bf16: bool) -> None:
    policy = stable_diffusion_3()
    costs = costs_of(bf16=bf16, is_frozen=False)
    kept_by_recomputing = costs.largest_block_bytes(ROWS)
    found = costs.kept_bytes(ROWS, checkpointing=True) - kept_by_recomputing
    apply_block_options(policy, WorkerSettings(gradient_checkpointing=True))
    assert found == pytest.approx(measured_bytes(policy, bf16=bf16), rel=0.1)
    assert found + kept_by_recomputing < 0.5 * costs.kept_bytes(ROWS, checkpointing=False)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(3, 16), nn.Linear(16, 3)
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.input(latents)
        for layer in self.inner:
            hidden = layer(hidden).relu()
        output: Tensor = self.output(hidden)
        return output


def test_costs_of_a_perceptron_are_counted_by_hand() -> None:
    network = Perceptron()
    policy = PolicyOf(network, list(network.inner))
    costs = trace_forward(policy, lambda num_rows: network(torch.zeros(num_rows, 3)))
    assert costs.flops.of(ROWS) == 2 * ROWS * (3 * 16 + 5 * 16 * 16 + 16 * 3)
    [block] = costs.blocks
    assert (block.count, block.parameter_bytes) == (5, 4 * (16 * 16 + 16))
    assert block.output_bytes.of(ROWS) == 4 * ROWS * 16
    # A layer keeps its input; the relu outside of it its result, which is the next one's input.
    assert costs.kept_bytes(ROWS, checkpointing=False) == 4 * ROWS * (3 + 6 * 16)


def test_attention_counts_both_of_its_products() -> None:
    network = nn.Linear(8, 8)
    policy = PolicyOf(network, [])

    def call(num_rows: int) -> Tensor:
        rows = network(torch.zeros(num_rows, 2, 10, 8))
        return scaled_dot_product_attention(rows, rows, rows)

    costs = trace_forward(policy, call)
    assert costs.flops.of(1) == 2 * 2 * 10 * 8 * 8 + 2 * (2 * 2 * 10 * 10 * 8)


def test_a_policy_is_as_before_afterwards() -> None:
    policy = stable_diffusion_3()
    before = dict(policy.state_dict(keep_vars=True))
    traced(policy)
    after = policy.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert not any("forward" in vars(block) for block in policy.blocks())
    assert call_transformer(policy.network, policy, 2).shape == (2, 4, 8, 8)
