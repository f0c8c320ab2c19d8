"""Copies of a policy's weights: what they hold, how they follow, and what they leave alone."""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.averaging import ConstantDecay, EveryNth, NoUpdates
from digenrl.policies import WeightCopy
from tests.toy import ToyCondition, ToyPolicy, toy_module


def built_policy(seed: int = 0) -> ToyPolicy:
    torch.manual_seed(seed)
    policy = ToyPolicy()
    policy.build()
    return policy


def rows() -> tuple[Tensor, Tensor, object]:
    torch.manual_seed(3)
    return torch.randn(5, 2, 4), torch.rand(5), built_policy().encode(["low", "top", "high", "low", "middle"])


def move(policy: ToyPolicy, by: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(by)


def test_a_copy_speaks_with_the_weights_it_holds_and_not_the_policys() -> None:
    policy, twin = built_policy(), built_policy()
    copy = WeightCopy(policy, NoUpdates())
    move(policy, 0.1)
    assert torch.equal(copy(*rows()), twin(*rows()))  # type: ignore[arg-type]
    assert not torch.equal(policy(*rows()), twin(*rows()))  # type: ignore[arg-type]


def test_asking_a_copy_gives_no_gradient_and_leaves_that_of_the_policy_alone() -> None:
    policy = built_policy()
    copy = WeightCopy(policy, NoUpdates())
    velocity = policy(*rows())  # type: ignore[arg-type]
    asked = copy(*rows())  # type: ignore[arg-type]
    (velocity * asked).sum().backward()
    expected = built_policy()
    (expected(*rows()) * asked).sum().backward()  # type: ignore[arg-type]
    assert not asked.requires_grad
    for ours, theirs in zip(policy.parameters(), expected.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_copy_holds_the_trained_weights_only() -> None:
    policy = built_policy()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in WeightCopy(policy, NoUpdates()).weights.named_buffers()} == trained
    assert "frozen.weight" not in trained


def test_an_update_keeps_the_decays_share_of_the_old_value() -> None:
    policy = built_policy()
    start = policy.output.bias.detach().clone()
    copy = WeightCopy(policy, ConstantDecay(0.75))
    move(policy, 1.0)
    copy.update()
    move(policy, 1.0)
    copy.update()
    # 0.75 (0.75 w + 0.25 (w + 1)) + 0.25 (w + 2)
    torch.testing.assert_close(copy.weights.get_buffer("output.bias"), start + 0.75 * 0.25 + 0.25 * 2)


def test_a_schedule_with_an_interval_updates_at_its_end_and_counts_every_step() -> None:
    policy = built_policy()
    copy = WeightCopy(policy, EveryNth(ConstantDecay(0.0), 3))
    followed = []
    for _ in range(7):
        move(policy, 1.0)
        followed.append((copy.update(), torch.equal(copy.weights.get_buffer("output.bias"), policy.output.bias)))
    assert followed == [(False, False), (False, False), (True, True)] * 2 + [(False, False)]
    assert int(copy.num_steps) == 7


def test_copies_are_saved_and_restored_with_the_module() -> None:
    module = toy_module(kl_beta=0.1)
    module.configure_model()
    with torch.no_grad():
        module.policy_copy("reference").weights.get_buffer("output.bias").add_(5)
    state = module.state_dict()
    assert "weight_copies.reference.weights.output.bias" in state
    other = toy_module(kl_beta=0.1)
    other.configure_model()
    other.load_state_dict(state)
    expected = module.policy_copy("reference").weights.get_buffer("output.bias")
    assert torch.equal(other.policy_copy("reference").weights.get_buffer("output.bias"), expected)


def test_no_optimizer_sees_a_copy() -> None:
    module = toy_module(kl_beta=0.1, updates_per_rollout=2)
    module.configure_model()
    optimizer = module.configure_optimizers()
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in module.policy.parameters() if parameter.requires_grad}


def test_generators_receive_the_copies_that_rollouts_need_and_no_others() -> None:
    module = toy_module(kl_beta=0.1, updates_per_rollout=2)
    module.configure_model()
    names = set(module.published_weights())
    assert "policy.output.bias" in names
    assert "weight_copies.rollout.weights.output.bias" in names
    assert "weight_copies.rollout.num_steps" in names
    assert not any(name.startswith("weight_copies.reference") for name in names)


def test_an_average_of_weights_in_half_precision_moves() -> None:
    policy = built_policy().to(torch.bfloat16)
    copy = WeightCopy(policy, ConstantDecay(0.999))
    start = copy.weights.get_buffer("output.bias").clone()
    move(policy, 1.0)
    for _ in range(100):
        copy.update()
    moved = copy.weights.get_buffer("output.bias") - start
    torch.testing.assert_close(moved, torch.full_like(moved, 1 - 0.999**100), rtol=2e-2, atol=0)
    latents, sigma, condition = rows()
    level = condition.level.to(torch.bfloat16)  # type: ignore[attr-defined]
    velocity = copy(latents.to(torch.bfloat16), sigma.to(torch.bfloat16), ToyCondition(level))
    assert velocity.dtype == torch.bfloat16


class RepeatedToy(ToyPolicy):
    """One block under two names, and a weight that two modules have."""

    def build(self) -> None:
        super().build()
        self.blocks_ = torch.nn.ModuleList([self.blocks_[0], self.blocks_[0], self.blocks_[1]])
        self.blocks_[2].weight = self.blocks_[0].weight


def test_a_copy_of_tied_parameters_computes_with_its_own_and_leaves_the_policy_its() -> None:
    policy = RepeatedToy()
    policy.build()
    before = dict(policy.named_parameters())
    copy = WeightCopy(policy, NoUpdates())
    inputs = torch.randn(3, 2, 4), torch.rand(3), policy.encode(["low", "top", "high"])
    expected = policy(*inputs)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0 if parameter.requires_grad else 0.0)
    assert torch.equal(copy(*inputs), expected)
    assert dict(policy.named_parameters()) == before, "the very same parameters"
