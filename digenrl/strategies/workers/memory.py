"""How much memory a batch needs, and how much a worker may still take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from digenrl.policies.shards import local_tensor

_UNLIMITED = 1 << 62

_FILES = {
    "": (Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")),
    "memory": (
        Path("/sys/fs/cgroup/memory"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
}
"""Where the two versions of control groups say what there is, by the name of their controller."""


class MemoryMeter:
    """Measures what a forward and backward need beside the weights, their gradients and whatever was there before.

    On a CPU it counts what autograd keeps for the backward; on a GPU it asks the allocator for the most that was in
    use.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> meter = MemoryMeter(torch.device("cpu"), [weight])
        >>> with meter.forward():
        ...     loss = (weight * torch.ones(3)).exp().sum()
        >>> loss.backward()
        >>> meter.num_bytes  # three factors and three results of `exp`, four bytes each
        24
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor]) -> None:
        """Begin to measure; `weights` are kept anyway."""
        self._device = device
        self._seen = {local_tensor(weight).untyped_storage().data_ptr() for weight in weights}
        self._kept_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch the forward."""
        if self._device.type == "cuda":
            yield
            self._kept_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        with saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        storage = local_tensor(tensor).untyped_storage()
        if storage.data_ptr() not in self._seen:  # what is kept is not freed, so its address is no other's
            self._seen.add(storage.data_ptr())
            self._kept_bytes += storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes, to be asked for after the backward."""
        if self._device.type != "cuda":
            return self._kept_bytes
        # The backward's peak may hold gradients that stay; without them it is this, or that of the forward.
        beyond = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
        return max(self._kept_bytes, beyond)


def free_bytes(device: torch.device, num_workers: int) -> int:
    """Give the bytes that are free for one worker.

    Args:
        device: of a GPU, the worker has it alone; the host's memory is shared.
        num_workers: workers that share the host's memory, at most.
    """
    if device.type == "cuda":
        # What PyTorch's allocator has reserved and does not use is free, too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min(_available_on_host(), _available_in_cgroup()) // num_workers


def _available_on_host() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_in_cgroup() -> int:
    """Give what the control groups of this process leave, as containers and batch systems set them."""
    available = _UNLIMITED
    for controllers, path in _groups():
        if controllers not in _FILES:
            continue
        root, names = _FILES[controllers]
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                available = min(available, _left_in(folder, *names))
    return available


def _groups() -> list[tuple[str, str]]:
    """Give the controllers and the path of each control group that this process is in."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    return [(controllers, path) for _, controllers, path in (line.split(":", 2) for line in lines)]


def _left_in(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> int:
    try:
        limit = (folder / limit_file).read_text(encoding="ascii").strip()
        used = int((folder / usage_file).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # a root without files of its own, or a group that is not visible from inside of a container
        return _UNLIMITED
    if limit == "max":
        return _UNLIMITED
    return max(int(limit) - used + int(stat.get(cache_key, 0)), 0)  # unused cache is given up on demand
