"""What all parts of a worker share: the module, its settings and its place among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.engines import ObjectStore
from digenrl.metrics import Reduction
from digenrl.module import DiffusionRLModule
from digenrl.strategies.gradients import Gradients
from digenrl.strategies.optimizers import TrainingState
from digenrl.strategies.workers.reports import LogCall
from digenrl.strategies.workers.settings import WorkerSettings


class WorkerBase:
    """State of a worker; `Worker` joins the parts that use it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._settings = WorkerSettings()
        self._module: DiffusionRLModule
        self._optimizer: torch.optim.Optimizer
        self._gradients: Gradients
        self._rank, self._num_ranks = 0, 1
        self._group: dist.ProcessGroup | None = None
        """Of the ranks that compute together; None if this one computes alone."""
        self._hosts: tuple[str, ...] = ()
        self._log_calls: list[LogCall] | None = None
        self._trains = False
        self._offloaded: TrainingState | None = None
        self.policy_version = 0

    @property
    def _device(self) -> torch.device:
        return torch.device(self._settings.device)

    @property
    def _is_sharded(self) -> bool:
        """Whether this rank holds a part of the policy's blocks only."""
        return self._group is not None and (not self._trains or self._settings.sharding != "none")

    def _trained_parameters(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._settings.precision == "bf16-mixed":
            # Where weights are gathered for each use, one tensor has several values in its time, and a cache would keep
            # all of the policy.
            return torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=not self._is_sharded)
        return nullcontext()

    def _without_gradient(self) -> AbstractContextManager[Any]:
        """Forbid gradients, for good where nothing is trained: inference tensors save a tenth of a small policy's time.

        A trainer must not have them: what its module keeps of a rollout, such as embeddings, it also trains with. Nor
        can memory into which weights are gathered be used inside and outside of it.
        """
        return torch.no_grad() if self._trains or self._is_sharded else torch.inference_mode()

    def _log(self, name: str, value: Any, **kwargs: Any) -> None:
        value = value.detach().cpu() if isinstance(value, Tensor) else value
        if self._log_calls is not None:
            self._log_calls.append(LogCall(name, value, kwargs))
        else:
            reduction: Reduction = "max" if kwargs.get("reduce_fx") in ("max", torch.max) else "mean"
            self._module.track(name, torch.as_tensor(value, dtype=torch.float64).reshape(1), reduction=reduction)

    def _log_dict(self, values: Mapping[str, Any], **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value, **kwargs)
