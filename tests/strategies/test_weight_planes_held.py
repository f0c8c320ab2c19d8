"""What a worker sends and receives is its own tensors, whatever they look like in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from digenrl.strategies.weight_planes import Holding, cut_chunks
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.weight_planes.held_weights import HeldWeights


def make_tensors(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(1 << 19, generator=rng),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn((), generator=rng),
        "strided": torch.randn(300, 200, generator=rng).t(),
        "bfloat16": torch.randn(50, 30, generator=rng).bfloat16(),
        "float8": torch.randn(9000, generator=rng).to(torch.float8_e4m3fn),
        "unaligned": torch.randint(0, 255, (9001,), dtype=torch.uint8, generator=rng)[3:],
        "bool": torch.rand(77, generator=rng) > 0.5,
        "parameter": nn.Parameter(torch.randn(200, 10, generator=rng)),
    }


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 16, 1 << 23])  # many parts of a tensor, both, many tensors
def test_what_is_received_is_what_was_sent_again_and_again(chunk_bytes: int) -> None:
    ours, theirs = make_tensors(0), make_tensors(1)
    holding = Holding.of(ours, ["parameter"])
    chunks = cut_chunks({"trainer": holding}, {"generator": [holding]}, chunk_bytes)
    sender, receiver = HeldWeights(chunks, lambda: ours, holding), HeldWeights(chunks, lambda: theirs, holding)
    memory = [ByteView(torch.empty(chunk.num_bytes, dtype=torch.uint8)) for chunk in chunks]
    for version in range(3):
        if version == 1:  # changed where they are
            with torch.no_grad():
                for name in ("large", "strided", "parameter"):
                    ours[name].add_(1)
        elif version == 2:  # moved
            ours, theirs = make_tensors(2), make_tensors(3)
        sent = sender.send(enumerate(memory))
        assert receiver.find_changed(sent) is not None
        receiver.check(version, receiver.receive(enumerate(memory)), sent)
        assert receiver.find_changed(sent) is None
        for name in ours:
            assert torch.equal(raw(theirs[name]), raw(ours[name])), name
        assert sent == b"".join(data.digest() for data in memory)


def test_the_parts_of_a_chunk_are_joined_once_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.full((10,), float(name)) for name in "123"}
    holding = Holding.of(tensors, tensors)
    (chunk,) = cut_chunks({"trainer": holding}, {"generator": [holding]}, 1 << 12)
    joined: list[int] = []
    cat = torch.cat

    def count(parts: Any) -> Tensor:
        joined.append(len(parts))
        return cat(parts)

    monkeypatch.setattr(torch, "cat", count)
    HeldWeights([chunk], lambda: tensors, holding).send(
        [(0, ByteView(torch.empty(chunk.num_bytes, dtype=torch.uint8)))]
    )
    assert joined == [3]
