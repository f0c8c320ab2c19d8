"""Digests of weights: cheap enough to be taken of every transfer."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

DIGEST_BYTES = 16

_COLUMNS = 512  # 64-bit words; two mebibytes have as many rows, and hashing costs one part in 256 of their words

_WORD_BYTES = 8

_TABLE_BYTES = 1 << 22  # small tensors are joined up to about this size, so that a copy of them stays small


class ByteTable:
    """Bytes of a tensor, laid out so that digests of what they are then can be taken again and again.

    The 64-bit words are the entries of a table; its row and column sums, taken at memory speed where the bytes are, are
    hashed, and so is what does not fill a row. Any changed word and any two exchanged words show. Not meant to
    withstand forgery.
    """

    def __init__(self, data: Tensor) -> None:
        """Look at bytes [N] (uint8); nothing is copied."""
        whole = len(data) // (_COLUMNS * _WORD_BYTES) * (_COLUMNS * _WORD_BYTES)
        self._begun = sha256(str(len(data)).encode())  # twice as fast as others where the processor knows it
        self._rest = data[whole:]
        self._unaligned = data if whole and data.storage_offset() % _WORD_BYTES else None
        self._words: Tensor | None = None
        self._host_words: np.ndarray[Any, Any] | None = None
        if not whole or self._unaligned is not None:
            return
        self._words = data[:whole].view(torch.int64).view(-1, _COLUMNS)
        if data.device.type == "cpu":
            self._host_words = self._words.numpy()  # adds columns up in half of torch's time

    def digest(self) -> bytes:
        """Take the 16 bytes of the digest; they are the same on every device."""
        if self._unaligned is not None:
            return chunk_digest(self._unaligned.clone())
        digest = self._begun.copy()
        if self._host_words is not None:
            digest.update(np.add.reduce(self._host_words, axis=1))
            digest.update(np.add.reduce(self._host_words, axis=0))
        elif self._words is not None:
            digest.update(self._words.sum(dim=1).cpu().numpy().data)
            digest.update(self._words.sum(dim=0).cpu().numpy().data)
        if len(self._rest):
            digest.update(self._rest.cpu().numpy().data)
        return digest.digest()[:DIGEST_BYTES]


def chunk_digest(data: Tensor) -> bytes:
    """Digest bytes [N] (uint8), see `ByteTable`."""
    return ByteTable(data).digest()


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy bytes [N] (uint8) from tensor to tensor; where a device takes part, wait for it before using them."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())  # the C library's copy is a tenth faster than torch's loop
    else:
        target.copy_(source, non_blocking=True)


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest names, shapes and bits, in order; equal digests mean equal weights.

    Small tensors share a table, see `chunk_digest`: a call each would take longer than their words.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    waiting: list[Tensor] = []
    num_waiting = 0
    for name, tensor in named_tensors:
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        data = tensor_bytes(tensor)
        if waiting and data.device != waiting[0].device:
            digest.update(chunk_digest(_joined(waiting)))
            waiting, num_waiting = [], 0
        waiting.append(data)
        num_waiting += len(data)
        if num_waiting >= _TABLE_BYTES:
            digest.update(chunk_digest(_joined(waiting)))
            waiting, num_waiting = [], 0
    if waiting:
        digest.update(chunk_digest(_joined(waiting)))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Give a tensor's bytes [N] (uint8): its own memory if that is contiguous, and else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
