"""Trainers that share a policy's blocks compute what one that holds all of it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import DGPO, FlowGRPO
from digenrl.averaging import ConstantDecay
from digenrl.module import DiffusionRLModule, NonFiniteGradientError, as_prompts
from digenrl.strategies.sharding import check_hosts, shard_policy
from digenrl.strategies.workers import Worker
from digenrl.types import PromptBatch, RowLosses, TimestepBatch
from tests.integration.toy_runs import fit
from tests.strategies.trainer_group import BlockToy, TrainerGroup
from tests.toy import ToyCondition, ToyPolicy, level_reward

STEP_SIZE = 1e4  # so large that the moved weights are the gradient, to float32's own precision

SMALL: dict[str, Any] = {"group_size": 4, "num_steps": 5, "seed": 0}
ALGORITHMS: dict[str, tuple[type[DiffusionRLModule], dict[str, Any]]] = {
    "FlowGRPO": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2}),
    "FlowGRPO-KL": (FlowGRPO, {"timestep_fraction": 0.8, "clip_range": 1e-2, "kl_beta": 0.5, "ema_decay": 0.9}),
    "DGPO": (DGPO, {"beta": 10.0, "clip_range": 0.05, "num_trained_timesteps": 3, "kl_beta": 0.1}),
}


def make(name: str, policy: ToyPolicy | None = None, *, descends: bool = True, **settings: Any) -> DiffusionRLModule:
    cls, own = ALGORITHMS[name]
    methods = {"configure_optimizers": _descent} if descends else {}
    made: type[DiffusionRLModule] = type(cls.__name__, (cls,), methods)
    return made(policy or BlockToy(), level_reward, **{**SMALL, **own, **settings})


def _descent(self: DiffusionRLModule) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=STEP_SIZE)


def one_step(group: TrainerGroup, scales: Sequence[float] = (), **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Norm and weights of a step of two micro-batches, which came after a gradient that was given up."""
    group.update(7, ["middle", "top"], **options)
    group.call("discard_gradient")
    group.update(0, ["low", "top"], **options)
    group.update(0, ["high", "middle"], **options)
    return group.step(0.0, "norm", *scales), group.state()


def with_copies_moved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """So that no term of a loss is zero by chance."""
    rng = torch.Generator().manual_seed(1)
    return {
        name: value * (1 + 0.05 * torch.randn(value.shape, generator=rng)) if "copies" in name and value.ndim else value
        for name, value in state.items()
    }


def assert_equal(ours: tuple[float, dict[str, Tensor]], theirs: tuple[float, dict[str, Tensor]]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert_equal_states(ours[1], theirs[1])


def assert_equal_states(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    names = [name for name, value in theirs.items() if value.numel() > 0]
    scale = max(theirs[name].abs().max().item() for name in names)
    for name in names:
        assert (ours[name] - theirs[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize(("name", "grad_sync"), [("FlowGRPO-KL", "micro_batch"), ("DGPO", "step")])
def test_sharded_trainers_have_the_gradient_of_one(name: str, grad_sync: str) -> None:
    with TrainerGroup(make(name)) as one, TrainerGroup(make(name), 2, grad_sync=grad_sync) as two:
        moved = with_copies_moved(one.state())
        for group in (one, two):
            group.call("load_state_dict", group.engine.store.put(moved), True)
        assert_equal(one_step(two, timestep_batch_size=2), one_step(one, timestep_batch_size=2))
        assert {report.frozen_digest for report in two.reports} == {one.reports[0].frozen_digest}


def test_hosts_that_hold_the_same_shares_have_the_gradient_of_one() -> None:
    settings = {"sharding": "hybrid", "hosts": ["a", "b", "a", "b"]}
    with TrainerGroup(make("DGPO")) as one, TrainerGroup(make("DGPO"), 4, **settings) as four:
        assert_equal(one_step(four), one_step(one))


class Halved(nn.Module):
    """A block that gives a view, and has a row that one rank gets nothing of and a parameter without entries."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(hidden, 2 * hidden), nn.Parameter(torch.ones(1, hidden))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.linear(hidden) * self.gain.repeat(1, 2))[:, : hidden.shape[1]]


class InPlaceToy(BlockToy):
    """Goes on with what its blocks give in place."""

    def build(self) -> None:
        super().build()
        self.blocks_ = nn.ModuleList(Halved(self.hidden) for _ in range(2))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
        hidden = self.input(torch.cat([latents.flatten(1), sigma[:, None], condition.level[:, None]], dim=1))
        for block in self.blocks_:
            out = block(nn.functional.silu(hidden))
            out += hidden
            hidden = out
        return self.output(hidden).view_as(latents)


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_blocks_that_give_views_have_the_gradient_of_one_though_they_are_changed_in_place() -> None:
    with (
        TrainerGroup(make("FlowGRPO", InPlaceToy())) as one,
        TrainerGroup(make("FlowGRPO", InPlaceToy()), 2, grad_sync="micro_batch") as two,
    ):
        assert_equal(one_step(two), one_step(one))


class Moody(nn.Module):
    """A block with a vector that acts on high rows only, another that never acts, and a number without axes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.high, self.idle = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden: Tensor, is_high: Tensor) -> Tensor:
        out = self.gain * self.linear(hidden)
        if is_high.any():
            out = out + is_high[:, None] * self.high
        return out


class MoodyToy(BlockToy):
    def build(self) -> None:
        super().build()
        self.blocks_ = nn.ModuleList(Moody(self.hidden) for _ in range(2))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
        hidden = self.input(torch.cat([latents.flatten(1), sigma[:, None], condition.level[:, None]], dim=1))
        for block in self.blocks_:
            hidden = hidden + block(nn.functional.silu(hidden), condition.level > 0.3)
        return self.output(hidden).view_as(latents)


class PartsApart(FlowGRPO):
    """With a regularizer whose gradient reaches other parameters than the policy's loss does."""

    def timestep_loss(self, batch: TimestepBatch) -> RowLosses:
        policy = super().timestep_loss(batch)
        loss = policy.policy if isinstance(policy, RowLosses) else policy
        return RowLosses(loss, self.policy(batch.latents, batch.sigma, batch.condition).flatten(1).square().mean(1))


@pytest.mark.parametrize("grad_sync", ["step", "micro_batch"])
def test_a_gradient_that_some_ranks_lack_is_summed_and_one_that_all_lack_stays_absent(grad_sync: str) -> None:
    class Decaying(PartsApart):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            # Decay would move what has a gradient of zero in place of none.
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=10.0, weight_decay=0.01)

    def module() -> DiffusionRLModule:
        return Decaying(MoodyToy(), level_reward, **SMALL, clip_range=1e-2)

    options: dict[str, Any] = {"scales": (2.0, 0.5), "keeps_parts_apart": True}
    with TrainerGroup(module()) as one, TrainerGroup(module(), 2, grad_sync=grad_sync) as two:
        ours, theirs = one_step(two, **options), one_step(one, **options)
        assert_equal(ours, theirs)
        assert (ours[1]["policy.blocks_.1.idle"] == 1).all()
        assert (ours[1]["policy.blocks_.1.high"] != 1).all()


@pytest.mark.parametrize("clipping", [(0.05, "norm"), (1e-3, "value")])
def test_clipped_steps_of_adamw_equal_those_of_one(clipping: tuple[float, str]) -> None:
    settings: dict[str, Any] = {"descends": False, "lr": 1e-3}
    states = []
    for num_ranks in (1, 2):
        with TrainerGroup(make("FlowGRPO-KL", **settings), num_ranks) as group:
            for step in range(3):
                group.update(step)
                group.step(*clipping)
            states.append(group.state())
    assert_equal_states(states[1], states[0], tolerance=1e-5)


def test_a_checkpoint_of_one_number_of_ranks_goes_into_any_other_and_back() -> None:
    with TrainerGroup(make("FlowGRPO-KL", descends=False, lr=1e-2), 2) as two:
        two.update(0)
        two.step()
        weights, optimizer = two.state(), two.state("optimizer_state")
        assert weights["policy.blocks_.0.weight"].shape == (33, 33)
        assert optimizer["policy.blocks_.0.weight"]["exp_avg"].shape == (33, 33)
        for num_ranks in (1, 3):
            with TrainerGroup(make("FlowGRPO-KL", descends=False, lr=1e-2), num_ranks) as other:
                other.load(weights, optimizer)
                back, optimizer_back = other.state(), other.state("optimizer_state")
                assert all(torch.equal(back[name], value) for name, value in weights.items())
                for name, entries in optimizer.items():
                    assert all(torch.equal(optimizer_back[name][key], value) for key, value in entries.items())
                other.call("resume", 1, 0)
                other.version = 1
                other.update(1)
                other.step()
                after = other.state()
                if num_ranks == 1:
                    expected = after
        two.update(1)
        two.step()
        assert_equal_states(after, expected, tolerance=1e-5)
        assert_equal_states(two.state(), expected, tolerance=1e-5)
        wrong = {**weights, "policy.blocks_.0.weight": torch.zeros(32, 33)}
        with pytest.raises(Exception, match=r"`policy.blocks_.0.weight` has shape \[32, 33\], the module's \[33, 33\]"):
            two.call("load_state_dict", two.engine.store.put(wrong), True)
        del wrong["policy.blocks_.0.weight"]
        with pytest.raises(Exception, match=r"^the state does not fit: it lacks `policy.blocks_.0.weight`$"):
            two.call("load_state_dict", two.engine.store.put(wrong), True)


class Exchanges(TorchDispatchMode):
    """Counts what ranks exchange, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Counting(Worker):
    def exchanges_of(self, *args: Any, **kwargs: Any) -> Counter[str]:
        with Exchanges() as exchanges:
            self.update(*args, **kwargs)
        return exchanges.counts


def test_blocks_are_gathered_once_for_each_batch_of_timesteps() -> None:
    module = make("FlowGRPO", num_steps=8, timestep_fraction=1.0)
    with TrainerGroup(module, 2, worker=Counting) as group:
        # Two blocks, gathered for the forward and again for the backward.
        for size in (1, 2, 4, 8):
            counts = group.update(0, method="exchanges_of", timestep_batch_size=size)
            assert counts == [{"c10d::_allgather_base_": 2 * 2 * 8 // size}] * 2


def test_a_gradient_that_is_not_finite_is_named_by_all_ranks_and_changes_nothing() -> None:
    with TrainerGroup(make("FlowGRPO"), 2) as group:
        state = group.state()
        broken = {name: value.clone() for name, value in state.items()}
        broken["policy.blocks_.1.weight"][-1] = torch.nan  # of the last rank
        group.call("load_state_dict", group.engine.store.put(broken), True)
        group.update(0)
        with pytest.raises(NonFiniteGradientError, match=r"is nan in \d+ parameters, first `policy\.\w+"):
            group.step()


class Noting(Worker):
    def num_notes(self) -> int:
        return len(self._module.policy._get_fsdp_state()._comm_ctx.post_forward_order)

    def has_gradient(self) -> bool:
        return self._gradients.has_any


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ranks_that_assist_make_the_samples_of_one_whatever_their_shares(precision: str) -> None:
    module = make("FlowGRPO-KL", ema_decay=None, kl_beta=50.0)  # so that a wrong reference shows in the norm
    module.add_weight_copy("average", ConstantDecay(0.5), for_rollout=True)
    prompts = PromptBatch.for_step(as_prompts(["low", "top", "high"]), step=0, group_size=4, seed=0, first_group=0)
    slices = [prompts.select(slice(start, start + 4)) for start in (0, 4, 8)]
    with (
        TrainerGroup(module, precision=precision) as one,
        TrainerGroup(module, 2, worker=Noting, precision=precision, offloads_to_assist=True) as two,
    ):
        moved = with_copies_moved(one.state())
        for group in (one, two):
            group.call("load_state_dict", group.engine.store.put(moved), True)
            group.update(0)
        assert two.call("has_gradient") == [True, True]
        expected = one.call("assist", slices, scores=True)[0]
        shares = [(slices[::2], []), (slices[1::2], [slices[0]])]
        tasks = [
            two.engine.submit(name, "assist", share, scores=True, follows=follows)
            for name, (share, follows) in zip(two.names, shares, strict=True)
        ]
        reports = two.engine.gather(tasks)
        assert two.call("has_gradient") == [False, False]
        refs = [reports[0].trajectories[0], reports[1].trajectories[0], reports[0].trajectories[1]]
        for ref, theirs in zip(refs, expected.trajectories, strict=True):
            ours, reference = two.engine.store.get(ref), one.engine.store.get(theirs)
            assert torch.equal(ours.final_latents, reference.final_latents)
        two.update(0)  # brings back what was moved to the host
        one.update(0)
        tolerance = 1e-6 if precision == "32-true" else 2**-7
        assert two.step() == pytest.approx(one.step(), rel=tolerance)


def test_inference_leaves_no_notes_for_a_backward() -> None:
    prompts = PromptBatch.for_step(as_prompts(["low"]), step=0, group_size=4, seed=0, first_group=0)
    with TrainerGroup(make("FlowGRPO-KL"), 2, worker=Noting) as group:
        group.call("generate", prompts)
        assert group.call("num_notes") == [0, 0]
        group.update(0)
        assert group.call("num_notes") == [0, 0]


class BlocklessToy(BlockToy):
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList()


class TiedToy(BlockToy):
    def build(self) -> None:
        super().build()
        self.again = self.blocks_[0].weight


class TiedBlocksToy(BlockToy):
    def build(self) -> None:
        super().build()
        self.blocks_[1].weight = self.blocks_[0].weight


class ListToy(BlockToy):
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList([self.blocks_])


class WholeToy(BlockToy):
    def blocks(self) -> list[nn.Module]:  # type: ignore[override]
        return [self]


class TwoDtypesToy(BlockToy):
    def build(self) -> None:
        super().build()
        self.blocks_[1].bias.data = self.blocks_[1].bias.data.bfloat16()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (BlocklessToy(), r"^ranks share the blocks of a policy, but `BlocklessToy\.blocks` gives none: define it"),
        (TiedToy(), r"^`again` is also a parameter of a block, and so cannot be sharded"),
        (TiedBlocksToy(), r"^two blocks of `TiedBlocksToy` have a parameter of shape \[33, 33\] in common, and so"),
        (ListToy(), r"but `ListToy\.blocks` gives a ModuleList of modules: give these\.$"),
        (WholeToy(), r"but `WholeToy\.blocks` gives the policy itself\.$"),
        (TwoDtypesToy(), r"^a block of `TwoDtypesToy` has trained parameters of torch\.bfloat16 and torch\.float32"),
    ],
)
def test_a_policy_that_cannot_be_shared_is_refused_in_one_line(policy: ToyPolicy, message: str) -> None:
    policy.build()
    mesh: Any = None  # not reached
    with pytest.raises(ValueError, match=message):
        shard_policy(policy, mesh, grad_sync="step")


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b"]])
def test_hosts_with_other_numbers_of_ranks_are_refused(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^`sharding` hybrid needs equally many trainers on each host, two or more"):
        check_hosts("hybrid", hosts)
    check_hosts("fsdp", hosts)


def test_a_run_with_sharded_workers_ends_with_the_weights_of_one_trainer() -> None:
    settings: dict[str, Any] = {"descends": False, "lr": 1e-3}
    run: dict[str, Any] = {"max_steps": 4, "gradient_clip_val": 0.05}
    _, _, expected = fit(DisaggregatedStrategy(), module=make("FlowGRPO-KL", **settings), **run)
    strategy = DisaggregatedStrategy(
        1, 2, devices_per_generator=2, sharding="fsdp", trainer_assist="static:1", timestep_batch_size=2
    )
    trainer, _, weights = fit(strategy, module=make("FlowGRPO-KL", **settings), **run)
    assert_equal_states(weights, expected)
    assert trainer.callback_metrics["ratio/max_abs_dev"] <= 1e-6


def test_what_rollouts_and_sharded_trainers_compute_in_half_precision_agrees() -> None:
    strategy = DisaggregatedStrategy(1, 2, sharding="fsdp", trainer_assist="off")
    trainer, _, _ = fit(strategy, module=make("FlowGRPO"), precision="bf16-mixed")
    assert trainer.callback_metrics["ratio/max_abs_dev"] <= 5e-4
