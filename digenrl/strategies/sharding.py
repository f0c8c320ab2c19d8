"""Sharing a policy's blocks among ranks (FSDP2)."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from digenrl.policies import DiffusionPolicy
from digenrl.policies.shards import full_tensor, is_first_holder, local_rows, local_tensor, shard_of, with_rows

if TYPE_CHECKING:
    from digenrl.strategies.workers.settings import GradientSync, Sharding

__all__ = [
    "check_hosts",
    "full_tensor",
    "is_first_holder",
    "is_sharded",
    "local_rows",
    "local_tensor",
    "make_mesh",
    "shard_of",
    "shard_policy",
    "with_rows",
]


def check_hosts(sharding: Sharding, hosts: Sequence[str]) -> None:
    """Check that ranks can hold what `sharding` asks of their hosts.

    Raises:
        ValueError: `"hybrid"` with other numbers of ranks on different hosts, or one on each.
    """
    counts = Counter(hosts)
    if sharding == "hybrid" and (len(set(counts.values())) != 1 or len(counts) == len(hosts)):
        found = ", ".join(f"{count} on {host}" for host, count in sorted(counts.items()))
        raise ValueError(
            f"`sharding` hybrid needs equally many trainers on each host, two or more, got {found}: change `trainers`, "
            "or use `sharding` fsdp."
        )


def make_mesh(device: str, sharding: Sharding, hosts: Sequence[str]) -> DeviceMesh:
    """Arrange the ranks of the default process group: in one row, or, for `"hybrid"`, in a row for each host."""
    if sharding != "hybrid":
        return DeviceMesh(device, list(range(len(hosts))), mesh_dim_names=("shard",))
    rows: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        rows.setdefault(host, []).append(rank)
    return DeviceMesh(device, list(rows.values()), mesh_dim_names=("replicate", "shard"))


def is_sharded(policy: nn.Module) -> bool:
    """Whether `shard_policy` was called on it."""
    return isinstance(policy, FSDPModule)


def shard_policy(policy: DiffusionPolicy, mesh: DeviceMesh, *, grad_sync: GradientSync) -> None:
    """Let each rank hold a part of each block's parameters; a block gathers them while it computes.

    What lies outside of the blocks stays whole on all ranks, so that `encode` and `decode` need no other rank, and so
    do parameters without axes or entries. Parameters travel in their own dtype: autocast decides what they are computed
    in, as it does where they are whole. All ranks must call `policy` together from now on.

    Args:
        policy: built, on the CPU, the device or the meta device.
        mesh: the ranks.
        grad_sync: with `"micro_batch"` each backward averages the blocks' gradients over the ranks in float32.

    Raises:
        ValueError: the policy has no blocks, or blocks that cannot be shared among ranks.
    """
    # Those inside of others first, as FSDP2 needs it.
    blocks = sorted(dict.fromkeys(policy.blocks()), key=lambda block: sum(1 for _ in block.modules()))
    _check_blocks(policy, blocks)
    shared = {entry for block in blocks for entry in block.parameters() if entry.ndim > 0 and entry.numel() > 0}
    _check_shared(policy, blocks, shared)
    whole = {parameter for parameter in policy.parameters() if parameter not in shared}
    precision = MixedPrecisionPolicy(
        reduce_dtype=torch.float32 if grad_sync == "micro_batch" else None, cast_forward_inputs=False
    )
    # The root's output may well be a view: it has no parameters of its own that a backward must gather.
    name = re.escape(f"FSDP{type(policy).__name__}") + "|" + re.escape(type(policy).__name__)
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(({name})\)")
    for block in blocks:
        block.register_forward_hook(_own_outputs)  # before FSDP2's own
        fully_shard(block, mesh=mesh, mp_policy=precision, ignored_params=whole)
    root = fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=whole)
    _note_no_inference(root)
    root.set_requires_gradient_sync(grad_sync == "micro_batch")
    if grad_sync == "micro_batch" and hasattr(root, "set_reduce_scatter_unused_params"):
        # Where a parameter is used on some ranks only, all must send something; older versions cannot do that.
        root.set_reduce_scatter_unused_params(True)


def _own_outputs(block: nn.Module, args: Any, outputs: Any) -> Any:
    """Copy what a block gives as views of other tensors.

    The backward gathers the block's parameters when it comes to the block's outputs. A policy that goes on to change a
    view in place would take it around them.
    """
    if not torch.is_grad_enabled():
        return outputs
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, outputs)


def _note_no_inference(root: FSDPModule) -> None:
    """Take back what FSDP2 notes of a forward, for the order of its backward, where there will be none.

    It has no interface for that, and would keep a note for each block and forward of all rollouts to come.
    """
    state = root._get_fsdp_state()
    start = 0

    def note_start(*_: Any) -> None:
        nonlocal start
        start = len(state._comm_ctx.post_forward_order)

    def take_back(*_: Any) -> None:
        if not torch.is_grad_enabled():
            order = state._comm_ctx.post_forward_order
            for group in order[start:]:
                group._post_forward_indices.pop()
            del order[start:]

    assert isinstance(root, nn.Module)
    root.register_forward_pre_hook(note_start)
    root.register_forward_hook(take_back)


def _check_blocks(policy: DiffusionPolicy, blocks: Sequence[nn.Module]) -> None:
    """Find blocks that FSDP2 cannot share among ranks."""
    name = f"`{type(policy).__name__}.blocks`"
    if not blocks:
        raise ValueError(
            f"ranks share the blocks of a policy, but {name} gives none: define it to give the repeated modules, or "
            "leave `sharding` at none and `devices_per_generator` at 1."
        )
    for block in blocks:
        if block is policy:
            raise ValueError(f"ranks share the blocks of a policy, but {name} gives the policy itself.")
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"ranks share the blocks of a policy, but {name} gives a {type(block).__name__} of modules: give these."
            )


def _check_shared(policy: DiffusionPolicy, blocks: Sequence[nn.Module], shared: set[nn.Parameter]) -> None:
    """Find what FSDP2 cannot share among ranks, or would compute with wrongly."""
    inside = {id(module) for block in blocks for module in block.modules()}
    owners: dict[nn.Parameter, nn.Module] = {}
    for block in blocks:
        for entry in block.parameters():
            owner = owners.setdefault(entry, block)
            if entry in shared and owner not in block.modules():  # else it is a block inside of this one
                raise ValueError(
                    f"two blocks of `{type(policy).__name__}` have a parameter of shape {list(entry.shape)} in common, "
                    "and so cannot be sharded: give them parameters of their own, or leave one out of `blocks`."
                )
    for path, module in policy.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and parameter in shared:
                raise ValueError(
                    f"`{f'{path}.{name}' if path else name}` is also a parameter of a block, and so cannot be sharded: "
                    f"leave that block out of `{type(policy).__name__}.blocks`, or do not tie the two."
                )
    for block in blocks:
        dtypes = {entry.dtype for entry in block.parameters() if entry in shared and entry.requires_grad}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(
                f"a block of `{type(policy).__name__}` has trained parameters of {names}: sharding needs one dtype."
            )
