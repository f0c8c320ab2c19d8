"""Digests of weights that lie on any device."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor
from xxhash import xxh3_128

DIGEST_BYTES = 16

_COLUMNS = 512  # 64-bit words; two mebibytes have as many rows, and hashing costs one part in 256 of their words

_WORD_BYTES = 8

_TABLE_BYTES = 1 << 22  # small tensors are joined up to about this size, so that a copy of them stays small


def table_digest(data: Tensor) -> bytes:
    """Digest bytes [N] (uint8) where they are, at the memory speed of their device; equal on every device.

    The 64-bit words are the entries of a table; its row and column sums are hashed, and so is what does not fill a row.
    Any changed word and any two exchanged words show. Not meant to withstand forgery.
    """
    whole = len(data) // (_COLUMNS * _WORD_BYTES) * (_COLUMNS * _WORD_BYTES)
    digest = xxh3_128(str(len(data)).encode())
    if whole:
        aligned = data[:whole].clone() if data.storage_offset() % _WORD_BYTES else data[:whole]
        words = aligned.view(torch.int64).view(-1, _COLUMNS)
        for dim in (1, 0):
            digest.update(words.sum(dim=dim).cpu().numpy().data)
    digest.update(data[whole:].cpu().numpy().data)
    return digest.digest()


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest names, shapes and bits, in order; equal digests mean equal weights.

    Small tensors are digested together: on a device, a call each would take longer than their words.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    waiting: list[Tensor] = []
    num_waiting = 0
    for name, tensor in named_tensors:
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        data = tensor_bytes(tensor)
        if waiting and data.device != waiting[0].device:
            digest.update(table_digest(_joined(waiting)))
            waiting, num_waiting = [], 0
        waiting.append(data)
        num_waiting += len(data)
        if num_waiting >= _TABLE_BYTES:
            digest.update(table_digest(_joined(waiting)))
            waiting, num_waiting = [], 0
    if waiting:
        digest.update(table_digest(_joined(waiting)))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Give a tensor's bytes [N] (uint8): its own memory if that is contiguous, and else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
