"""What becomes of a worker's death: who is started again, from what, and when the run ends instead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from digenrl.engines import (
    NoRoom,
    ObjectLost,
    ObjectRef,
    Task,
    WorkerDied,
    WorkerError,
    WorkerStartError,
    WorkerTimeout,
)
from digenrl.strategies.snapshots import Journal, MadeSlice, UpdateCall, snapshot_interval
from digenrl.strategies.trainer_group import submit_assist, trajectories_made
from digenrl.strategies.workers import TimestepBatchSize, UpdateReport
from digenrl.strategies.workers.timestep_batch_size import TrainerOutOfMemory

if TYPE_CHECKING:
    from digenrl.strategies.pool import WorkerPool

log = logging.getLogger(__name__)

TRAINERS = "trainers"
"""The trainers as a unit: the death of one ends what the others compute with it, so all are started again."""

_PATIENCE_S = 1.0  # for the death that may be behind an error in a peer

Gather = Callable[[Sequence[Task]], list[Any]]
"""Waits for tasks and gives their results in order, or raises the first failure at once."""

T = TypeVar("T")


class Observer(Protocol):
    """Who is to know of restarts: the driver, which has tasks under way."""

    def on_lost(self, unit: str) -> None:
        """The workers of a unit are gone, and what they were at."""

    def on_back(self, unit: str) -> None:
        """They are there again, with the newest weights."""

    def on_given_up(self, unit: str) -> None:
        """They will not come back: others do what they did."""


class Recovery:
    """Starts workers of one run again, and keeps what that needs (docs/design/restarts.md).

    A unit is what has to be started together: a generator with all its ranks, a reward worker, or the trainers.
    """

    def __init__(self, pool: WorkerPool, *, max_restarts: int, snapshot: str) -> None:
        """Allow `max_restarts` units to be started again; `snapshot` is how often the trainers keep their state."""
        self.journal = Journal()
        self.num_restarts = 0
        self.is_rebuilding = False
        """Whether the trainers are not what they were: they have died, and are not restored yet."""
        self.observer: Observer | None = None
        self.timestep_batch_size: TimestepBatchSize = None
        """Of all updates."""
        self._pool = pool
        self._engine = pool.engine
        self._max_restarts = max_restarts
        self._interval = snapshot_interval(snapshot) if max_restarts else None
        self._snapshot: dict[str, ObjectRef] = {}
        self._copies: list[ObjectRef] = []
        """Of the snapshot, on other hosts than its own."""
        self._snapshot_version = 0
        self._incoming: dict[str, ObjectRef] = {}
        self._incoming_copies: dict[str, ObjectRef | None] = {}
        self._incoming_version: int | None = None
        self._largest_timestep_batch: int | None = None
        self._adopted: set[ObjectRef] = set()
        self._to_free: dict[str, list[ObjectRef]] = {}

    @property
    def is_possible(self) -> bool:
        """Whether any worker may be started again."""
        return self._max_restarts > 0

    def check_state(self) -> None:
        """Refuse to give the trainers' state while it is not what it was.

        Raises:
            WorkerError: the run was interrupted while the trainers were being started again.
        """
        if self.is_rebuilding:
            raise WorkerError("the trainers were being started again, so they have no state to hand over.")

    # ---- deaths --------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], T], gather: Gather | None = None) -> T:
        """Call, and where workers die meanwhile, start them again and repeat the call.

        Args:
            call: may be repeated from its begin.
            gather: how to wait for a restart; None serves nobody else meanwhile.
        """
        while True:
            try:
                return call()
            except Exception as error:
                self.restart(self.lost_unit(error), gather)

    def lost_unit(self, error: BaseException, worker: str | None = None) -> str:
        """Find who has to be started again because of an error; the restart is counted and logged.

        Args:
            error: that a task has ended with.
            worker: whose task it was, if that is known.

        Raises:
            BaseException: `error`, where no death is behind it; or that death, where the run has to end with it.
        """
        death = self._death_behind(error, worker)
        if death is None:
            raise error
        unit = self._pool.unit_of(death.worker)
        if unit is None or self._max_restarts == 0:
            raise death from (None if death is error else error)
        if unit == TRAINERS and self._interval is None:
            raise WorkerDied(
                f"{death} The trainers cannot be started again, since `snapshot` is off.", death.worker
            ) from error
        if self.num_restarts == self._max_restarts:
            raise WorkerDied(
                f"{death} It is not started again: `max_restarts` allows {self._max_restarts} in a run.", death.worker
            ) from error
        self.num_restarts += 1
        if isinstance(error, TrainerOutOfMemory):
            self._largest_timestep_batch = max(error.num_timesteps // 2, 1)
        num_ranks = len(self._pool.ranks_of(unit))
        what = f"all {num_ranks} trainers are" if unit == TRAINERS and num_ranks > 1 else f"{death.worker} is"
        log.warning("%s Hence %s started again (restart %d of %d).", death, what, self.num_restarts, self._max_restarts)
        return unit

    def end_hung(self, error: WorkerTimeout) -> None:
        """Have a worker that missed its deadline die, if it may be started again.

        Raises:
            WorkerTimeout: it may not.
        """
        unit = self._pool.unit_of(error.worker)
        if unit is None or self._max_restarts == 0:
            raise error
        log.warning("%s It is ended.", error)
        for rank in self._pool.ranks_of(unit):
            self._engine.kill(rank)

    def _death_behind(self, error: BaseException, worker: str | None) -> WorkerDied | None:
        if isinstance(error, WorkerDied):
            return error
        if isinstance(error, WorkerStartError):
            return None
        if isinstance(error, WorkerTimeout) and self._max_restarts:
            return WorkerDied(str(error), error.worker)
        if isinstance(error, ObjectLost) and self._max_restarts:
            maker = str(error.args[0])
            if self._pool.unit_of(maker) is None:  # the driver's own: its host is gone, and who reads it cannot help it
                return None
            return self._dead_among([maker], "and with it what it had made") or WorkerDied(str(error), maker)
        if isinstance(error, TrainerOutOfMemory) and self.timestep_batch_size == "auto" and error.num_timesteps > 1:
            # Its peers wait for it in vain: there is no other way to have them back.
            return WorkerDied(str(error), self._pool.trainers[0])
        return self._dead_peer(worker)

    def _dead_peer(self, worker: str | None) -> WorkerDied | None:
        """Find a rank whose death the error of another may come from: it surfaces there first, as a failed exchange."""
        units = [self._pool.unit_of(worker)] if worker is not None else [TRAINERS, *self._pool.generators]
        groups = [self._pool.ranks_of(unit) for unit in units if unit is not None]
        ranks = [rank for group in groups if len(group) > 1 for rank in group]
        return self._dead_among(ranks, "in an exchange with its peers")

    def _dead_among(self, workers: Sequence[str], circumstances: str) -> WorkerDied | None:
        pings = [self._engine.submit(worker, "ping") for worker in workers]
        end_s = time.monotonic() + _PATIENCE_S
        while pings and (left_s := end_s - time.monotonic()) > 0:
            for task in self._engine.wait(pings, left_s):
                pings.remove(task)
                try:
                    task.result()
                except WorkerDied as death:
                    return WorkerDied(str(death).replace("task `ping`", circumstances), death.worker)
        return None

    # ---- restarts ------------------------------------------------------------------------------------------

    def restart(self, unit: str, gather: Gather | None = None) -> None:
        """Start the workers of a unit again and wait until they are as they were."""
        gather = gather or self._engine.gather
        self.forget(unit)
        if self.observer is not None:
            self.observer.on_lost(unit)
        while True:
            try:
                if unit == TRAINERS:
                    self._rebuild_trainers(gather)
                else:
                    gather(self.launch(unit))
                    self._pool.rejoin(unit)
                    if unit in self._pool.generators and self._pool.published_version is not None:
                        gather([self._pool.load_weights(unit, self._pool.published_version)])
                break
            except NoRoom as error:
                self.give_up(unit, error)
                return
            except Exception as error:
                lost = self.lost_unit(error)
                if lost != unit:
                    self.restart(lost, gather)
        if self.observer is not None:
            self.observer.on_back(unit)

    def give_up(self, unit: str, error: NoRoom) -> None:
        """Go on without a unit that no host has room for, if others do the same.

        Raises:
            WorkerError: nobody does.
        """
        others = [other for other in self._pool.peers_of(unit) if other != unit]
        if not others:
            raise WorkerError(
                f"{error} The run cannot go on without it; resume it with `ckpt_path` from its last checkpoint."
            ) from error
        self._pool.drop(unit)
        log.warning("%s The run goes on without %s, with %s.", error, unit, ", ".join(others))
        if self.observer is not None:
            self.observer.on_given_up(unit)

    def launch(self, unit: str) -> list[Task]:
        """Start a unit's workers again.

        Raises:
            WorkerStartError: one cannot start, by an error that would come each time.
        """
        try:
            return self._pool.launch(unit)
        except WorkerError:
            raise
        except Exception as error:
            raise WorkerStartError(f"{unit} cannot start again: {type(error).__name__}: {error}") from error

    def _rebuild_trainers(self, gather: Gather) -> None:
        """Give new trainers the state of the newest snapshot, and repeat all that the group has done since."""
        self.is_rebuilding = True
        gather(self.launch(TRAINERS))
        trainers = self._pool.trainers
        if self._largest_timestep_batch is not None:
            size = self._largest_timestep_batch
            gather([self._engine.submit(trainer, "limit_timestep_batch", size) for trainer in trainers])
        if self._snapshot:
            gather(
                [self._engine.submit(trainer, "restore_snapshot", self._snapshots_for(trainer)) for trainer in trainers]
            )
        for window in self.journal.closed:
            assert window.step is not None, "of a closed window"
            self.train_again(window.updates, gather)
            gather([window.step.submit(self._engine, trainer) for trainer in trainers])
        if self.journal.open.updates:
            self.train_again(self.journal.open.updates, gather)
        self._pool.rejoin(TRAINERS)
        self.is_rebuilding = False

    def _snapshots_for(self, trainer: str) -> list[ObjectRef]:
        """Name the snapshots that a trainer may read, its own or a copy of that first.

        Raises:
            WorkerError: its own is gone.
        """
        refs = [self._snapshot[trainer], *self._snapshot.values(), *self._copies]
        if self._copies:
            refs.insert(1, self._copies[self._pool.trainers.index(trainer)])
        lost = self._engine.lost(refs)
        if self._snapshot[trainer] in lost and (not self._copies or refs[1] in lost):
            raise WorkerError(
                f"the snapshot of {trainer} is lost with its host, so the trainers cannot be started again; resume the "
                "run with `ckpt_path` from its last checkpoint."
            )
        return [ref for ref in refs if ref not in lost]

    def train_again(self, calls: Sequence[UpdateCall], gather: Gather) -> list[list[UpdateReport]]:
        """Drop the trainers' gradient and accumulate that of some updates; returns what the ranks report of each.

        Where memory runs out the ranks have agreed on smaller batches, and all begins anew.
        """
        trainers = self._pool.trainers
        while True:
            gather([self._engine.submit(trainer, "discard_gradient") for trainer in trainers])
            reports: list[list[UpdateReport]] = []
            try:
                for call in list(calls):
                    whole = self._made_whole(call, gather)
                    self.journal.exchange(call, whole)
                    reports.append(
                        gather([whole.submit(self._engine, trainer, self.timestep_batch_size) for trainer in trainers])
                    )
                    if any(report.out_of_memory for report in reports[-1]):
                        break
                else:
                    return reports
            except ObjectLost:  # with its host, at this very moment
                if not any(self._engine.lost(call.trajectories) for call in calls):
                    raise

    def _made_whole(self, call: UpdateCall, gather: Gather) -> UpdateCall:
        """Have the trainers make those samples of an update again that are gone with their host.

        They have the weights that trained them at this point, and the rewards are known.
        """
        lost = [part for part in call.slices if self._engine.lost(part.trajectories)]
        if not lost:
            return call
        tasks = submit_assist(self._pool, [part.prompts for part in lost], scores=False)
        made = [self.adopt(ref) for ref in trajectories_made(gather(list(tasks.values())), len(lost))]
        self.note_made_again(len(lost))
        self.journal.keep(made)
        again = {id(part): MadeSlice(part.prompts, (ref,)) for part, ref in zip(lost, made, strict=True)}
        return replace(call, slices=tuple(again.get(id(part), part) for part in call.slices))

    def note_made_again(self, num_slices: int) -> None:
        """Say how many slices were lost with a host, and made once more."""
        log.warning("Samples of %d slices were lost with their host, and are made again.", num_slices)

    # ---- snapshots -----------------------------------------------------------------------------------------

    def request_snapshot(self) -> dict[str, Task]:
        """Queue the snapshot that is due now, if one is; `note_snapshot` wants each trainer's result."""
        if self._interval is None:
            self.free(self.journal.commit(self.journal.version))
        elif self._incoming_version is None and self.journal.version - self._snapshot_version >= self._interval:
            self._incoming_version = self.journal.version
            return {trainer: self._engine.submit(trainer, "take_snapshot") for trainer in self._pool.trainers}
        return {}

    def note_snapshot(self, trainer: str, snapshot: ObjectRef) -> tuple[ObjectRef, Task | None]:
        """Adopt a rank's snapshot; the one before is kept until all ranks' are here, and safe.

        Returns:
            It as adopted, and its copy that is on the way to another host, for `note_copy`; None on a single host.

        Raises:
            ObjectLost: the trainer has died meanwhile.
        """
        adopted = self._incoming[trainer] = self.adopt(snapshot)
        copy = self._engine.copy(adopted)
        if copy is None:
            self.note_copy(trainer, adopted, None)
        return adopted, copy

    def note_copy(self, trainer: str, adopted: ObjectRef, copy: ObjectRef | None) -> None:
        """Keep the copy of a rank's snapshot, if there is one; with the last rank's the new snapshot takes over."""
        if copy is not None:
            self._adopted.add(copy)
        if self._incoming.get(trainer) is not adopted:  # the trainers have died meanwhile
            self.free([copy] if copy is not None else [])
            return
        self._incoming_copies[trainer] = copy
        if len(self._incoming_copies) < len(self._pool.trainers):
            return
        assert self._incoming_version is not None, "a snapshot that was requested"
        self.free([*self._snapshot.values(), *self._copies])
        self.free(self.journal.commit(self._incoming_version))
        self._snapshot, self._snapshot_version = self._incoming, self._incoming_version
        copies = [self._incoming_copies[trainer] for trainer in self._pool.trainers]
        self._copies = [copy for copy in copies if copy is not None]
        if len(self._copies) < len(copies):  # all or none
            self.free(self._copies)
            self._copies = []
        self._incoming, self._incoming_copies, self._incoming_version = {}, {}, None

    def take_snapshot(self) -> None:
        """Have the trainers keep their state now, and wait for it; to be part of a call that `run` repeats."""
        if self._interval is None:
            return
        self._drop_incoming()
        self._incoming_version = self.journal.version
        tasks = [self._engine.submit(trainer, "take_snapshot") for trainer in self._pool.trainers]
        for trainer, snapshot in zip(self._pool.trainers, self._engine.gather(tasks), strict=True):
            adopted, copy = self.note_snapshot(trainer, snapshot)
            if copy is not None:
                self.note_copy(trainer, adopted, self._engine.gather([copy])[0])

    def begin_anew(self, version: int) -> None:
        """Go on from other weights, whose snapshot is taken: nothing that was done before is repeated any more."""
        self.free(self.journal.begin_anew(version))

    def _drop_incoming(self) -> None:
        self.free([*self._incoming.values(), *(copy for copy in self._incoming_copies.values() if copy is not None)])
        self._incoming, self._incoming_copies, self._incoming_version = {}, {}, None

    # ---- objects that outlive their makers -----------------------------------------------------------------

    def adopt(self, ref: ObjectRef) -> ObjectRef:
        """Keep an object that a worker has made, also beyond its death if the run may go on then.

        Raises:
            ObjectLost: its maker has died meanwhile.
        """
        if self._max_restarts == 0:
            return ref
        adopted = self._engine.adopt(ref)
        if adopted is not ref:
            self._adopted.add(adopted)
            self._to_free.setdefault(ref.worker, []).append(ref)  # the maker's own hold on it
        return adopted

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Let go of objects that nobody will read any more; their makers are told with `flush`."""
        adopted = [ref for ref in refs if ref in self._adopted]
        self._engine.store.free(adopted)
        self._adopted.difference_update(adopted)
        for ref in refs:
            if ref not in adopted:
                self._to_free.setdefault(ref.worker, []).append(ref)

    def flush(self) -> list[Task]:
        """Tell makers what to let go of. Not to be waited for: a generator may be in the middle of the next step."""
        to_free, self._to_free = self._to_free, {}
        return self._engine.free([ref for refs in to_free.values() for ref in refs])

    def forget(self, unit: str) -> None:
        """Drop what only the workers of a unit had, who are gone."""
        for rank in self._pool.ranks_of(unit):
            self._to_free.pop(rank, None)
        if unit == TRAINERS:
            self.is_rebuilding = True
            self._drop_incoming()

    def close(self) -> None:
        """Let go of everything, at the end of the run."""
        self._engine.store.free(list(self._adopted))
        self._adopted.clear()
        self._to_free.clear()
        self._snapshot, self._incoming, self._incoming_copies, self._copies = {}, {}, {}, []
        self.journal.begin_anew(0)
        self.observer = None  # through which all of the run would live as long as the pool
