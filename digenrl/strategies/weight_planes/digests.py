"""Digests of weights: cheap enough to be taken of every transfer."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, sha256

import numpy as np
import torch
from torch import Tensor

DIGEST_BYTES = 16

_COLUMNS = 512  # 64-bit words; two mebibytes have as many rows, and hashing costs one part in 256 of their words

_WORD_BYTES = 8

_TABLE_BYTES = 1 << 22  # small tensors are joined up to about this size, so that a copy of them stays small


def chunk_digest(data: Tensor) -> bytes:
    """Digest bytes [N] (uint8): 16 bytes, the same on every device.

    The 64-bit words are laid out as a table; its row and column sums, taken at memory speed where the bytes are, are
    then hashed, and so is what does not fill a row. Any changed word and any two exchanged words show. Not meant to
    withstand forgery.
    """
    digest = sha256(str(len(data)).encode())  # twice as fast as others where the processor knows it
    whole = len(data) // (_COLUMNS * _WORD_BYTES) * (_COLUMNS * _WORD_BYTES)
    if whole:
        if data.storage_offset() % _WORD_BYTES:
            data = data.clone()
        table = data[:whole].view(torch.int64).view(-1, _COLUMNS)
        digest.update(table.sum(dim=1).cpu().numpy().data)
        # NumPy adds up columns in half of torch's time; on a device the sums are the same, modulo 2^64.
        columns = np.add.reduce(table.numpy(), axis=0) if table.device.type == "cpu" else table.sum(dim=0).cpu().numpy()
        digest.update(columns.data)
    if whole < len(data):
        digest.update(data[whole:].cpu().numpy().data)
    return digest.digest()[:DIGEST_BYTES]


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
