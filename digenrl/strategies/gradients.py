"""The gradient that a trainer accumulates over a step, and how the ranks' become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard

from digenrl.policies.shards import is_first_holder, local_tensor

if TYPE_CHECKING:
    from digenrl.strategies.workers.settings import GradientSync


class Gradients:
    """The gradients of a module's trained parameters, on one rank of those that train together.

    A sharded block's parameters are whole while it computes, and the graph ends in these: `leaves`. With `grad_sync`
    step they keep what has been accumulated, whole, and `sum_over_ranks` leaves each rank its part. With micro_batch
    FSDP2 does that within each backward. Whatever was accumulated can so be summed up, forgotten or scaled at any time,
    and no backward needs to know that it is the last.

    Lifecycle: any number of backwards, then `join_parts`, `sum_over_ranks`, `norm`, `clip`, and `clear` after the
    optimizer's step.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        grad_sync: GradientSync = "step",
    ) -> None:
        """Take charge of `parameters`, those that the optimizer steps. Ranks with a sharded policy call it together."""
        stepped = {id(parameter) for parameter in parameters}
        self._trained = {name: entry for name, entry in module.named_parameters() if entry.requires_grad}
        self._stepped = [name for name, parameter in self._trained.items() if id(parameter) in stepped]
        self._rank, self._group, self._grad_sync = rank, group, grad_sync
        self._device = local_tensor(next(iter(self._trained.values()))).device
        self._regularizer: dict[str, Tensor] = {}
        self._reached: set[str] = set()
        """Sharded parameters that a gradient has reached since the last step, where FSDP2 sums them up."""
        self._whole = _whole_parameters(module, self._trained)
        if grad_sync == "micro_batch":
            for name, parameter in self._whole.items():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._reached.add(name))

    @property
    def holders(self) -> list[nn.Parameter]:
        """Whose `grad` has what was accumulated."""
        return [self._holder(name) for name in self._trained]

    @property
    def has_any(self) -> bool:
        """Whether anything was accumulated."""
        return bool(self._regularizer) or any(holder.grad is not None for holder in self.holders)

    def _holder(self, name: str) -> nn.Parameter:
        own = self._trained[name]
        return self._whole.get(name, own) if self._grad_sync == "step" else own

    def add_regularizer(self, loss: Tensor) -> None:
        """Accumulate the gradient of a regularizer beside the policy's; the graph is kept for that one."""
        leaves = [self._whole.get(name, parameter) for name, parameter in self._trained.items()]
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        found: dict[str, Tensor | None] = dict(zip(self._trained, gradients, strict=True))
        if self._grad_sync == "micro_batch":
            present = self._on_any_rank({name: found[name] for name in self._whole})
            for name in self._whole:  # as FSDP2 does it: at once, and the average
                found[name] = self._own_part(name, found[name]) / self._num_ranks if present[name] else None
        for name, gradient in found.items():
            if gradient is not None:
                so_far = self._regularizer.get(name)
                self._regularizer[name] = gradient if so_far is None else so_far + gradient

    @torch.no_grad()
    def join_parts(self, gradient_scale: float, row_scale: float) -> None:
        """Scale the policy's gradient by the one and add the regularizer's to it; scale both by the other."""
        for name in self._trained:
            holder, extra = self._holder(name), self._regularizer.pop(name, None)
            if holder.grad is not None and gradient_scale != 1.0:
                local_tensor(holder.grad).mul_(gradient_scale)
            if extra is not None:
                holder.grad = extra if holder.grad is None else holder.grad + extra
                self._reached.add(name)
            if holder.grad is not None and row_scale != 1.0:
                local_tensor(holder.grad).mul_(row_scale)

    @torch.no_grad()
    def sum_over_ranks(self) -> None:
        """Sum up over ranks; a gradient that no rank has stays absent."""
        if self._group is None:
            return
        present = self._on_any_rank({name: self._accumulated(name) for name in self._stepped})
        self._sum_plain([self._trained[name] for name in self._stepped if present[name] and name not in self._whole])
        for name, whole in self._whole.items():
            own = self._trained[name]
            if not present.get(name):
                own.grad = None
            elif self._grad_sync == "step":
                own.grad = self._own_part(name, whole.grad)
                whole.grad = None
            else:
                assert own.grad is not None, "FSDP2 gives all ranks their part"
                local_tensor(own.grad).mul_(self._num_ranks)  # it averages

    def _accumulated(self, name: str) -> Tensor | None:
        gradient = self._holder(name).grad
        is_given = name not in self._whole or self._grad_sync == "step" or name in self._reached
        return gradient if is_given else None  # FSDP2 gives zeros where nothing was

    @property
    def _num_ranks(self) -> int:
        return dist.get_world_size(self._group)

    def _on_any_rank(self, gradients: Mapping[str, Tensor | None]) -> dict[str, bool]:
        """Say of each gradient whether some rank has it."""
        is_here = [gradient is not None for gradient in gradients.values()]
        present = torch.tensor(is_here, dtype=torch.int32, device=self._device)
        dist.all_reduce(present, group=self._group)
        return {name: count > 0 for name, count in zip(gradients, present.tolist(), strict=True)}

    def _sum_plain(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters that are whole on all ranks, in one message per dtype."""
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            members = [parameter for parameter in parameters if parameter.dtype == dtype]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(_sum_dtype(dtype))
            dist.all_reduce(flat, group=self._group)
            for parameter, total in zip(members, flat.split([p.numel() for p in members]), strict=True):
                parameter.grad = total.view_as(parameter).to(dtype)

    def _own_part(self, name: str, gradient: Tensor | None) -> Tensor:
        """Sum a whole gradient over the ranks and give the rows that this one holds."""
        own = self._trained[name]
        assert isinstance(own, DTensor)
        if gradient is None:
            gradient = torch.zeros(own.shape, dtype=own.dtype, device=self._device)
        mesh = own.device_mesh
        total = DTensor.from_local(gradient.to(_sum_dtype(own.dtype)), mesh, [Partial()] * mesh.ndim, run_check=False)
        # Inside a host first: what travels between hosts is then a part only.
        total = total.redistribute(placements=[*[Partial()] * (mesh.ndim - 1), Shard(0)])
        return total.redistribute(placements=own.placements).to(own.dtype)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Give the norm of the whole gradient, once it is summed up, as a number on the CPU; the same on all ranks."""
        gradients = [gradient for name in self._stepped if (gradient := self._trained[name].grad) is not None]
        plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norm = torch.nn.utils.get_total_norm(plain).cpu() if plain else torch.zeros(())
        if not self._whole:
            return norm
        parts = [g for g in gradients if isinstance(g, DTensor) and is_first_holder(g, self._rank)]
        norms = [torch.linalg.vector_norm(local_tensor(part)).double() for part in parts]
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        squares = torch.stack([zero, *norms]).square().sum()
        dist.all_reduce(squares, group=self._group)
        return torch.sqrt(norm.double().square() + squares.cpu()).to(norm.dtype)

    def not_finite(self) -> list[str]:
        """Name the parameters whose gradient is not finite on some rank; all ranks call it together."""
        names = [name for name in self._stepped if self._trained[name].grad is not None]
        parts = [local_tensor(self._trained[name].grad) for name in names]  # type: ignore[arg-type]
        flags = torch.stack([(~torch.isfinite(part)).any() for part in parts]).int()
        if self._group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    @torch.no_grad()
    def clip(self, value: float, algorithm: Literal["norm", "value"], norm: Tensor) -> None:
        """Clip the gradient, whose norm is given, as torch's `clip_grad_norm_` or `clip_grad_value_` do."""
        parts = [local_tensor(g) for name in self._stepped if (g := self._trained[name].grad) is not None]
        if algorithm == "norm":
            factor = torch.clamp(value / (norm + 1e-6), max=1.0)
            for part in parts:
                part.mul_(factor.to(part.device, part.dtype))
        else:
            for part in parts:
                part.clamp_(-value, value)

    def clear(self) -> None:
        """Forget all that was accumulated."""
        for name, parameter in self._trained.items():
            parameter.grad = self._holder(name).grad = None
        self._regularizer.clear()
        self._reached.clear()


def _whole_parameters(module: nn.Module, trained: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Give, for each trained parameter that is sharded, the one that its block computes with.

    FSDP2 makes that once and from then on only takes and gives back its memory.
    """
    whole: dict[str, nn.Parameter] = {}
    for path, block in module.named_modules():
        if isinstance(block, FSDPModule):
            block.unshard()
            for name, parameter in module.get_submodule(path).named_parameters(prefix=path):
                if name in trained and isinstance(trained[name], DTensor) and not isinstance(parameter, DTensor):
                    whole[name] = parameter
            block.reshard()
    return whole


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
