"""A loader that lets the strategy see batches before Lightning asks for them, and that resumes exactly."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from digenrl.data import PromptLoader, epoch_length


class LookaheadLoader:
    """Wraps the training data loader. Lightning iterates it as usual; `peek` shows what comes next.

    Position: `state_dict` counts batches that were committed, that is, whose optimizer step was made; batches
    that were yielded or peeked at since are given again after a resume. Peeking may cross one epoch border.

    Example:
        >>> loader = LookaheadLoader([[0], [1], [2]])
        >>> batches = iter(loader)
        >>> loader.peek(2), next(batches)
        ([[0], [1]], [0])
        >>> loader.commit(1)
        >>> loader.state_dict()["num_committed"]
        1
    """

    def __init__(self, loader: Any, *, limit: int | float | None = None) -> None:
        """Wrap `loader`; `limit` is Lightning's `limit_train_batches`, a count or a share of an epoch's batches."""
        self.loader = loader
        self._num_batches = epoch_length(loader, limit)
        self._epoch = -1
        self._num_committed = 0
        self._buffer: deque[tuple[int, Any]] = deque()
        self._source: Iterator[Any] = iter(())
        self._source_epoch = -1
        self._rng_states: dict[int, list[torch.Tensor]] = {}
        self._resumed_rng_states: list[torch.Tensor] | None = None
        self._num_to_skip = 0
        self._is_untouched = False

    @property
    def has_length(self) -> bool:
        """Whether the loader says how many batches an epoch has; of others Lightning takes one in advance."""
        return epoch_length(self.loader, None) is not None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> LookaheadLoader:
        # Lightning asks twice for the first epoch of a loader that it was given later in a run.
        if self._is_untouched:
            return self
        self._is_untouched = True
        self._epoch += 1
        # Lightning may leave an epoch early (`limit_train_batches`): what it did not take is not trained.
        self._buffer = deque(entry for entry in self._buffer if entry[0] >= self._epoch)
        if self._source_epoch < self._epoch:
            self._open(self._epoch)
        self._num_committed, self._num_to_skip = self._num_to_skip, 0
        return self

    def __next__(self) -> Any:
        self._is_untouched = False
        if self._buffer:
            epoch, batch = self._buffer[0]
            if epoch > self._epoch:
                raise StopIteration
            self._buffer.popleft()
            return batch
        if self._source_epoch > self._epoch:
            raise StopIteration
        return next(self._source)

    def peek(self, num_batches: int) -> list[Any]:
        """Give the next batches without taking them; fewer than asked for only behind the next epoch's end."""
        while len(self._buffer) < num_batches:
            try:
                self._buffer.append((self._source_epoch, next(self._source)))
            except StopIteration:
                if self._source_epoch > self._epoch:
                    break
                self._open(self._epoch + 1)
        return [batch for _, batch in list(self._buffer)[:num_batches]]

    def commit(self, num_batches: int) -> None:
        """Count batches as done: they will not come again after a resume."""
        self._num_committed += num_batches

    def state_dict(self) -> dict[str, Any]:
        """Give the position of the committed batches, and the random states their epoch, or the next, begins with."""
        is_between = self._epoch < 0 or self._is_over(self._num_committed)
        epoch = self._epoch + 1 if is_between else self._epoch
        return {
            "epoch": self._epoch,
            "num_committed": self._num_committed,
            "rng_states": self._rng_states.get(epoch) or self._read_rng_states(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the last committed batch."""
        self._buffer.clear()
        self._source, self._source_epoch = iter(()), -1
        self._is_untouched = False
        self._resumed_rng_states = state_dict["rng_states"]
        self._epoch, self._num_committed, self._num_to_skip = state_dict["epoch"], state_dict["num_committed"], 0
        if self._epoch >= 0 and not self._is_over(self._num_committed):
            self._epoch, self._num_to_skip = self._epoch - 1, self._num_committed

    def _is_over(self, num_committed: int) -> bool:
        return self._num_batches is not None and num_committed >= self._num_batches

    def _open(self, epoch: int) -> None:
        """Start reading an epoch, behind the batches to skip."""
        self._source_epoch = epoch
        if isinstance(self.loader, PromptLoader):
            self._source = self.loader.batches(epoch, start=self._num_to_skip)
            return
        if self._resumed_rng_states is not None:
            self._write_rng_states(self._resumed_rng_states)
            self._resumed_rng_states = None
        self._rng_states[epoch] = self._read_rng_states()
        self._rng_states.pop(epoch - 2, None)
        for sampler in _samplers(self.loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        source = iter(self.loader)
        # The first batch now: samplers draw their order from the global random state when first asked.
        first = list(itertools.islice(source, 1))
        self._source = itertools.chain(first, source)
        for _ in range(self._num_to_skip):
            next(self._source)

    def _read_rng_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(rng.get_state() for rng in _random_sources(self.loader))]

    def _write_rng_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for rng, state in zip(_random_sources(self.loader), states[1:], strict=True):
            rng.set_state(state)


def _random_sources(loader: Any) -> list[torch.Generator]:
    """Give the random sources that a data loader or its samplers own."""
    owners = [loader, *_samplers(loader), *(getattr(sampler, "sampler", None) for sampler in _samplers(loader))]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(rng): rng for rng in found if isinstance(rng, torch.Generator)}.values())


def _samplers(loader: Any) -> list[Any]:
    return [getattr(loader, name) for name in ("sampler", "batch_sampler") if hasattr(loader, name)]
