"""What a policy's forward costs, found without computing it: operations, and bytes that are kept for the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from digenrl.policies.policy import DiffusionPolicy

_NUM_TRACED = 2  # blocks of a kind


@dataclass(frozen=True)
class Cost:
    """What grows with the rows of a forward: `fixed + per_row * rows`."""

    fixed: float
    per_row: float

    def of(self, num_rows: float) -> float:
        """Give the cost of so many rows."""
        return self.fixed + self.per_row * num_rows

    @classmethod
    def through(cls, one: float, two: float) -> Cost:
        """Take the costs of one row and of two."""
        return cls(2 * one - two, two - one)


@dataclass(frozen=True)
class BlockCosts:
    """Blocks of a policy that are alike."""

    count: int
    parameter_bytes: int
    """Of one of them, whole."""
    kept_bytes: Cost
    """What autograd keeps of one, its input included."""
    output_bytes: Cost
    """What one hands on to the next: with gradient checkpointing, all that is kept of it."""


@dataclass(frozen=True)
class ForwardCosts:
    """A forward with gradient, by what is kept of it for the backward."""

    flops: Cost
    """Multiplications and additions, each counted as one."""
    outside_bytes: Cost
    """Kept outside of the blocks."""
    first_bytes: Cost
    """What the first block of each kind keeps more, or less, than the others: it gets what is not trained yet."""
    shared_bytes: Cost
    """What all blocks of a kind get beside what they hand on, such as embeddings of positions and timesteps."""
    blocks: tuple[BlockCosts, ...]

    def kept_bytes(self, num_rows: float, *, checkpointing: bool) -> float:
        """Give the bytes that autograd keeps of a forward.

        Without checkpointing that is all of each block. With it, each block keeps its input, and what the backward
        computes again of one block at a time comes on top:

            outside + first + sum of blocks              without
            outside + shared + sum of inputs + largest   with checkpointing
        """
        outside = self.outside_bytes.of(num_rows)
        if not checkpointing:
            blocks = sum(block.count * block.kept_bytes.of(num_rows) for block in self.blocks)
            return outside + self.first_bytes.of(num_rows) + blocks
        inputs = sum(block.count * block.output_bytes.of(num_rows) for block in self.blocks)
        return outside + self.shared_bytes.of(num_rows) + inputs + self.largest_block_bytes(num_rows)

    def largest_block_bytes(self, num_rows: float) -> float:
        """Give what one block keeps at most: a bound of what a forward without gradient holds at a time."""
        return max((block.kept_bytes.of(num_rows) for block in self.blocks), default=self.outside_bytes.of(num_rows))


def trace_forward(policy: DiffusionPolicy, call: Callable[[int], Tensor], *, bf16: bool = False) -> ForwardCosts:
    """Trace a forward of one row and of two on tensors without memory.

    Of blocks that are alike two are traced, the second of which counts for all: it gets what blocks hand on. Attention
    counts as one that keeps no matrix of scores. The policy is as before afterwards.

    Args:
        policy: built, on any device; on the meta device it costs no memory.
        call: calls the policy, or its network, with that many rows of its own making.
        bf16: compute under bf16 autocast.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _without_memory(policy, but=_stood_in_for(policy)):
        one, two = (_trace(policy, call, num_rows, bf16=bf16) for num_rows in (1, 2))
    return ForwardCosts(
        flops=Cost.through(one.flops, two.flops),
        outside_bytes=Cost.through(one.outside, two.outside),
        first_bytes=Cost.through(one.firsts, two.firsts),
        shared_bytes=Cost.through(one.shared, two.shared),
        blocks=tuple(
            BlockCosts(
                first.count,
                first.parameter_bytes,
                Cost.through(first.kept, second.kept),
                Cost.through(first.handed_on, second.handed_on),
            )
            for first, second in zip(one.kinds, two.kinds, strict=True)
        ),
    )


@dataclass
class _Kind:
    """Counts of blocks that are alike, taken from the second of them where there is one."""

    count: int
    parameter_bytes: int
    traced: list[int] = field(default_factory=list)
    """Bytes that each of the traced ones keeps."""
    flops: float = 0.0
    handed_on: float = 0.0
    shared: float = 0.0
    output: Any = None

    @property
    def kept(self) -> int:
        return self.traced[-1]


@dataclass
class _Counts:
    kinds: list[_Kind]
    flops: float = 0.0
    outside: float = 0.0
    firsts: float = 0.0

    @property
    def shared(self) -> float:
        return max((kind.shared for kind in self.kinds), default=0.0)


@dataclass
class _Kept:
    """Counts the storages that autograd keeps, each once."""

    seen: set[int]
    num_bytes: int = 0
    storages: list[Any] = field(default_factory=list)  # held, so that no address is given twice

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.storages.append(storage)
            self.num_bytes += storage.nbytes()
        return tensor


def _trace(policy: DiffusionPolicy, call: Callable[[int], Tensor], num_rows: int, *, bf16: bool) -> _Counts:
    with ExitStack() as stack:
        weights = [*policy.parameters(), *policy.buffers()]
        kept = _Kept({tensor.untyped_storage()._cdata for tensor in weights})
        flops = _Flops()
        counts = _Counts(stack.enter_context(_watched_blocks(policy, kept, flops)))
        stack.enter_context(torch.enable_grad())
        # Saved tensors are those of a CPU, whose attention keeps no matrix of scores either.
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16))
        stack.enter_context(flops)
        with saved_tensors_hooks(kept.note, lambda tensor: tensor):
            output = call(num_rows)
        assert isinstance(output, Tensor), "a velocity"
        counts.outside = kept.num_bytes - sum(sum(kind.traced) for kind in counts.kinds)
        counts.firsts = sum(kind.traced[0] - kind.kept for kind in counts.kinds)
        others = sum((kind.count - len(kind.traced)) * kind.flops for kind in counts.kinds)
        counts.flops = flops.total + others
        return counts


@contextmanager
def _without_memory(policy: nn.Module, *, but: set[nn.Module]) -> Iterator[None]:
    """Lend the modules of a policy, but some, tensors that have shapes and no memory, on the CPU in name."""
    backups: list[tuple[dict[str, Any], dict[str, Any]]] = []
    fakes: dict[int, Tensor] = {}
    for module in (module for module in policy.modules() if module not in but):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            backups.append((table, dict(table)))
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
                table[name] = fakes[id(tensor)]
    try:
        yield
    finally:
        for table, before in backups:
            table.update(before)


@contextmanager
def _watched_blocks(policy: DiffusionPolicy, kept: _Kept, flops: _Flops) -> Iterator[list[_Kind]]:
    """Watch the first two blocks of each kind, and let the others hand on what the second did."""
    kinds: dict[object, _Kind] = {}
    blocks = list(policy.blocks())
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        weights = sum(parameter.nbytes for parameter in block.parameters())
        kind = kinds.setdefault(_kind_of(block), _Kind(0, weights))
        kind.count += 1
        is_traced = kind.count <= _NUM_TRACED
        block.forward = _watched(block.forward, kind, kept, flops) if is_traced else _stand_in(kind)
    try:
        yield list(kinds.values())
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _stood_in_for(policy: DiffusionPolicy) -> set[nn.Module]:
    """Give the modules of blocks that are not traced."""
    counts: Counter[object] = Counter()
    found: set[nn.Module] = set()
    for block in policy.blocks():
        kind = _kind_of(block)
        counts[kind] += 1
        if counts[kind] > _NUM_TRACED:
            found.update(block.modules())
    return found


def _kind_of(block: nn.Module) -> object:
    entries = [(name, tuple(entry.shape), entry.dtype, entry.requires_grad) for name, entry in block.named_parameters()]
    return type(block), tuple(entries)


def _watched(forward: Callable[..., Any], kind: _Kind, kept: _Kept, flops: _Flops) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        bytes_before, flops_before = kept.num_bytes, flops.total
        kind.output = forward(*args, **kwargs)
        kind.traced.append(kept.num_bytes - bytes_before)
        kind.flops = flops.total - flops_before
        kind.handed_on = _distinct_bytes(kind.output)
        kind.shared = _distinct_bytes((args, kwargs))
        return kind.output

    return watched


def _stand_in(kind: _Kind) -> Callable[..., Any]:
    return lambda *args, **kwargs: kind.output


def _distinct_bytes(tree: Any) -> int:
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor)
    }
    return sum(storages.values())


class _Flops(TorchDispatchMode):
    """Counts the operations of products of matrices, convolutions and attention, and of nothing else."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._overloadpacket is _CPU_ATTENTION:  # which the registry leaves out
            self.total += _attention_flops(*(tensor.shape for tensor in args[:3]))
        elif func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output


_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Count two products of matrices: queries [B, H, S, D] with keys [B, H, T, D], and scores with values."""
    batch, heads, num_queries, width = query
    return 2 * batch * heads * num_queries * key[2] * (width + value[3])
