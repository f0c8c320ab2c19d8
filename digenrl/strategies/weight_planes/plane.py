"""How new weights get from the trainers to the generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from digenrl.engines import Engine, ObjectLost, ObjectStore, Task, WorkerDied
from digenrl.strategies.span import Span
from digenrl.strategies.weight_planes.chunks import Chunk, Holding, WeightSyncError, cut_chunks, held_chunks
from digenrl.strategies.weight_planes.digests import DIGEST_BYTES
from digenrl.strategies.weight_planes.held_weights import HeldWeights, chunk_name

NUM_SLOTS = 2
"""The version generators may still be reading, and the one being written."""


class PlaneEnd:
    """A worker's end of a plane: a trainer's writes, a generator's reads."""

    def __init__(self, weights: HeldWeights) -> None:
        self.weights = weights

    def write(self, version: int) -> WrittenWeights:
        """Hand over this trainer's share of its weights."""
        raise NotImplementedError(f"{type(self).__name__} only reads")

    def read(self, version: int, source: Any) -> dict[int, bytes]:
        """Take all that this worker holds of a version over; returns the digests of what it holds then, by chunk."""
        raise NotImplementedError(f"{type(self).__name__} only writes")

    def close(self) -> None:
        """Let go of what the end keeps beside the weights."""


@dataclass(frozen=True)
class WrittenWeights:
    """What a trainer has handed over."""

    digests: bytes
    """Of each chunk that it holds, whoever hands it over."""
    source: Any = None
    """Where generators find its share, if they need to be told."""


@dataclass(frozen=True)
class WriteReport:
    """A trainer has handed over its share."""

    written: WrittenWeights
    span: Span


@dataclass(frozen=True)
class Opening(ABC):
    """Tells a worker how to make its end of a plane."""

    chunks: tuple[Chunk, ...]
    rank: int | None
    """Among the trainers; None for those that only receive."""

    @abstractmethod
    def open(self, weights: HeldWeights, store: ObjectStore) -> PlaneEnd:
        """Make the end, in the worker."""

    def open_for(self, tensors: Callable[[], Mapping[str, Tensor]], holding: Holding, store: ObjectStore) -> PlaneEnd:
        """Make the end of a worker that holds these tensors."""
        return self.open(HeldWeights(self.chunks, tensors, holding), store)

    @property
    def sent(self) -> list[int]:
        """Chunks that this worker hands over."""
        return [index for index, chunk in enumerate(self.chunks) if chunk.sender == self.rank]


class WeightPlane(ABC):
    """Publishes versions of the trained weights. The driver owns it; workers move the bytes.

    Each trainer hands over what it holds itself, nothing is gathered. Loading is pull: a generator loads a version when
    it reaches the message, between trajectories, so a busy generator never holds up a trainer. A generator
    acknowledges each load once it has compared the digests of what it then holds; what it was loaded from is
    given up only then.

    Lifecycle: `setup`, then any number of `publish` and `load`, and `rejoin` for workers that were started
    again; `close` after the workers have ended.
    """

    chunk_bytes: ClassVar[int] = 1 << 21
    """Most bytes of a chunk."""
    _outlives_trainers: ClassVar[bool]
    """Whether what was published can be loaded when the trainers have died."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._trainers: tuple[str, ...] = ()
        self._generators: dict[str, tuple[str, ...]] = {}
        self._holdings: dict[str, Holding] = {}
        self._held: dict[str, list[int]] = {}
        self._chunks: tuple[Chunk, ...] = ()
        self._loads: dict[int, list[Task]] = {}
        """Of each version that may still be read."""
        self._digests: list[bytes] = []
        self._version: int | None = None
        self._writes: tuple[int, list[Task]] | None = None
        """Of a version that is to be published next."""

    def setup(self, trainers: Sequence[str], generators: Mapping[str, Sequence[str]]) -> None:
        """Agree with the workers on what is transferred, and where.

        Args:
            trainers: one after another, by rank.
            generators: the workers that are the ranks of each.

        Raises:
            WeightSyncError: workers have built different tensors, or some rows are nowhere.
        """
        self._trainers = tuple(trainers)
        self._generators = {name: tuple(ranks) for name, ranks in generators.items()}
        workers = [*self._trainers, *(rank for ranks in self._generators.values() for rank in ranks)]
        self._holdings = self._ask_holdings(workers)
        for worker, holding in self._holdings.items():
            self._check_tensors(worker, holding)
        self._chunks = cut_chunks(
            {trainer: self._holdings[trainer] for trainer in self._trainers},
            {name: [self._holdings[rank] for rank in ranks] for name, ranks in self._generators.items()},
            self.chunk_bytes,
        )
        self._held = {worker: held_chunks(self._chunks, holding) for worker, holding in self._holdings.items()}
        self._prepare()
        self._open(workers)

    def write_ahead(self, version: int) -> None:
        """Have the trainers hand over a version right after what they are asked to do before: `publish` is to follow.

        Where the version that lies in its slot is not given up yet, nothing is done: `publish` then waits for who may
        still load it, and the trainers for nobody.
        """
        self._writes = None if self._in_slot_of(version) else (version, self._submit_writes(version))

    def publish(self, version: int, *, must_change: bool) -> dict[str, Span]:
        """Have the trainers hand over version `version`; from then on `load` gives it, and no other.

        Args:
            version: of the weights that the trainers hold now.
            must_change: whether trained weights equal to the last published ones are an error.

        Returns:
            When each trainer was at it.

        Raises:
            WeightSyncError: `must_change` and no trained weight has, or trainers differ in what all of them have.
        """
        for earlier in self._in_slot_of(version):
            self._await_loads(earlier)
        reports = self._write(version)
        written = [report.written for report in reports]
        digests = self._joined_digests(version, written)
        is_equal = [old == new for old, new in zip(self._digests, digests, strict=False)]
        trained = [index for index, chunk in enumerate(self._chunks) if chunk.is_trained]
        is_repeated = version == self._version  # after a worker's death
        if must_change and not is_repeated and is_equal and all(is_equal[index] for index in trained):
            raise WeightSyncError(
                f"version {version} has the very weights of version {version - 1} although the gradient was not "
                "zero: the optimizer does not hold the policy's parameters, or its step is below their resolution."
            )
        self._digests, self._version = digests, version
        self._keep(version, [entry.source for entry in written])
        self._loads[version] = []
        for earlier in [earlier for earlier in self._loads if earlier != version]:
            if all(task.is_done for task in self._loads[earlier]):
                self._await_loads(earlier)
        return {trainer: report.span for trainer, report in zip(self._trainers, reports, strict=True)}

    def load(self, generator: str, version: int) -> list[Task]:
        """Queue the loads of a generator's ranks of the version published last; each task's result is a `Span`."""
        assert version == self._version, f"version {version} is to be loaded, but {self._version} was published last"
        digests = b"".join(self._digests)
        tasks = [
            self._engine.submit(rank, "load_weights", version, self._source_for(rank, version), digests)
            for rank in self._generators[generator]
        ]
        self._loads[version] += tasks
        return tasks

    def compare(self, generator: str) -> list[Task]:
        """Have a generator's ranks compare what they hold with what was published last.

        Each task's result is a tensor that differs; None if none does.
        """
        digests = b"".join(self._digests)
        return [self._engine.submit(rank, "changed_weights", digests) for rank in self._generators[generator]]

    def rejoin(self, *workers: str) -> None:
        """Connect workers that were started again under their names, and that hold weights.

        A generator may be any; trainers come back all together. If these hold the weights that were published
        last, these can be loaded again; if they hold others, these are to be published first.

        Raises:
            WeightSyncError: a worker has built other tensors than before.
        """
        for worker, holding in self._ask_holdings(workers).items():
            if holding != self._holdings[worker]:
                raise WeightSyncError(f"worker {worker} built other trained parameters than before it was restarted.")
        are_trainers = self._trainers[0] in workers
        if are_trainers:
            self._writes = None
            self._forget_trainers()
        self._open(workers)
        if are_trainers and self._version is not None and not self._outlives_trainers:
            self._restore(self._version)

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the driver has of the plane, once the chunks are known."""

    @abstractmethod
    def _opening(self, worker: str, rank: int | None) -> Opening:
        """Say how a worker makes its end."""

    def _source_for(self, rank: str, version: int) -> Any:
        """Tell a generator's rank where it finds a version."""
        return None

    def _keep(self, version: int, sources: Sequence[Any]) -> None:  # noqa: B027 (slots need no record)
        """Note what each trainer says of where its share of a version is."""

    def _give_up(self, version: int) -> None:  # noqa: B027 (slots are used again)
        """Release what was published as a version that nobody will load any more."""

    def _forget_trainers(self) -> None:  # noqa: B027
        """Let go of what died with the trainers."""

    def close(self) -> None:  # noqa: B027 (most planes keep nothing)
        """Release what the driver keeps. Safe to call twice."""

    def _ask_holdings(self, workers: Sequence[str]) -> dict[str, Holding]:
        tasks = [self._engine.submit(worker, "weights_holding") for worker in workers]
        return dict(zip(workers, self._engine.gather(tasks), strict=True))

    def _check_tensors(self, worker: str, holding: Holding) -> None:
        if holding.tensors != self._holdings[self._trainers[0]].tensors:
            raise WeightSyncError(
                f"worker {worker} built other trained parameters than {self._trainers[0]}: `policy.build` must build "
                "the same model in every process."
            )

    def _open(self, workers: Sequence[str]) -> None:
        ranks = {trainer: rank for rank, trainer in enumerate(self._trainers)}
        self._engine.gather(
            [
                self._engine.submit(worker, "open_weights", self._opening(worker, ranks.get(worker)))
                for worker in workers
            ]
        )

    def _in_slot_of(self, version: int) -> list[int]:
        """Name the versions that may still be read, and lie where this one will."""
        return [earlier for earlier in self._loads if (earlier - version) % NUM_SLOTS == 0]

    def _submit_writes(self, version: int) -> list[Task]:
        return [self._engine.submit(trainer, "write_weights", version) for trainer in self._trainers]

    def _write(self, version: int) -> list[WriteReport]:
        """Have the trainers hand a version over, unless they were asked ahead."""
        ahead, self._writes = self._writes, None
        tasks = ahead[1] if ahead is not None and ahead[0] == version else self._submit_writes(version)
        return self._engine.gather(tasks)

    def _restore(self, version: int) -> None:
        """Have restarted trainers hand over again what died with them."""
        written = [report.written for report in self._write(version)]
        if self._joined_digests(version, written) != self._digests:
            self._version = None
        self._keep(version, [entry.source for entry in written])

    def _joined_digests(self, version: int, written: Sequence[WrittenWeights]) -> list[bytes]:
        """Give the digest of each chunk; trainers that hold the same must have the same."""
        digests: dict[int, tuple[str, bytes]] = {}
        for trainer, entry in zip(self._trainers, written, strict=True):
            for place, index in enumerate(self._held[trainer]):
                digest = entry.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
                first, expected = digests.setdefault(index, (trainer, digest))
                if digest != expected:
                    name = chunk_name(self._chunks[index], self._holdings[trainer])
                    raise WeightSyncError(
                        f"the trainers' weights differ at version {version}: {name} is {expected.hex()} on {first}, "
                        f"but {digest.hex()} on {trainer}."
                    )
        return [digests[index][1] for index in range(len(self._chunks))]

    def _await_loads(self, version: int) -> None:
        """Wait until nobody reads a version any more, then give it up. Who has died does not read."""
        for task in self._loads.pop(version):
            try:
                self._engine.gather([task])
            except (WorkerDied, ObjectLost):
                continue
        self._give_up(version)
