"""Weights that are read after a policy was built on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from digenrl.policies import StoredTensor, stored_tensors
from digenrl.policies.stored_weights import load_stored_weights
from tests.strategies.trainer_group import BlockToy, TrainerGroup
from tests.toy import toy_module


class StoredToy(BlockToy):
    """All on the meta device; its output is tied to a second name."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def build(self) -> None:
        with torch.device("meta"):
            super().build()
            self.register_buffer("offset", torch.zeros(8))
        self.again = self.output

    def stored_weights(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self.path, rename=lambda key: key.removeprefix("net."))


def save(folder: Path, **changes: Tensor) -> dict[str, Tensor]:
    """Save a toy's weights in two files with an index, in half precision."""
    torch.manual_seed(5)
    toy = BlockToy()
    toy.build()
    values: dict[str, Tensor] = {**toy.state_dict(), "offset": torch.arange(8.0)}
    values = {f"net.{name}": value.bfloat16() for name, value in {**values, **changes}.items()}
    names = sorted(values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: values[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name.removeprefix("net."): value.float() for name, value in values.items()}


def test_what_is_on_meta_is_read_in_its_own_dtype_and_tied_parameters_stay_tied(tmp_path: Path) -> None:
    expected = save(tmp_path)
    policy = StoredToy(str(tmp_path))
    policy.build()
    load_stored_weights(policy)
    state = policy.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert policy.again.weight is policy.output.weight
    assert not policy.frozen.weight.requires_grad


def test_a_module_reads_them_in_a_single_process_and_each_rank_its_rows(tmp_path: Path) -> None:
    expected = save(tmp_path)
    module = toy_module(kl_beta=0.1)
    module.policy = StoredToy(str(tmp_path))
    with TrainerGroup(module, 2) as two:
        state = two.state()
        assert all(torch.equal(state[f"policy.{name}"], value) for name, value in expected.items())
        copy = state["weight_copies.reference.weights.blocks_.1.weight"]
        assert torch.equal(copy, expected["blocks_.1.weight"])
        assert all(torch.equal(two.module.state_dict()[name], value) for name, value in state.items())
        two.update(0)
        two.step()


def test_what_is_on_meta_and_stored_nowhere_is_named(tmp_path: Path) -> None:
    class Forgetful(StoredToy):
        def stored_weights(self) -> Mapping[str, StoredTensor]:
            return {name: at for name, at in super().stored_weights().items() if name != "blocks_.1.bias"}

    save(tmp_path)
    policy = Forgetful(str(tmp_path))
    policy.build()
    with pytest.raises(ValueError, match=r"^`blocks_\.1\.bias` is on the meta device and `Forgetful\.stored_weights`"):
        load_stored_weights(policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output.bias": torch.zeros(9)}, r"`net\.output\.bias` in `.*` has shape \[9\], but `output\.bias` has \[8\]"),
        ({}, r"has no tensor `elsewhere`, which `offset` is read from"),
    ],
)
def test_files_of_another_model_are_refused_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    class Lost(StoredToy):
        def stored_weights(self) -> Mapping[str, StoredTensor]:
            found = dict(super().stored_weights())
            if not change:
                found["offset"] = StoredTensor(found["offset"].path, "elsewhere")
            return found

    save(tmp_path, **change)
    policy = Lost(str(tmp_path))
    policy.build()
    with pytest.raises(ValueError, match=message) as caught:
        load_stored_weights(policy)
    assert "\n" not in str(caught.value)


def test_names_are_found_in_a_file_an_index_and_a_folder(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1), "y": torch.zeros(1)}, tmp_path / "a.safetensors")
    file = str(tmp_path / "a.safetensors")
    found = stored_tensors(tmp_path, prefix="net.", rename={"x": "z"})
    assert found == {"net.z": StoredTensor(file, "x"), "net.y": StoredTensor(file, "y")}
    assert stored_tensors(file, rename=lambda key: key if key == "x" else None) == {"x": StoredTensor(file, "x")}
    with pytest.raises(FileNotFoundError, match="has no safetensors file"):
        stored_tensors(tmp_path.parent / tmp_path.name / "..", prefix="")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        stored_tensors(tmp_path / "b.safetensors")
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=r"several indices of weights, name one: one\.safetensors\.index\.json, two"):
        stored_tensors(tmp_path)


def test_a_policy_that_makes_its_weights_is_left_alone() -> None:
    policy = BlockToy()
    policy.build()
    before = dict(policy.named_parameters())
    load_stored_weights(policy)
    assert all(value is before[name] for name, value in policy.named_parameters())
    assert isinstance(policy.output, nn.Linear)
