"""An optimizer described on parameters without weights steps like one that was made on the real ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from digenrl.strategies import skeleton
from digenrl.strategies.optimizers import OptimizerSpec, hyper_parameters, load_named_state, named_state


class CountingSGD(SGD):
    """Keeps something on the instance, as many published optimizers do."""

    def __init__(self, params: Any, lr: float, warmup: int) -> None:
        super().__init__(params, lr=lr)
        self.warmup = warmup
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.count / self.warmup)
        return super().step(closure)


def two_groups(model: nn.Module) -> Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.02}], lr=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.01),
    "fused AdamW": lambda model: AdamW(model.parameters(), lr=0.1, fused=True),
    "AMSGrad": lambda model: AdamW(model.parameters(), lr=0.1, amsgrad=True),
    "SGD with momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "NAdam": lambda model: NAdam(model.parameters(), lr=0.01),
    "two groups": two_groups,
    "counting SGD": lambda model: CountingSGD(model.parameters(), lr=0.1, warmup=3),
}
MAKERS = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3))


def bound(make: Callable[[nn.Module], Optimizer], real: nn.Module) -> Optimizer:
    """Make the optimizer as the strategy does: on a skeleton, sent to a worker, bound there."""
    outline = nn.Sequential()
    skeleton.install(outline, skeleton.describe(real))
    spec: OptimizerSpec = pickle.loads(pickle.dumps(OptimizerSpec.of(make(outline), outline)))
    return spec.bind(real)


def train(net: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(inputs).square().sum().backward()
        optimizer.step()


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def tensors_of(state: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Tensor]:
    return {(name, key): torch.as_tensor(value) for name, entry in state.items() for key, value in entry.items()}


@MAKERS
def test_a_bound_optimizer_makes_the_steps_of_one_that_was_made_there(
    make: Callable[[nn.Module], Optimizer],
) -> None:
    ours, reference = model(), model()
    train(ours, bound(make, ours), range(5))
    train(reference, make(reference), range(5))
    assert_same_weights(ours, reference)
    with pytest.raises(AssertionError):
        assert_same_weights(ours, model())  # they have moved


@MAKERS
def test_state_that_was_saved_and_loaded_continues_bit_by_bit(make: Callable[[nn.Module], Optimizer]) -> None:
    reference, resumed = model(), model()
    optimizer = make(reference)
    train(reference, optimizer, range(3))
    resumed.load_state_dict(copy.deepcopy(reference.state_dict()))
    state = pickle.loads(pickle.dumps(named_state(optimizer, reference)))
    again = make(resumed)
    load_named_state(again, resumed, state)
    saved = tensors_of(named_state(again, resumed))
    for key, value in tensors_of(state).items():
        assert torch.equal(saved[key], value)
        assert saved[key].dtype == value.dtype
    if not isinstance(optimizer, CountingSGD):  # keeps a count that no optimizer's `state_dict` would save either
        train(reference, optimizer, range(3, 6))
        train(resumed, again, range(3, 6))
        assert_same_weights(reference, resumed)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_later_steps_do_not_change_a_state_that_was_saved_or_loaded(is_loaded: bool) -> None:
    net = model()
    optimizer = OPTIMIZERS["AdamW"](net)
    train(net, optimizer, range(2))
    state = named_state(optimizer, net)
    kept = copy.deepcopy(state)
    if is_loaded:
        load_named_state(optimizer, net, state)
    train(net, optimizer, range(2, 4))
    for key, value in tensors_of(kept).items():
        assert torch.equal(tensors_of(state)[key], value)


def test_state_goes_by_name_whatever_the_order_of_the_groups() -> None:
    net = model()
    optimizer = two_groups(net)
    train(net, optimizer, range(2))
    state = named_state(optimizer, net)
    assert set(state) == {name for name, _ in net.named_parameters()}
    for name, parameter in net.named_parameters():
        assert torch.equal(state[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_loading_forgets_the_state_of_parameters_that_have_none() -> None:
    net = model()
    optimizer = OPTIMIZERS["AdamW"](net)
    train(net, optimizer, range(2))
    load_named_state(optimizer, net, {})
    assert named_state(optimizer, net) == {}


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_step_counter_lies_where_the_optimizer_wants_it(fused: bool, device: str) -> None:
    saved, other = model(), model().to("meta")  # stands for a GPU
    optimizer = AdamW(saved.parameters())
    train(saved, optimizer, range(1))
    target = AdamW(other.parameters())
    target.param_groups[0]["fused"] = fused
    load_named_state(target, other, named_state(optimizer, saved))
    assert {entry["step"].device.type for entry in target.state.values()} == {device}
    assert {entry["exp_avg"].device.type for entry in target.state.values()} == {"meta"}


def test_a_parameter_of_another_module_is_refused_with_its_shape() -> None:
    net, other = model(), nn.Linear(2, 7)
    with pytest.raises(ValueError, match=r"AdamW a parameter of shape \[7, 2\]"):
        OptimizerSpec.of(AdamW([*net.parameters(), *other.parameters()]), net)


def test_state_of_an_unknown_parameter_is_refused_by_name() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"3\.weight"):
        load_named_state(AdamW(net.parameters()), net, {"0.weight": {}, "3.weight": {}})


def test_settings_are_given_without_parameters_and_by_group() -> None:
    settings = hyper_parameters(two_groups(model()))
    assert [entry["lr"] for entry in settings] == [0.1, 0.02]
    assert [entry["weight_decay"] for entry in settings] == [0.0, 0.01]
    assert all("params" not in entry for entry in settings)


def test_settings_changed_before_binding_are_those_that_are_bound() -> None:
    net = model()
    optimizer = OPTIMIZERS["AdamW"](net)
    optimizer.param_groups[0]["lr"] = 0.5  # as a warm-up scheduler does at its construction
    optimizer.param_groups[0]["initial_lr"] = 0.1
    group = OptimizerSpec.of(optimizer, net).bind(net).param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.5, 0.1)
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in net.parameters()]
