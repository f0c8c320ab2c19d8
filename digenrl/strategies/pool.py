"""The workers of a run: starting them, and talking to a group of them as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from digenrl.engines import Engine, JoinedTask, ObjectRef, Requirements, Task, WorkerError
from digenrl.strategies.optimizers import OptimizerSpec
from digenrl.strategies.recovery import TRAINERS, Recovery
from digenrl.strategies.rendezvous import Rendezvous
from digenrl.strategies.run_state import RunState
from digenrl.strategies.skeleton import ModuleOutline
from digenrl.strategies.snapshots import StepCall
from digenrl.strategies.span import Span
from digenrl.strategies.weight_planes import (
    SharedMemoryPlane,
    WeightPlane,
    WeightPlaneName,
    WeightSyncError,
    choose_plane,
)
from digenrl.strategies.workers import (
    BuildReport,
    StepReport,
    Worker,
    WorkerSettings,
    even_shares,
    join_generate_reports,
    join_score_reports,
    join_spans,
)
from digenrl.types import PromptBatch


class WorkerPool:
    """Generators, trainers and reward workers of one run.

    Lifecycle: `start_generators` (and `start_trainers`, for training), `build`, then, for training,
    `connect_trainers`, `configure_optimizer` and any number of steps; `shutdown` ends the workers. Where `max_restarts`
    allows it, calls that wait start workers which die again, and are repeated.
    """

    def __init__(
        self,
        engine: Engine,
        settings: WorkerSettings,
        *,
        num_generators: int,
        num_trainers: int,
        num_reward_workers: int,
        devices_per_generator: int = 1,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        max_restarts: int = 0,
        snapshot: str = "every_step",
        weight_plane: WeightPlaneName = "auto",
        devices: Sequence[str] = (),
        workers_per_device: int = 1,
    ) -> None:
        """Describe the workers.

        Args:
            engine: starts them.
            settings: of all workers.
            num_generators: see `DisaggregatedStrategy`, as for the arguments not named here.
            num_trainers: see there.
            num_reward_workers: see there.
            devices_per_generator: see there.
            resources: what workers of a role need beside a device, by role.
            max_restarts: see there.
            snapshot: see there.
            weight_plane: see there.
            devices: CUDA devices of this host, as `CUDA_VISIBLE_DEVICES` names them; none on CPUs or a cluster.
            workers_per_device: see there.
        """
        self.engine = engine
        self.generators = tuple(f"generator-{index}" for index in range(num_generators))
        self.reward_workers = tuple(f"reward-worker-{index}" for index in range(num_reward_workers))
        self.trainers: tuple[str, ...] = ()
        self.shards_trainers = settings.sharding != "none" and num_trainers > 1
        self._settings = settings
        self._ranks = {
            generator: (generator,)
            if devices_per_generator == 1
            else tuple(f"{generator}-rank-{rank}" for rank in range(devices_per_generator))
            for generator in self.generators
        }
        self._num_trainers = num_trainers
        self._resources = resources or {}
        self._plane_name: WeightPlaneName = weight_plane
        self._plane: WeightPlane = SharedMemoryPlane(engine)  # or another, once it is known where workers are
        self.published_version: int | None = None
        """Of the weights that generators are to have; None before trainers have given any."""
        self.recovery = Recovery(self, max_restarts=max_restarts, snapshot=snapshot)
        self.state = RunState(self)
        self._built: set[str] = set()
        self._module: bytes | None = None
        self._optimizer: OptimizerSpec | None = None
        self._place_in_run: tuple[int, int] | None = None  # policy version and seed, where the run was resumed
        self._rendezvous = Rendezvous(engine)
        self._devices = devices
        self._workers_per_device = workers_per_device
        self._places: dict[str, int] = {}
        """Number of each worker, in the order in which devices are given out."""

    # ---- set-up --------------------------------------------------------------------------------------------

    @property
    def generator_ranks(self) -> tuple[str, ...]:
        """All ranks of all generators."""
        return tuple(rank for generator in self.generators for rank in self._ranks[generator])

    def reserve(self, *, trains: bool) -> None:
        """Set aside the machines' resources for all workers.

        Raises:
            ValueError: the machines do not have them.
        """
        trainers = tuple(f"trainer-{rank}" for rank in range(self._num_trainers)) if trains else ()
        roles = {"generator": self.generator_ranks, "reward_worker": self.reward_workers, "trainer": trainers}
        num_gpus = 1 / self._workers_per_device if self._settings.device == "cuda" else 0
        units = {rank: generator for generator, ranks in self._ranks.items() for rank in ranks}
        self.engine.reserve(
            {
                worker: Requirements(role, num_gpus, self._resources.get(role, {}), units.get(worker, ""))
                for role, workers in roles.items()
                for worker in workers
            }
        )

    def start_generators(self) -> None:
        """Start the generators, and the reward workers that score for them."""
        self._bring_up([*self.generators, *self.reward_workers])

    def start_trainers(self) -> None:
        """Start the trainers and let them meet."""
        self.trainers = tuple(f"trainer-{rank}" for rank in range(self._num_trainers))
        self._bring_up([TRAINERS])

    def _bring_up(self, units: Sequence[str]) -> None:
        tasks: list[Task] = []
        for unit in units:
            try:
                tasks += self.launch(unit)
            except WorkerError as error:
                self.recovery.restart(self.recovery.lost_unit(error))
        try:
            self.engine.gather(tasks)
        except Exception as error:
            self.recovery.restart(self.recovery.lost_unit(error))

    def launch(self, unit: str) -> list[Task]:
        """Start a unit's workers, or start them again, and queue what makes them what they are, weights aside."""
        ranks = self.ranks_of(unit)
        for rank in ranks:
            self.engine.kill(rank)
        for rank in ranks:
            self._start(rank)
        tasks = self._join(unit, ranks) if unit == TRAINERS or len(ranks) > 1 else []
        built = [rank for rank in ranks if rank in self._built]
        tasks += [self._submit_build(rank) for rank in built]
        if unit == TRAINERS and self._optimizer is not None:
            tasks += [self.engine.submit(rank, "configure_optimizer", self._optimizer) for rank in ranks]
        for rank in built:
            tasks += self.state.submit_loads(rank)
        return tasks + self._submit_resumes(built)

    def rejoin(self, unit: str) -> None:
        """Connect a unit that was launched again, and has the state it had, with the weight plane."""
        if self.published_version is not None and unit not in self.reward_workers:
            self._plane.rejoin(*self.ranks_of(unit))

    def unit_of(self, worker: str) -> str | None:
        """Give the name of those that must be started again with a worker; None if it is none of the pool."""
        if worker in self.trainers:
            return TRAINERS
        if worker in self._ranks or worker in self.reward_workers:
            return worker
        return next((generator for generator, ranks in self._ranks.items() if worker in ranks), None)

    def ranks_of(self, unit: str) -> tuple[str, ...]:
        """Give the workers of a unit."""
        return self.trainers if unit == TRAINERS else self._ranks.get(unit, (unit,))

    def peers_of(self, unit: str) -> tuple[str, ...]:
        """Give the units that do the same as one, itself included."""
        return next((units for units in (self.generators, self.reward_workers) if unit in units), (unit,))

    def drop(self, unit: str) -> None:
        """Go on without a generator or reward worker, which is not started again."""
        for rank in self._ranks.pop(unit, (unit,)):
            self._built.discard(rank)
        self.generators = tuple(generator for generator in self.generators if generator != unit)
        self.reward_workers = tuple(worker for worker in self.reward_workers if worker != unit)

    def clock_offset_s(self, worker: str) -> float:
        """Give what is to be added to a worker's times; ranks of a generator are on one clock."""
        return self.engine.clock_offset_s(self.ranks_of(worker)[0])

    def _start(self, worker: str) -> None:
        place = self._places.setdefault(worker, len(self._places))
        env = {}
        if self._settings.device == "cuda" and self._devices:
            env["CUDA_VISIBLE_DEVICES"] = self._devices[place // self._workers_per_device]
        self.engine.start(worker, Worker, env=env)

    def _join(self, name: str, ranks: Sequence[str]) -> list[Task]:
        groups = self._rendezvous.make_groups(name, ranks)
        return [
            self.engine.submit(worker, "join_group", group, self._settings)
            for worker, group in zip(ranks, groups, strict=True)
        ]

    def build(self, module: bytes) -> tuple[ModuleOutline, ...]:
        """Have the workers that are new build the pickled module; returns its outline.

        Raises:
            WeightSyncError: workers built different weights, trained ones aside, which are synchronized.
        """
        self._module = module
        started = (*self.generator_ranks, *self.reward_workers, *self.trainers)
        new = [worker for worker in started if worker not in self._built]
        reports: list[BuildReport] = self.recovery.run(
            lambda: self.engine.gather([self._submit_build(worker) for worker in new])
        )
        for worker, report in zip(new, reports, strict=True):
            if report.frozen_digest != reports[0].frozen_digest:
                raise WeightSyncError(
                    f"workers {new[0]} and {worker} built different frozen weights: `policy.build` must give the "
                    "same ones in every process."
                )
        self._built.update(new)
        self.state.frozen_digest = reports[0].frozen_digest
        if self.trainers:
            self.state.hand_over()
            self.recovery.run(lambda: self.engine.gather(self._submit_resumes(self.trainers)))
        return reports[0].outlines

    def _submit_build(self, worker: str) -> Task:
        return self.engine.submit(
            worker,
            "build",
            self._module,
            self._settings,
            trains=worker in self.trainers,
            sets_up_reward=worker in (self.reward_workers or self.generator_ranks),
        )

    def _submit_resumes(self, workers: Sequence[str]) -> list[Task]:
        """Tell workers that build where in its run this one was resumed, if it was."""
        if self._place_in_run is None:
            return []
        place = self._place_in_run
        return [self.engine.submit(worker, "resume", *place) for worker in workers if worker not in self.reward_workers]

    def connect_trainers(self, version: int) -> None:
        """Give the trainers' weights to the generators."""

        def connect() -> None:
            self._plane.close()  # of an attempt before
            self._plane = choose_plane(self._plane_name, self.engine, (*self.trainers, *self.generator_ranks))
            self._plane.setup(self.trainers, self._ranks)
            self._plane.publish(version, must_change=False)
            self.engine.gather([self.load_weights(generator, version) for generator in self.generators])

        self.recovery.run(connect)
        self.published_version = version

    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        """Make the optimizer on all trainers."""

        def configure() -> None:
            self.call(self.trainers, "configure_optimizer", spec)
            self.recovery.take_snapshot()

        self.recovery.run(configure)
        self._optimizer = spec

    def resume(self, version: int, seed: int) -> None:
        """Have all workers continue at `version`."""
        self._place_in_run = version, seed
        self.recovery.begin_anew(version)
        self.change(lambda: [*self.generator_ranks, *self.trainers], "resume", version, seed)

    # ---- steps ---------------------------------------------------------------------------------------------

    def generate(self, generator: str, prompts: PromptBatch) -> Task:
        """Have a generator make samples, and score them unless reward workers do; the result is a `GenerateReport`.

        Several devices share the samples; those that get none go along, since all hold a share of the weights.
        """
        method = "generate" if self.reward_workers else "generate_and_score"
        ranks = self._ranks[generator]
        if len(ranks) == 1:
            return self.engine.submit(generator, method, prompts)
        calls = []
        for rank, (start, stop) in zip(ranks, even_shares(len(prompts), len(ranks)), strict=True):
            share = prompts.select(slice(start, stop)) if stop > start else prompts.select(slice(1))
            calls.append(self.engine.submit(rank, method, share, follows=stop == start))
        return JoinedTask(generator, calls, join_generate_reports)

    def score(self, worker: str, trajectories: Sequence[ObjectRef]) -> Task:
        """Have a worker score samples; several devices of a generator score those they have made."""
        ranks = self.ranks_of(worker)
        if len(ranks) == 1:
            return self.engine.submit(worker, "score", trajectories)
        calls = [self.engine.submit(rank, "score", [ref]) for rank, ref in zip(ranks, trajectories, strict=False)]
        return JoinedTask(worker, calls, join_score_reports)

    def end_window(self, call: StepCall, version: int) -> dict[str, StepReport]:
        """Have every trainer rank step its optimizer, or count a step, and begin to write weights; see `publish`.

        Args:
            call: to end the window with.
            version: of the weights that it gives.

        Returns:
            What each rank reports; nothing where no row is left to train.
        """

        def step() -> list[StepReport]:
            steps = [call.submit(self.engine, trainer) for trainer in self.trainers]
            self._plane.write_ahead(version)  # trainers do not wait until this process has heard of their steps
            return self.engine.gather(steps)

        reports = self.recovery.run(step)
        self.recovery.journal.close(call)
        return {} if call.is_empty else dict(zip(self.trainers, reports, strict=True))

    def publish(self, version: int, *, must_change: bool) -> dict[str, Span]:
        """Have the trainers write their weights for the generators; returns when each was at it."""
        spans = self.recovery.run(lambda: self._plane.publish(version, must_change=must_change))
        self.published_version = version
        return spans

    def sampler_steps(self) -> int:
        """Ask a trainer how many optimizer steps the copy that makes the samples has followed."""
        steps: int = self.recovery.run(lambda: self.engine.call(self.trainers[0], "sampler_steps"))
        return steps

    def load_weights(self, generator: str, version: int) -> Task:
        """Queue a generator's load of the published weights; its result is the `Span` it took."""
        loads = self._plane.load(generator, version)
        return loads[0] if len(loads) == 1 else JoinedTask(generator, loads, join_spans)

    def compare_weights(self, generator: str) -> list[Task]:
        """Have each of a generator's ranks name what it holds otherwise than it was published; None if nothing."""
        return self._plane.compare(generator)

    def shutdown(self) -> None:
        """End all workers. Safe to call twice."""
        self.engine.shutdown()
        self._plane.close()
        self.recovery.close()
        self.state.free()
        self._rendezvous.close()
        self._built.clear()

    def change(self, workers: Callable[[], Sequence[str]], method: str, *args: Any) -> None:
        """Have workers change their state, and keep that of the trainers if they train already.

        Args:
            workers: gives them, with each attempt anew: one may be given up in between.
            method: of theirs.
            *args: of the method.
        """

        def change() -> None:
            self.call(workers(), method, *args)
            if self._optimizer is not None:
                self.recovery.take_snapshot()

        self.recovery.run(change)

    def call(self, workers: Sequence[str], method: str, *args: Any) -> list[Any]:
        """Have workers do the same, and wait for it."""
        return self.engine.gather([self.engine.submit(worker, method, *args) for worker in workers])
