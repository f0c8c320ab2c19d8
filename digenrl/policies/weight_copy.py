"""Second sets of a policy's trained weights: references, old policies, averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from digenrl.averaging import DecaySchedule, NoUpdates
from digenrl.policies.policy import DiffusionPolicy
from digenrl.policies.shards import local_tensor
from digenrl.types import Condition


class WeightCopy(nn.Module):
    """The policy with other weights: a copy of those that are trained, which then follows them by a schedule.

    What is not trained is shared with the policy, so under LoRA a copy is as small as the adapter, and a copy that is
    never updated is the policy that training started from. Copies are buffers: they are saved and restored with the
    module, and no optimizer sees them.

    Example:
        >>> from digenrl.averaging import ConstantDecay
        >>> from tests.toy import ToyPolicy
        >>> policy = ToyPolicy()
        >>> policy.build()
        >>> old = WeightCopy(policy, ConstantDecay(0.5))
        >>> old.update()
        True
    """

    num_steps: Tensor
    """Optimizer steps that `update` has followed, an integer."""

    def __init__(self, policy: DiffusionPolicy, schedule: DecaySchedule) -> None:
        """Copy the trained weights of a policy that is built."""
        super().__init__()
        self._policy = (policy,)  # in a tuple: it is not a part of its copy
        self._schedule = schedule
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self.weights = nn.Module()
        for name, parameter in self._trained():
            *path, last = name.split(".")
            owner = self.weights
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            # An average in half precision would not move: its steps are below that resolution.
            is_average = not isinstance(schedule, NoUpdates)
            dtype = torch.promote_types(parameter.dtype, torch.float32) if is_average else parameter.dtype
            owner.register_buffer(last, parameter.detach().to(dtype, copy=True))

    @torch.no_grad()
    def forward(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data with these weights, without gradient; see `DiffusionPolicy.velocity`."""
        copies = dict(self.weights.named_buffers())
        trained = self._trained()
        whole = {p: copies[name].to(p.dtype) for name, p in trained if not isinstance(p, DTensor)}
        shards = [(local_tensor(p), local_tensor(copies[name])) for name, p in trained if isinstance(p, DTensor)]
        with _lent(shards):
            # Each place of a tied parameter once: torch's own way would leave the copy in a module that has two names.
            velocity: Tensor = torch.func.functional_call(
                self._policy[0], self._at_all_places(whole), (latents, sigma, condition), tie_weights=False
            )
        return velocity

    @torch.no_grad()
    def update(self) -> bool:
        """Follow the weights once, after an optimizer step; returns whether the schedule asked for it."""
        decay = self._schedule.decay(int(self.num_steps))
        self.num_steps += 1
        if decay is None:
            return False
        copies = dict(self.weights.named_buffers())
        for name, parameter in self._trained():
            copy = local_tensor(copies[name])
            copy.lerp_(local_tensor(parameter.detach()).to(copy.dtype), 1 - decay)
        return True

    def _at_all_places(self, values: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
        """Name the values by all places at which modules have their parameters."""
        return {
            f"{path}.{name}" if path else name: values[parameter]
            for path, module in self._policy[0].named_modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in values
        }

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [entry for entry in self._policy[0].named_parameters() if entry[1].requires_grad]

    def train(self, mode: bool = True) -> WeightCopy:
        """Stay in evaluation mode, as the policy does."""
        return super().train(False)

    def _get_name(self) -> str:
        return f"{type(self).__name__}[{self._schedule}]"


@contextmanager
def _lent(shards: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Put copies where blocks gather their parameters from, and what was there back, each as (there, copy).

    A graph that was made before is not touched: it ends in what was gathered, and gathers it again in its backward.
    """
    kept = [there.clone() for there, _ in shards]
    try:
        for there, copy in shards:
            there.copy_(copy)
        yield
    finally:
        for (there, _), value in zip(shards, kept, strict=True):
            there.copy_(value)
        if kept and kept[0].is_cuda:
            # A backward gathers on a stream that does not wait for this one.
            torch.cuda.current_stream().synchronize()
