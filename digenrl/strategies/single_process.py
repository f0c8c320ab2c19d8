"""A Lightning strategy of one process that computes nothing itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from digenrl.strategies.precision import RemotePrecision

_DEVICES = {"CUDAAccelerator": "cuda", "CPUAccelerator": "cpu"}


class SingleProcessStrategy(Strategy):
    """What Lightning asks of every strategy, answered by a driver that has no ranks, no weights and no device.

    What the Trainer was told of devices and precision is kept for the workers.
    """

    def __init__(self) -> None:
        self.parallel_devices: list[torch.device] | None = None  # the Trainer sets these two
        self.num_nodes = 1
        self._worker_device = "cpu"
        # Not `accelerator=CPUAccelerator()`: that would make any explicit `Trainer(accelerator=...)` an error.
        super().__init__()

    @property
    def root_device(self) -> torch.device:
        """The driver's device; workers have their own."""
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """There is one driver."""
        return True

    @property
    def global_rank(self) -> int:
        """There is one driver."""
        return 0

    def model_to_device(self) -> None:
        """Leave the skeleton on the meta device."""

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Give back what the one driver has."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Wait for nobody."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give back what the one driver has."""
        return obj

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Give back what the one driver has."""
        return tensor

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Leave prompts as they are: they hold no tensors."""
        return batch

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build nothing here."""
        yield

    @property
    def precision_plugin(self) -> RemotePrecision:
        """Lightning's plugin, wrapped so that its hooks run and its arithmetic does not."""
        if not isinstance(self._precision_plugin, RemotePrecision):
            self._precision_plugin = RemotePrecision(self._precision_plugin or Precision())
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin

    @property
    def accelerator(self) -> Accelerator | None:
        """The driver's accelerator is always the CPU; the one that the Trainer chose is the workers'."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator = None if accelerator is None else CPUAccelerator()
        if accelerator is not None:
            self._worker_device = _DEVICES.get(type(accelerator).__name__, type(accelerator).__name__)
