"""Weights are cut so that every worker holds a chunk or does not, and any change of a chunk shows in its digest."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
import xxhash
from torch import Tensor

from digenrl.strategies.weight_planes import Holding, WeightSyncError, cut_chunks, weights_digest
from digenrl.strategies.weight_planes.byte_view import ByteView
from digenrl.strategies.weight_planes.chunks import TensorSpec, cut_buckets, held_chunks, slot_bytes
from digenrl.strategies.weight_planes.digests import table_digest


def tensors() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    half = torch.randn(5, 3, generator=rng).bfloat16()
    half[0, 0] = float("nan")
    return {
        "float32": torch.randn(7, 2, generator=rng),
        "bfloat16": half,
        "scalar": torch.randn((), generator=rng),
        "float16": torch.randn(3, generator=rng).half(),
        "empty": torch.empty(0, 4),
        "float64": torch.randn(2, 2, dtype=torch.float64, generator=rng),
        "int64": torch.tensor([-1, 2**40]),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.randn(9, generator=rng).to(torch.float8_e4m3fn),
    }


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


# ---- digests of everything -----------------------------------------------------------------------------------


def test_equal_weights_have_equal_digests_however_they_lie_in_memory() -> None:
    strided = {name: torch.stack([value, value], -1)[..., 0] for name, value in tensors().items()}
    assert not strided["float32"].is_contiguous()
    assert weights_digest(strided.items()) == weights_digest(tensors().items())


@pytest.mark.parametrize("name", [name for name, value in tensors().items() if value.numel()])
def test_any_changed_bit_changes_the_digest(name: str) -> None:
    digest = weights_digest(tensors().items())
    num_bytes = len(bits(tensors()[name]))
    for byte in range(num_bytes):
        for bit in (0, 7):
            changed = tensors()
            raw = changed[name].reshape(-1).view(torch.uint8)
            raw[byte] ^= 1 << bit
            assert weights_digest(changed.items()) != digest, (byte, bit)


def test_two_tensors_that_were_exchanged_change_the_digest() -> None:
    left, right = torch.randn(4, 4), torch.randn(4, 4)
    assert weights_digest([("a", left), ("b", right)]) != weights_digest([("a", right), ("b", left)])


def test_names_shapes_and_types_are_part_of_the_digest() -> None:
    value = torch.zeros(2, 3)
    variants = [[("a", value)], [("b", value)], [("a", value.t())], [("a", value.int())], [("a", value), ("b", value)]]
    assert len({weights_digest(variant) for variant in variants}) == len(variants)
    assert weights_digest([]) != weights_digest([("a", torch.empty(0))])


# ---- digests of chunks ---------------------------------------------------------------------------------------

DIGESTS: dict[str, Callable[[Tensor], bytes]] = {
    "on the CPU": lambda data: ByteView(data).digest(),
    "on a device": table_digest,
}


@pytest.fixture(params=DIGESTS)
def digest(request: pytest.FixtureRequest) -> Callable[[Tensor], bytes]:
    """Digests bytes, or words as bytes."""
    return lambda data: DIGESTS[request.param](data.view(torch.uint8))


def chunk(num_words: int = 3 * 1024 + 100) -> Tensor:
    """Several rows of a device's table and a rest, as 32-bit words."""
    return torch.randint(-(2**31), 2**31 - 1, (num_words,), generator=torch.Generator().manual_seed(1)).int()


@pytest.mark.parametrize("word", [0, 1, 1023, 1024, 3071, 3072, 3171])
def test_a_flipped_bit_of_a_chunk_shows(word: int, digest: Callable[[Tensor], bytes]) -> None:
    for bit in (0, 12, 31):
        changed = chunk()
        changed[word] ^= -(2**31) if bit == 31 else 1 << bit
        assert digest(changed) != digest(chunk())


@pytest.mark.parametrize(
    ("left", "right"),
    [(0, 1), (0, 2), (1, 3), (0, 3), (5, 5 + 1024), (6, 5 + 1024), (7, 900), (1022, 1025), (8, 3100), (3100, 3101)],
)
def test_two_words_of_a_chunk_that_were_exchanged_show(
    left: int, right: int, digest: Callable[[Tensor], bytes]
) -> None:
    exchanged = chunk()
    exchanged[[left, right]] = exchanged[[right, left]]
    assert digest(exchanged) != digest(chunk())
    # Words that differ in their highest bit alone, as the weights w and -w do, cancel in many sums.
    signs = chunk()
    signs[right] = signs[left] ^ -(2**31)
    exchanged = signs.clone()
    exchanged[[left, right]] = exchanged[[right, left]]
    assert digest(exchanged) != digest(signs)


def test_a_chunk_of_zeros_has_its_length_in_its_digest_and_its_place_in_memory_has_not(
    digest: Callable[[Tensor], bytes],
) -> None:
    zeros = torch.zeros(5000, dtype=torch.uint8)
    assert len({digest(zeros[:length]) for length in (0, 1, 4095, 4096, 4097, 4999)}) == 6
    memory = torch.cat([torch.zeros(3, dtype=torch.uint8), chunk().view(torch.uint8)])
    assert digest(memory[3:]) == digest(chunk())


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 18, (1 << 18) + 1, 3 << 18, 1_000_003])
def test_bytes_are_copied_whole_and_digested_on_either_side(num_bytes: int) -> None:
    ours = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    sent, kept = torch.zeros_like(ours), torch.zeros_like(ours)
    expected = xxhash.xxh3_128_digest(bytes(ours.tolist()))
    view = ByteView(ours)
    assert view.copy_to(ByteView(sent)) == ByteView(kept).copy_from(ByteView(sent)) == view.digest() == expected
    assert torch.equal(sent, ours)
    assert torch.equal(kept, ours)


def test_what_is_digested_is_a_workers_own_memory_so_that_a_copy_which_fails_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, other = ByteView(torch.zeros(1000, dtype=torch.uint8)), ByteView(torch.ones(1000, dtype=torch.uint8))
    monkeypatch.setattr(numpy, "copyto", lambda *arguments: None)
    assert own.copy_to(other) == own.copy_from(other) == own.digest() != other.digest()


# ---- chunks --------------------------------------------------------------------------------------------------


def specs(rng: random.Random) -> tuple[TensorSpec, ...]:
    shapes: list[tuple[int, ...]] = [(), (0, 3), (1,), (700, 9), (40,), (7, 3, 3)]
    shapes += [(rng.randint(1, 50), rng.randint(1, 20)) for _ in range(6)]
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return tuple(TensorSpec(f"t{i}", rng.choice(dtypes), shape, i % 3 != 0) for i, shape in enumerate(shapes))


def sharded(tensors: tuple[TensorSpec, ...], num_ranks: int, rng: random.Random) -> list[Holding]:
    """Share some of the tensors as `torch.chunk` does."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for spec in tensors:
        size = -(-spec.num_rows // num_ranks) if rng.random() < 0.7 else None
        for rank in range(num_ranks):
            start, stop = (0, spec.num_rows) if size is None else (size * rank, size * (rank + 1))
            rows[rank].append((min(start, spec.num_rows), min(stop, spec.num_rows)))
    return [Holding(tensors, tuple(entry)) for entry in rows]


@pytest.mark.parametrize("seed", range(12))
def test_chunks_cover_every_byte_once_and_are_held_whole_or_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    all_specs = specs(rng)
    trainers = sharded(all_specs, rng.randint(1, 4), rng)
    generators = {"whole": sharded(all_specs, 1, rng), "shared": sharded(all_specs, rng.randint(1, 3), rng)}
    chunks = cut_chunks({f"trainer-{i}": entry for i, entry in enumerate(trainers)}, generators, chunk_bytes=4096)
    counts = [torch.zeros(spec.num_rows * spec.row_bytes, dtype=torch.int32) for spec in all_specs]
    for entry in chunks:
        for part in entry.parts:
            counts[part.tensor][part.start : part.stop] += 1
        assert 0 < entry.num_bytes == sum(part.stop - part.start for part in entry.parts) <= 4096
        assert len({all_specs[part.tensor].is_trained for part in entry.parts} | {entry.is_trained}) == 1
    assert all((count == 1).all() for count in counts)
    for holding in [*trainers, *generators["whole"], *generators["shared"]]:
        held = set(held_chunks(chunks, holding))
        for index, entry in enumerate(chunks):
            inside = [
                holding.rows[part.tensor][0] * all_specs[part.tensor].row_bytes <= part.start
                and part.stop <= holding.rows[part.tensor][1] * all_specs[part.tensor].row_bytes
                for part in entry.parts
            ]
            assert all(inside) if index in held else not any(inside)
    for index, entry in enumerate(chunks):
        assert index in held_chunks(chunks, trainers[entry.sender])
        assert entry.start % 64 == 0
        assert entry.start + entry.num_bytes <= (
            chunks[index + 1].start if index + 1 < len(chunks) else slot_bytes(chunks)
        )


def test_small_tensors_share_a_chunk_and_copies_are_not_among_the_trained() -> None:
    named = [TensorSpec(f"t{i}", torch.float32, (8,), i < 5) for i in range(10)]
    whole = Holding(tuple(named), ((0, 8),) * 10)
    chunks = cut_chunks({"trainer": whole}, {"generator": [whole]}, 1 << 20)
    assert [(len(entry.parts), entry.is_trained) for entry in chunks] == [(5, True), (5, False)]


def test_large_tensors_do_not_part_the_small_ones_around_them() -> None:
    layers = [TensorSpec(f"{index}", torch.float32, (rows,), True) for index, rows in enumerate((16, 2, 16, 2, 16, 2))]
    holding = Holding(tuple(layers), tuple((0, spec.num_rows) for spec in layers))
    chunks = cut_chunks({"trainer-0": holding}, {"generator-0": [holding]}, 16 * 4)
    parts = sorted([part.tensor for part in chunk.parts] for chunk in chunks)
    assert parts == [[0], [1, 3, 5], [2], [4]]


def test_trainers_that_hold_the_same_share_the_sending() -> None:
    whole = Holding((TensorSpec("big", torch.float32, (4096, 64), True),), ((0, 4096),))
    chunks = cut_chunks({f"trainer-{i}": whole for i in range(4)}, {"generator": [whole]}, 1 << 16)
    sent = [sum(entry.num_bytes for entry in chunks if entry.sender == rank) for rank in range(4)]
    assert sent == [1 << 18] * 4


def test_rows_that_nobody_holds_are_an_error_that_names_them() -> None:
    spec = (TensorSpec("weight", torch.float32, (10, 2), True),)
    whole, part = Holding(spec, ((0, 10),)), Holding(spec, ((0, 6),))
    with pytest.raises(WeightSyncError, match="no trainer holds rows 6 to 10 of `weight`"):
        cut_chunks({"trainer": part}, {"generator": [whole]}, 1 << 20)
    with pytest.raises(WeightSyncError, match="worker generator has no place for rows 6 to 10 of `weight`"):
        cut_chunks({"trainer": whole}, {"generator": [part]}, 1 << 20)


def test_buckets_are_bounded_and_hold_what_is_sent_in_order() -> None:
    whole = Holding((TensorSpec("big", torch.uint8, (1000,), True),), ((0, 1000),))
    chunks = cut_chunks({"trainer": whole}, {"generator": [whole]}, 64)
    sent = list(range(0, len(chunks), 2))
    buckets = cut_buckets(chunks, sent, 200)
    assert [index for bucket in buckets for index in bucket] == sent
    assert all(sum(chunks[index].num_bytes for index in bucket) <= 200 for bucket in buckets)
    assert len(buckets) < len(sent)
