"""An optimizer whose state is in host memory makes the very same steps."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from digenrl.engines import WorkerError
from digenrl.strategies import optimizer_offload
from digenrl.strategies.optimizer_offload import step_in_pieces, to_host
from digenrl.strategies.optimizers import TrainingState, named_state
from tests.integration.test_equivalence import Descent
from tests.strategies.test_optimizers import MAKERS, CountingSGD, assert_same_weights, model, tensors_of
from tests.strategies.workers_at_hand import TrainersAtHand
from tests.toy import ToyPolicy, level_reward


def give_gradients(net: nn.Module, step: int) -> None:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    net.zero_grad()
    net(inputs).square().sum().backward()


@MAKERS
@pytest.mark.parametrize("piece_bytes", [1, 10**6])
def test_steps_in_pieces_are_the_optimizers_own_bit_by_bit(
    make: Callable[[nn.Module], Optimizer], piece_bytes: int
) -> None:
    ours, reference = model(), model()
    optimizer, usual = make(ours), make(reference)
    if isinstance(optimizer, CountingSGD):
        give_gradients(ours, 0)
        with pytest.raises(WorkerError, match="CountingSGD changes `lr` of its parameter groups"):
            step_in_pieces(optimizer)
        return
    groups = optimizer.param_groups
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(reference, step)
        step_in_pieces(optimizer, piece_bytes=piece_bytes)
        usual.step()
    assert_same_weights(ours, reference)
    assert optimizer.param_groups is groups
    state, expected = tensors_of(named_state(optimizer, ours)), tensors_of(named_state(usual, reference))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


class Device:
    """Stands for a device: knows which tensors were copied to it and are still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0
        monkeypatch.setattr(optimizer_offload, "_copy_to_device", self.receive)

    def receive(self, value: Tensor, device: torch.device) -> Tensor:
        received = value.clone()
        self.tensors.add(received)
        self.most = max(self.most, len(self.tensors))
        return received


def test_between_steps_nothing_of_the_state_is_on_the_device_and_meanwhile_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    net = model()  # of four parameters
    optimizer = AdamW(net.parameters())
    for step in range(3):
        give_gradients(net, step)
        step_in_pieces(optimizer, piece_bytes=1)
        gc.collect()
        assert len(device.tensors) == 0
    assert device.most == 2  # both averages of one parameter
    give_gradients(net, 3)
    step_in_pieces(optimizer)
    assert device.most == 2 * len(list(net.parameters()))


def test_state_that_is_away_goes_with_the_state_that_makes_room_for_generation() -> None:
    net, reference = model(), model()
    optimizer, usual = AdamW(net.parameters()), AdamW(reference.parameters())
    for step in range(3):
        give_gradients(net, step)
        give_gradients(reference, step)
        TrainingState.take(optimizer).give_back(optimizer)
        step_in_pieces(optimizer)
        usual.step()
    assert_same_weights(net, reference)


def test_sharded_state_stays_sharded_in_host_memory() -> None:
    reference = model()
    usual = AdamW(reference.parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = model()
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        optimizer = AdamW(net.parameters())
        for step in range(3):
            give_gradients(net, step)
            give_gradients(reference, step)
            step_in_pieces(optimizer, piece_bytes=1)
            usual.step()
        state = tensors_of(named_state(optimizer, net))
        weights = {name: value.full_tensor().clone() for name, value in net.named_parameters()}  # type: ignore[operator]
    finally:
        dist.destroy_process_group()
    expected = tensors_of(named_state(usual, reference))
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert all(torch.equal(weights[name], value) for name, value in reference.named_parameters())


def test_a_trainer_with_the_option_makes_the_same_steps_and_hands_over_the_same_state() -> None:
    class Momentum(Descent):
        def configure_optimizers(self) -> Optimizer:
            return AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train(**settings: Any) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
        trainers = TrainersAtHand(
            Momentum(ToyPolicy(), level_reward, group_size=4, num_steps=4, seed=0, clip_range=0.9), **settings
        )
        for _ in range(2):
            for index in range(2):
                trainers.update(index, None)
            trainers.step()
            state = copy.deepcopy(trainers.store.get(trainers.workers[0].optimizer_state()))
            trainers.workers[0].load_optimizer_state(trainers.store.put(state))
            trainers.workers[0].policy_version = 0  # the samples are those of the first
        return trainers.weights[0], tensors_of(state)

    weights, state = train(offloads_optimizer=True)
    expected_weights, expected_state = train()
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    assert all(torch.equal(state[key], value) for key, value in expected_state.items())


def test_all_of_the_state_can_be_moved_at_once() -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    give_gradients(net, 0)
    optimizer.step()
    before = {key: value.data_ptr() for key, value in _state_tensors(optimizer).items()}
    to_host(optimizer)
    assert all(value.data_ptr() != before[key] for key, value in _state_tensors(optimizer).items())


def _state_tensors(optimizer: Optimizer) -> dict[Any, Tensor]:
    return {
        (id(parameter), key): value
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
        if value.dim() > 0
    }
