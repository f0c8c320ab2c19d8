"""Bytes that are copied from memory to memory, and digested while they are at hand."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_digest

from digenrl.strategies.weight_planes.digests import table_digest

_STEP_BYTES = 1 << 18  # copied and then digested: that many are still in the processor's own cache


class ByteView:
    """Bytes of a tensor, prepared to be copied and digested again and again.

    On the CPU the digest is XXH3, which reads as fast as memory gives. A device adds its bytes up where they are, see
    `table_digest`. So equal bytes have equal digests on equal kinds of devices, such as a run's workers have.
    """

    def __init__(self, data: Tensor) -> None:
        """Look at bytes [N] (uint8); nothing is copied."""
        self.tensor = data
        self._host = data.numpy() if data.device.type == "cpu" else None
        self._steps = [] if self._host is None else np.split(self._host, range(_STEP_BYTES, len(data), _STEP_BYTES))

    def digest(self) -> bytes:
        """Digest these bytes as they are now; returns `DIGEST_BYTES` bytes."""
        return table_digest(self.tensor) if self._host is None else xxh3_128_digest(self._host.data)

    def copy_to(self, target: ByteView) -> bytes:
        """Copy these bytes to another place of as many; returns their digest."""
        return _copy(target, self, digested=self)

    def copy_from(self, source: ByteView) -> bytes:
        """Take over as many bytes from another place; returns the digest of what these are then."""
        return _copy(self, source, digested=self)


def _copy(target: ByteView, source: ByteView, *, digested: ByteView) -> bytes:
    """Copy; where a device takes part, the copy is under way when this returns."""
    if target._host is None or source._host is None:
        target.tensor.copy_(source.tensor, non_blocking=True)
        return digested.digest()
    digest = xxh3_128()
    for there, here, own in zip(target._steps, source._steps, digested._steps, strict=True):
        np.copyto(there, here)  # the C library's copy is a tenth faster than torch's loop
        digest.update(own.data)
    return digest.digest()
