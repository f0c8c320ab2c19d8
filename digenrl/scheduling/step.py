"""The scheduler's book of one step: what of it is untouched, being made, waiting and trained."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from digenrl.scheduling.work import MicroBatch, Slice


class StepWork:
    """One step's micro-batches on their way from unassigned to trained.

    A micro-batch is `unassigned` until a worker takes a slice of it: generators take slices from the front, an
    assisting trainer takes a whole one from the back. It enters the update queue when its last slice is scored.

    Early slices must be made with the weights before the step's own (docs/design/staleness.md); nobody takes them for
    anything else.

    Invariant: a slice is in exactly one of `unassigned`, `_opened`, `early`, in the hands of a worker, waiting for its
    rewards, or scored.
    """

    def __init__(
        self, micro_batches: tuple[MicroBatch, ...], policy_version: int, *, shares_rollout: bool = False
    ) -> None:
        self.index = micro_batches[0].step
        self.policy_version = policy_version
        self.shares_rollout = shares_rollout
        """Whether the version before its own makes the very same samples."""
        self.num_samples = sum(len(micro_batch) for micro_batch in micro_batches)
        self.unassigned: deque[MicroBatch] = deque(micro_batches)
        self.early: deque[Slice] = deque()
        """Slices that must be made with the weights before the step's own (`staleness_mode="exact"`)."""
        self.update_queue: deque[MicroBatch] = deque()
        self.num_stale_samples = 0
        self.num_assisted = 0
        self.num_slices_in_hand = 0
        """Slices that generators make or score at present."""
        self._num_samples_in_hand = 0
        self._starts_in_hand_s = 0.0  # sum of the times at which they were taken
        self._micro_batches = {micro_batch.index: micro_batch for micro_batch in micro_batches}
        self._opened: deque[Slice] = deque()
        self._num_opened_samples = 0
        self._unscored = {micro_batch.index: set(micro_batch.slices) for micro_batch in micro_batches}
        self._untrained = set(self._micro_batches)
        self._stale: set[Slice] = set()

    @property
    def is_trained(self) -> bool:
        """Whether all micro-batches are in the gradient."""
        return not self._untrained

    @property
    def num_begun_samples(self) -> int:
        """Samples of begun micro-batches that are not ready: in a generator's hands, or taken by none."""
        return self._num_samples_in_hand + self._num_opened_samples

    def mean_time_in_hand_s(self, now_s: float) -> float:
        """Give how long generators have been at their slices, on average; 0 if none is at one."""
        return now_s - self._starts_in_hand_s / self.num_slices_in_hand if self.num_slices_in_hand else 0.0

    def note_begun(self, part: Slice, time_s: float) -> None:
        """Note that a generator has begun a slice."""
        self.num_slices_in_hand += 1
        self._num_samples_in_hand += len(part)
        self._starts_in_hand_s += time_s

    def note_ended(self, part: Slice, begin_s: float) -> None:
        """Note that a generator is done with a slice that it began at `begin_s`, or gone."""
        self.num_slices_in_hand -= 1
        self._num_samples_in_hand -= len(part)
        # From zero again whenever it can be, so that roundings do not add up.
        self._starts_in_hand_s = self._starts_in_hand_s - begin_s if self.num_slices_in_hand else 0.0

    def demand_early(self, fraction: float) -> None:
        """Set the first slices, up to `fraction` of the samples, aside to be made with the weights before."""
        left = math.floor(fraction * self.num_samples + 1e-9)
        while (part := self.peek()) is not None and len(part) <= left:
            left -= len(part)
            self.early.append(self._next())

    def peek(self) -> Slice | None:
        """Give the slice that the next generator gets."""
        if self._opened:
            return self._opened[0]
        return self.unassigned[0].slices[0] if self.unassigned else None

    def take(self, *, is_stale: bool) -> Slice:
        """Hand the next slice to a generator."""
        return self._hand_out(self._next(), is_stale=is_stale)

    def take_early(self) -> Slice:
        """Hand the next slice that must be stale to a generator."""
        return self._hand_out(self.early.popleft(), is_stale=True)

    def take_update(self) -> MicroBatch:
        """Hand the next micro-batch that is whole to the trainer."""
        return self.update_queue.popleft()

    def take_micro_batch(self) -> MicroBatch:
        """Hand the last untouched micro-batch to the trainer."""
        self.num_assisted += 1
        return self.unassigned.pop()

    def mark_scored(self, part: Slice) -> None:
        """Note a slice's rewards; a micro-batch that is whole now enters the update queue."""
        waiting = self._unscored[part.micro_batch]
        waiting.remove(part)
        if not waiting:
            self.update_queue.append(self._micro_batches[part.micro_batch])

    def mark_assisted(self, micro_batch: MicroBatch) -> None:
        """Note that the trainer has made and scored a micro-batch."""
        self._unscored[micro_batch.index].clear()
        self.update_queue.append(micro_batch)

    def mark_updated(self, micro_batch: MicroBatch) -> None:
        """Note that a micro-batch is in the gradient."""
        self._untrained.remove(micro_batch.index)

    def lose(self, part: Slice) -> None:
        """Take back a slice whose generator was lost before it was made, or whose samples are lost."""
        if part in self._stale:
            self._stale.remove(part)
            self.num_stale_samples -= len(part)
        self._reopen([part])

    def give_up_early(self) -> None:
        """Let slices that no generator can make with the weights before be made with the step's own."""
        self._reopen(self.early)
        self.early.clear()

    def _reopen(self, parts: Collection[Slice]) -> None:
        self._opened = deque(sorted((*parts, *self._opened)))
        self._num_opened_samples += sum(len(part) for part in parts)

    def _next(self) -> Slice:
        if not self._opened:
            micro_batch = self.unassigned.popleft()
            self._opened.extend(micro_batch.slices)
            self._num_opened_samples += len(micro_batch)
        part = self._opened.popleft()
        self._num_opened_samples -= len(part)
        return part

    def _hand_out(self, part: Slice, *, is_stale: bool) -> Slice:
        if is_stale:
            self._stale.add(part)
            self.num_stale_samples += len(part)
        return part
