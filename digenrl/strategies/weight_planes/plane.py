"""How new weights get from the trainers to the generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from digenrl.engines import Task

_TABLE_COLUMNS = 512  # hashing costs one part in 256 of the words, and the sums stay long runs of memory

_TABLE_WORDS = 1 << 20  # small tensors are joined up to about this size, so that a copy of them stays small


class WeightSyncError(RuntimeError):
    """Weights did not arrive as they were sent, or there was nothing new to send."""


class WeightPlane(ABC):
    """Publishes versions of the trained weights. The driver owns it; workers move the bytes.

    Loading is pull: a generator loads a version when it reaches the message, between trajectories, so a busy
    generator never holds up a trainer. A generator acknowledges each load
    once it has compared the digest of what it then holds.
    """

    @abstractmethod
    def setup(self, trainers: Sequence[str], generators: Sequence[str]) -> None:
        """Agree with the workers on what is transferred, and where."""

    @abstractmethod
    def publish(self, version: int, *, must_change: bool) -> None:
        """Have the trainers write version `version`; from then on `load` gives it.

        Args:
            version: of the weights that the trainers hold now.
            must_change: whether weights equal to the last published ones are an error.

        Raises:
            WeightSyncError: `must_change`, and no tensor differs from the version before.
        """

    @abstractmethod
    def load(self, generator: str, version: int) -> Task:
        """Queue a generator's load of the version published last; its result is the `Span` it took."""

    @abstractmethod
    def close(self) -> None:
        """Release the transfer's memory."""


@dataclass(frozen=True)
class WrittenWeights:
    """What a trainer has written for the generators."""

    digest: str
    """Of all that was written."""
    trained_digest: str
    """Of the trained weights alone: copies of them change even where the optimizer changes nothing."""


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest names, shapes and bits, in order; equal digests mean equal weights.

    The 32-bit words of a tensor are laid out as a table; its row and column sums, taken at memory speed where the
    tensor is, are then hashed. Small tensors share a table: a call each would take longer than their words. Any changed
    word and any two exchanged words show. Not meant to withstand forgery.
    """
    digest = blake2b(digest_size=16)
    waiting: list[Tensor] = []
    num_waiting = 0
    for name, tensor in named_tensors:
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        words = _words(tensor.detach())
        if waiting and (words.dtype, words.device) != (waiting[0].dtype, waiting[0].device):
            _add_table(digest, waiting)
            waiting, num_waiting = [], 0
        waiting.append(words)
        num_waiting += len(words)
        if num_waiting >= _TABLE_WORDS:
            _add_table(digest, waiting)
            waiting, num_waiting = [], 0
    if waiting:
        _add_table(digest, waiting)
    return digest.hexdigest()


def _add_table(digest: blake2b, tensors: list[Tensor]) -> None:
    """Hash the sums of one table of words."""
    words = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    whole = len(words) // _TABLE_COLUMNS * _TABLE_COLUMNS
    table = words[:whole].view(-1, _TABLE_COLUMNS)
    sums = [table.sum(dim=0, dtype=torch.int64), table.sum(dim=1, dtype=torch.int64), words[whole:].long()]
    digest.update(torch.cat(sums).cpu().numpy().data)


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.int8, 2: torch.int16}.get(size, torch.int32))
