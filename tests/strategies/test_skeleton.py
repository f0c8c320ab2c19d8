"""The driver's outline of a module: same names, same shapes, no bytes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from digenrl.strategies import skeleton
from tests.toy import toy_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("cache", torch.zeros(2, dtype=torch.int32), persistent=False)


class Net(nn.Module):
    """Like a policy: constructing it is cheap, `build` makes the weights."""

    def build(self) -> Net:
        self.embedding = nn.Embedding(5, 3, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Conv2d(1, 2, 3).requires_grad_(False)})
        self.output = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        return self


class NetWithPlaceholders(Net):
    """Says in its constructor what `build` will fill in."""

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module | None = None
        self.scale: Tensor | None = None

    def build(self) -> Net:
        super().build()
        self.head = nn.Linear(2, 2)
        return self


class NetWithOneModuleTwice(Net):
    """As text encoders have it, whose embedding is also a part of their encoder."""

    def build(self) -> Net:
        self.first = Block()
        self.second = self.first
        return self


class NetWithWeightsFromTheStart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.ready = nn.Linear(2, 2)
        self.register_buffer("offset", torch.ones(3))


NETS = [Net, NetWithPlaceholders, NetWithOneModuleTwice, NetWithWeightsFromTheStart]


def installed(make: Callable[[], Net]) -> tuple[Net, Net]:
    """Build the real module, describe it, and install the description, sent as workers send it, in another."""
    real, outline = make().build(), make()
    skeleton.install(outline, pickle.loads(pickle.dumps(skeleton.describe(real))))
    return real, outline


@pytest.mark.parametrize("make", NETS)
def test_the_state_dict_has_the_keys_shapes_and_types_of_the_real_one(make: Callable[[], Net]) -> None:
    real, outline = installed(make)
    assert list(outline.state_dict()) == list(real.state_dict())
    for name, tensor in real.state_dict().items():
        entry = outline.state_dict()[name]
        assert (entry.shape, entry.dtype) == (tensor.shape, tensor.dtype), name


@pytest.mark.parametrize("make", NETS)
def test_parameters_come_in_the_same_order_with_the_same_need_of_a_gradient(make: Callable[[], Net]) -> None:
    real, outline = installed(make)
    expected = [(name, parameter.requires_grad) for name, parameter in real.named_parameters()]
    assert [(name, parameter.requires_grad) for name, parameter in outline.named_parameters()] == expected
    assert all(isinstance(parameter, nn.Parameter) for parameter in outline.parameters())


@pytest.mark.parametrize("make", NETS)
def test_a_skeleton_holds_no_bytes(make: Callable[[], Net]) -> None:
    _, outline = installed(make)
    assert all(tensor.is_meta for tensor in [*outline.parameters(), *outline.buffers()])


def test_tied_parameters_stay_tied() -> None:
    _, outline = installed(Net)
    assert outline.output.weight is outline.embedding.weight
    names = [name for name, _ in outline.named_parameters()]
    assert "embedding.weight" in names
    assert "output.weight" not in names


def test_buffers_are_there_and_those_that_are_not_saved_are_still_not() -> None:
    real, outline = installed(Net)
    expected = {name: (buffer.shape, buffer.dtype) for name, buffer in real.named_buffers()}
    assert {name: (buffer.shape, buffer.dtype) for name, buffer in outline.named_buffers()} == expected
    assert "blocks.1.cache" in expected
    assert "blocks.1.cache" not in outline.state_dict()


def test_submodules_show_the_names_of_their_classes() -> None:
    _, outline = installed(Net)
    assert "BatchNorm1d" in repr(outline)
    assert "Conv2d" in repr(outline)


def test_a_call_of_a_submodule_is_refused_and_says_where_it_would_run() -> None:
    _, outline = installed(Net)
    with pytest.raises(RuntimeError, match="`Embedding` has its weights on workers.*`rollout`"):
        outline.embedding(torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("make", NETS)
def test_removing_restores_what_was_there_before(make: Callable[[], Net]) -> None:
    _, outline = installed(make)
    untouched = make()
    skeleton.remove(outline)
    assert [name for name, _ in outline.named_modules()] == [name for name, _ in untouched.named_modules()]
    assert list(outline.state_dict()) == list(untouched.state_dict())
    assert not any(tensor.is_meta for tensor in [*outline.parameters(), *outline.buffers()])
    assert set(vars(outline)) == set(vars(untouched))


@pytest.mark.parametrize("make", NETS)
def test_a_module_can_be_built_and_outlined_again_after_its_skeleton_was_removed(make: Callable[[], Net]) -> None:
    real, outline = installed(make)
    skeleton.remove(outline)
    skeleton.install(outline, skeleton.describe(real))
    assert list(outline.state_dict()) == list(real.state_dict())
    skeleton.remove(outline)
    outline.build().load_state_dict(real.state_dict())
    for name, tensor in real.state_dict().items():
        assert torch.equal(outline.state_dict()[name], tensor)


def test_weights_from_the_start_have_their_values_again_after_the_skeleton_was_removed() -> None:
    net = NetWithWeightsFromTheStart()
    before = copy.deepcopy(net.state_dict())
    skeleton.install(net, skeleton.describe(NetWithWeightsFromTheStart().build()))
    skeleton.remove(net)
    assert net.state_dict().keys() == before.keys()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_module_with_a_skeleton_can_be_forgotten() -> None:
    forgotten = weakref.ref(installed(Net)[1])
    gc.collect()
    assert forgotten() is None


def test_an_rl_module_gets_the_names_of_the_module_that_was_built() -> None:
    real, outline = toy_module(), toy_module()
    real.configure_model()
    assert list(outline.parameters()) == []
    skeleton.install(outline, skeleton.describe(real))
    assert list(outline.state_dict()) == list(real.state_dict())
    trained = [name for name, parameter in outline.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, parameter in real.named_parameters() if parameter.requires_grad]
    skeleton.remove(outline)
    assert list(outline.parameters()) == []
    outline.configure_model()
    for name, tensor in real.state_dict().items():
        assert torch.equal(outline.state_dict()[name], tensor)
