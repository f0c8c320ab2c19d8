"""Which device of its host each worker sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def visible_devices(indices: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Give devices as a worker's `CUDA_VISIBLE_DEVICES` must name them.

    Args:
        indices: of the Trainer's devices, as this process counts them.
        environment: of this process; its own `CUDA_VISIBLE_DEVICES` may leave out or reorder devices.

    Example:
        >>> visible_devices([0, 1], {"CUDA_VISIBLE_DEVICES": "2,5"})
        ('2', '5')
        >>> visible_devices([1], {})
        ('1',)
    """
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named[index] if named else str(index) for index in indices)
