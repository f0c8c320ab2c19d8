"""Runs the real scheduler against a virtual clock: what a cluster would do with a workload, in seconds.

The scheduler cannot tell it from a run. Costs come from a `Workload`, workers from a `Cluster`, and the order of
everything from `digenrl.scheduling.Scheduler`. Rule and figures: docs/design/gap.md (DigenRL, arXiv:2606.24369).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from digenrl.scheduling.events import (
    Assist,
    Assisted,
    Event,
    FinishStep,
    Generate,
    Generated,
    LoadWeights,
    Score,
    Scored,
    StepAdded,
    StepStarted,
    Update,
    Updated,
    WeightsLoaded,
    WeightsPublished,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.policy import SchedulingPolicy
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.work import MicroBatch, Slice, cut_step

_COMPUTING = ("generate", "score", "assist", "update", "optimizer")
"""Tasks that count as computing; moving weights and states does not."""

_MAX_JITTER = 2.0


@dataclass(frozen=True)
class Cluster:
    """The workers of a run, and how fast they are."""

    generators: int
    """Workers that make samples, named `generator-0` and so on."""
    trainers: int
    """Data-parallel workers that train, named `trainer-0` and so on: one group with one task at a time. A micro-batch
    is split over them as evenly as whole samples allow, and all wait for the largest share."""
    reward_workers: int = 0
    """Workers that only score, named `reward-worker-0` and so on; without any, generators score what they made."""
    generator_speeds: tuple[float, ...] = ()
    """A factor for each generator: at 2.0 it needs half of the workload's seconds. Empty: all 1.0."""
    trainer_speed: float = 1.0
    """The factor of the slowest trainer, which the others wait for."""
    failures: tuple[tuple[float, str], ...] = ()
    """(time in seconds, worker): when a generator or a reward worker is lost, with all of its untrained samples."""
    restart_s: float | None = None
    """Seconds until a lost generator is back with the newest weights; None: it does not come back."""

    def __post_init__(self) -> None:
        _check_count("generators", self.generators, least=1, meaning="workers that make samples")
        _check_count("trainers", self.trainers, least=1, meaning="workers that train")
        _check_count("reward_workers", self.reward_workers, least=0, meaning="workers that only score")
        if self.generator_speeds and len(self.generator_speeds) != self.generators:
            raise ValueError(
                f"`generator_speeds` gives a factor for each of the {self.generators} generators, got "
                f"{len(self.generator_speeds)} of them."
            )
        for speed in self.generator_speeds:
            _check_seconds("generator_speeds", speed, meaning="factor of a generator's speed", is_positive=True)
        _check_seconds("trainer_speed", self.trainer_speed, meaning="factor of the trainers' speed", is_positive=True)
        if self.restart_s is not None:
            _check_seconds("restart_s", self.restart_s, meaning="time until a lost generator is back")
        for time_s, worker in self.failures:
            _check_seconds("failures", time_s, meaning="time of a loss")
            if worker not in self.generator_names and worker not in self.reward_worker_names:
                raise ValueError(f"`failures` names no generator or reward worker of the cluster: {worker!r}.")
        lost = {worker for _, worker in self.failures}
        for group, names in (("generators", self.generator_names), ("reward workers", self.reward_worker_names)):
            can_return = group == "generators" and self.restart_s is not None
            if names and lost.issuperset(names) and not can_return:
                raise ValueError(f"`failures` must leave at least 1 of the {len(names)} {group}, got a loss of each.")

    @property
    def generator_names(self) -> tuple[str, ...]:
        """The generators' names."""
        return _names("generator", self.generators)

    @property
    def trainer_names(self) -> tuple[str, ...]:
        """The trainers' names."""
        return _names("trainer", self.trainers)

    @property
    def reward_worker_names(self) -> tuple[str, ...]:
        """The reward workers' names."""
        return _names("reward-worker", self.reward_workers)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices in a colocated run, which are those of generators and trainers."""
        return _names("device", self.generators + self.trainers)

    @property
    def speeds(self) -> tuple[float, ...]:
        """A factor for each generator."""
        return self.generator_speeds or (1.0,) * self.generators


@dataclass(frozen=True)
class Workload:
    """What a step consists of, and what it costs on a worker of speed 1."""

    num_groups: int
    """Prompts of a step."""
    group_size: int
    """Samples per prompt."""
    generate_s: float
    """Seconds in which a generator makes a sample."""
    update_s: float
    """Seconds in which a trainer trains a sample, with the `timestep_batch_size` of this workload."""
    score_s: float = 0.0
    """Seconds in which a generator or a reward worker scores a sample."""
    assist_s: float | None = None
    """Seconds in which a trainer makes a sample, and scores it unless reward workers do; None: as a generator."""
    groups_per_micro_batch: int | Literal["all"] = 1
    """Groups that are generated, scored and trained as a unit; `all` trains only when the whole step is made."""
    generation_batch_size: int | None = None
    """Most samples that a generator makes at a time; None sets no bound."""
    generate_call_s: float = 0.0
    """Seconds that each call to generate takes in addition, whatever its size; so for the next three."""
    score_call_s: float = 0.0
    update_call_s: float = 0.0
    assist_call_s: float = 0.0
    optimizer_s: float = 0.0
    """Seconds of a step's optimizer step."""
    publish_s: float = 0.0
    """Seconds in which trainers publish new weights; they do nothing else meanwhile."""
    load_s: float = 0.0
    """Seconds in which a generator loads published weights."""
    switch_s: float = 0.0
    """Seconds in which trainers switch from training to generation, and again back."""
    jitter: float = 0.0
    """Sigma of a lognormal factor of mean 1 that makes some groups dearer than others. It belongs to the work, not to
    the worker, so that all policies get the same work from one seed, however it is cut."""

    def __post_init__(self) -> None:
        _check_count("num_groups", self.num_groups, least=1, meaning="prompts of a step")
        _check_count("group_size", self.group_size, least=1, meaning="samples per prompt")
        if self.generation_batch_size is not None:
            _check_count("generation_batch_size", self.generation_batch_size, least=1, meaning="samples in a call")
        if self.groups_per_micro_batch != "all":
            size = self.groups_per_micro_batch
            _check_count("groups_per_micro_batch", size, least=1, meaning="groups in a micro-batch")
            if self.num_groups % size:
                near = sorted(divisors(self.num_groups), key=lambda count: (abs(count - size), count))[0]
                raise ValueError(
                    f"`groups_per_micro_batch` must divide the {self.num_groups} groups of a step, got {size}; "
                    f"the nearest that does is {near}."
                )
        for name in ("generate_s", "update_s"):
            _check_seconds(name, getattr(self, name), meaning="cost of a sample", is_positive=True)
        for name in (
            "score_s", "generate_call_s", "score_call_s", "update_call_s", "assist_call_s", "optimizer_s", "publish_s",
            "load_s", "switch_s",
        ):  # fmt: skip
            _check_seconds(name, getattr(self, name), meaning="cost")
        if self.assist_s is not None:
            _check_seconds("assist_s", self.assist_s, meaning="cost of a sample", is_positive=True)
        _check_seconds("jitter", self.jitter, meaning="sigma of a lognormal factor")
        if self.jitter > _MAX_JITTER:
            raise ValueError(f"`jitter` is the sigma of a lognormal factor, at most {_MAX_JITTER}, got {self.jitter}.")

    @property
    def num_samples(self) -> int:
        """Samples of a step."""
        return self.num_groups * self.group_size

    @property
    def micro_batch_groups(self) -> int:
        """Groups of a micro-batch."""
        return self.num_groups if self.groups_per_micro_batch == "all" else self.groups_per_micro_batch

    def assisted_sample_s(self, *, scores: bool) -> float:
        """Give the seconds in which a trainer makes a sample, and scores it if it does."""
        return self.generate_s + self.score_s * scores if self.assist_s is None else self.assist_s


@dataclass(frozen=True)
class SimulatedSpan:
    """What a worker did, and when: the fields of a real timeline's spans."""

    worker: str
    task: str
    """`generate`, `score`, `assist`, `update`, `optimizer`, `sync` or `switch`."""
    detail: str
    """The samples, micro-batch or version."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulationResult:
    """What a run would take.

    A worker's time is computing, moving (weights: `sync`; a trainer's state: `switch`) or a bubble. Trainers act as
    one: a rank with a smaller share of a micro-batch waits for the others, which counts as computing.
    """

    num_steps: int
    num_samples: int
    """Samples of all steps."""
    step_s: tuple[float, ...]
    """Seconds of each step: from the weights before it, or the start, until its own are published."""
    busy_s: Mapping[str, float]
    """Seconds that each worker computes."""
    moving_s: Mapping[str, float]
    """Seconds that each worker moves weights or states."""
    num_assisted: tuple[int, ...]
    """Micro-batches that trainers made, of each step."""
    stale_fraction: tuple[float, ...]
    """Share of the samples made with the weights before, of each step."""
    fluid_bound_s: float
    """Least seconds that any schedule on these workers takes, see `fluid_bound_s`."""
    num_events: int
    """Events that the scheduler observed."""
    spans: tuple[SimulatedSpan, ...] = field(repr=False)
    """What workers did, in the order in which it ended; empty if not recorded."""

    @property
    def makespan_s(self) -> float:
        """Seconds until the last step's weights are published."""
        return sum(self.step_s)

    @property
    def mean_step_s(self) -> float:
        """Seconds of a step."""
        return self.makespan_s / self.num_steps

    @property
    def samples_per_s(self) -> float:
        """Samples trained per second."""
        return self.num_samples / self.makespan_s

    @property
    def efficiency(self) -> float:
        """Share of the fluid bound in the makespan: 1 is perfect."""
        return self.fluid_bound_s / self.makespan_s

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all workers."""
        return tuple(self.busy_s)

    @property
    def utilization(self) -> dict[str, float]:
        """By group of workers, `generators` and `trainers`: share of their time that they compute."""
        return self._share(self.busy_s)

    @property
    def bubbles(self) -> dict[str, float]:
        """By worker: share of its time in which it neither computes nor moves anything."""
        return {worker: 1 - (self.busy_s[worker] + self.moving_s[worker]) / self.makespan_s for worker in self.busy_s}

    @property
    def bubble_share(self) -> float:
        """Share of all workers' time in which they neither compute nor move anything."""
        return sum(self.bubbles.values()) / len(self.bubbles)

    def _share(self, seconds: Mapping[str, float]) -> dict[str, float]:
        groups: dict[str, list[float]] = {}
        for worker, spent_s in seconds.items():
            groups.setdefault(group_of(worker), []).append(spent_s)
        return {group: sum(spent) / (len(spent) * self.makespan_s) for group, spent in groups.items()}


def simulate(
    cluster: Cluster,
    workload: Workload,
    policy: SchedulingPolicy = SchedulingPolicy(),  # noqa: B008 (immutable)
    *,
    num_steps: int,
    seed: int = 0,
    record_spans: bool = True,
) -> SimulationResult:
    """Run steps of a workload on a cluster of separate generators and trainers.

    A step is added and started; with staleness the next one is added as soon as the current one starts. When all its
    micro-batches are trained come the optimizer step, the publication of the weights and the next step, while
    generators load.

    Example:
        >>> from digenrl.scheduling import SchedulingPolicy
        >>> workload = Workload(num_groups=4, group_size=2, generate_s=1.0, update_s=0.5, groups_per_micro_batch="all")
        >>> simulate(Cluster(generators=1, trainers=1), workload, SchedulingPolicy(), num_steps=1).makespan_s
        12.0

    Args:
        cluster: the workers.
        workload: the work and its costs.
        policy: what may be done to keep workers busy.
        num_steps: optimizer steps to run.
        seed: of the jitter; all else is certain.
        record_spans: whether to keep what each worker did; without, large clusters are faster.

    Raises:
        ValueError: a count out of its bounds.
    """
    _check_count("num_steps", num_steps, least=1, meaning="optimizer steps")
    return _Run(cluster, workload, policy, num_steps, seed, record_spans).run()


def simulate_colocated(
    cluster: Cluster, workload: Workload, *, num_steps: int, seed: int = 0, record_spans: bool = True
) -> SimulationResult:
    """Run the same steps as data-parallel jobs do: every device makes, scores and trains its share of each step.

    Devices are the cluster's generators and trainers; its reward workers and failures are left out, and nothing is
    published or loaded, as each device trains the weights that it samples from. Shares differ by one sample at most. A
    device makes `generation_batch_size` samples at a time and trains them in as many calls, and switches to generation
    and back once a step at `switch_s` each. All wait for the slowest device before the optimizer step.

    Raises:
        ValueError: a count out of its bounds.
    """
    _check_count("num_steps", num_steps, least=1, meaning="optimizer steps")
    names = cluster.device_names
    speeds = (*cluster.speeds, *(cluster.trainer_speed,) * cluster.trainers)
    busy_s, moving_s = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    spans: list[SimulatedSpan] = []
    step_s: list[float] = []
    work = _Work(workload, seed, trainers_score=True)
    now_s = 0.0

    def spend(device: str, task: str, detail: str, start_s: float, seconds: float) -> float:
        account = busy_s if task in _COMPUTING else moving_s
        account[device] += seconds
        if record_spans and seconds > 0:
            spans.append(SimulatedSpan(device, task, detail, start_s, start_s + seconds))
        return start_s + seconds

    for step in range(num_steps):
        micro_batch = cut_step(
            step,
            num_groups=workload.num_groups,
            group_size=workload.group_size,
            groups_per_micro_batch=workload.num_groups,
            num_generators=len(names),
        )[0]
        work.add(step)
        ends_s = [now_s]
        for part, device, speed in zip(micro_batch.slices, names, speeds, strict=False):
            size = len(part)
            num_calls = math.ceil(size / (workload.generation_batch_size or size))
            making, updating = work.making(part), work.updating(part)
            generate_s = (num_calls * workload.generate_call_s + making * workload.generate_s) / speed
            score_s = (num_calls * workload.score_call_s + making * workload.score_s) / speed
            update_s = (num_calls * workload.update_call_s + updating * workload.update_s) / speed
            at_s = spend(device, "switch", "to generation", now_s, workload.switch_s)
            at_s = spend(device, "generate", str(part), at_s, generate_s)
            at_s = spend(device, "score", str(part), at_s, score_s)
            at_s = spend(device, "switch", "to training", at_s, workload.switch_s)
            ends_s.append(spend(device, "update", str(part), at_s, update_s))
        end_s = max(ends_s)
        for device in names:
            spend(device, "optimizer", f"version {step + 1}", end_s, workload.optimizer_s)
        step_s.append(end_s + workload.optimizer_s - now_s)
        now_s = end_s + workload.optimizer_s
    total_s = work.generate_s + work.score_s + work.update_s
    return SimulationResult(
        num_steps=num_steps,
        num_samples=num_steps * workload.num_samples,
        step_s=tuple(step_s),
        busy_s=busy_s,
        moving_s=moving_s,
        num_assisted=(0,) * num_steps,
        stale_fraction=(0.0,) * num_steps,
        fluid_bound_s=num_steps * workload.optimizer_s + total_s / sum(speeds),
        num_events=0,
        spans=tuple(spans),
    )


def fluid_bound_s(cluster: Cluster, workload: Workload, *, num_steps: int) -> float:
    """Give the best possible time of an infinitely divisible workload on these workers.

    Work is a fluid: samples are split at will, so that nobody waits for anything, calls cost nothing beside their
    samples, loads and switches nothing at all, and no worker is lost. Trainers make a fraction x of the samples,
    generators the others, and both score what they made, unless there are reward workers. With N steps of B samples,
    generate, score, assist and update seconds g, s, a, u per sample, publication p and optimizer step o, generators of
    speeds v_i, T trainers of speed v and R reward workers, a run takes at least

        max( p + o + (1 - x) N B (g + s) / sum v_i,  N (p + o) + N B (u + x a) / (T v) )

    seconds, and with reward workers (g + s) is g, and p + o + N B s / R counts as well. The bound is the least
    of it over x in [0, 1]. No policy can beat it: generators' work precedes the last optimizer step, all the rest is
    done by trainers, one task at a time. In a simulation with `jitter` the same is said of the drawn costs.
    """
    num_samples = num_steps * workload.num_samples
    return _fluid_bound(
        cluster,
        workload,
        num_steps=num_steps,
        generate_s=num_samples * workload.generate_s,
        score_s=num_samples * workload.score_s,
        assist_s=num_samples * workload.assisted_sample_s(scores=not cluster.reward_workers),
        update_s=num_samples * workload.update_s,
    )


@dataclass(frozen=True)
class Mode:
    """A way to run a workload, with a name: a rung of the ladder."""

    name: str
    change: str
    """The option that makes it differ from the one before."""
    workload: Workload
    policy: SchedulingPolicy | None
    """None is colocated: no generators and trainers, and nothing to schedule."""

    def simulate(
        self, cluster: Cluster, *, num_steps: int, seed: int = 0, record_spans: bool = True
    ) -> SimulationResult:
        """Run it on a cluster."""
        if self.policy is None:
            return simulate_colocated(cluster, self.workload, num_steps=num_steps, seed=seed, record_spans=record_spans)
        return simulate(cluster, self.workload, self.policy, num_steps=num_steps, seed=seed, record_spans=record_spans)


def ladder_modes(
    workload: Workload,
    *,
    one_timestep_update_s: float | None = None,
    trainer_assist: str = "optimal",
    staleness: float = 0.25,
    staleness_mode: Literal["cap", "exact"] = "cap",
) -> tuple[Mode, ...]:
    """Give the execution modes that DigenRL (arXiv:2606.24369) compares, each one mechanism more than the one before.

    Colocated; naive disaggregated, where trainers wait for a whole step and generators for its weights; + micro-batches
    along the generation axis (GAP); + timesteps trained in one batch (TSP); + trainers that generate while they have
    nothing to train (TAG); + samples made one version early (TCSS).

    Args:
        workload: with all that the last mode uses.
        one_timestep_update_s: seconds in which a trainer trains a sample one timestep at a time, for the modes before
            TSP; None leaves TSP out. There is a colocated run with batched timesteps then, too.
        trainer_assist: for the modes from TAG on; `off` leaves it out.
        staleness: for TCSS; 0 leaves it out.
        staleness_mode: for TCSS.
    """
    has_batches = one_timestep_update_s is not None and one_timestep_update_s != workload.update_s
    slow = replace(workload, update_s=one_timestep_update_s) if one_timestep_update_s is not None else workload
    off = SchedulingPolicy()
    modes = [Mode("colocated", "no separate devices", slow, None)]
    if has_batches:
        modes.append(Mode("colocated +TSP", "all timesteps at once", workload, None))
    modes.append(Mode("naive", "separate devices", replace(slow, groups_per_micro_batch="all"), off))
    groups = workload.groups_per_micro_batch
    if groups not in ("all", workload.num_groups):
        modes.append(Mode("+GAP", f"groups_per_micro_batch {groups}", slow, off))
    if has_batches:
        modes.append(Mode("+TSP", "timestep_batch_size all", workload, off))
    assisting = replace(off, trainer_assist=trainer_assist)
    if trainer_assist != "off":
        modes.append(Mode("+TAG", f"trainer_assist {trainer_assist}", workload, assisting))
    if staleness > 0:
        stale = replace(assisting, staleness=staleness, staleness_mode=staleness_mode)
        modes.append(Mode("+TCSS", f"staleness {staleness:g}", workload, stale))
    return tuple(modes)


def trace_events(spans: Sequence[SimulatedSpan], workers: Iterable[str], *, name: str, process: int) -> list[object]:
    """Describe spans as Chrome trace events, as a real run's timeline has them: a thread per worker, microseconds.

    Args:
        spans: what the workers did.
        workers: names in the order of their threads.
        name: of the process that they belong to.
        process: its number, which orders processes.
    """
    threads = {worker: thread for thread, worker in enumerate(workers, 1)}
    events: list[object] = [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}},
    ]
    for worker, thread in threads.items():
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": worker}})
        index = {"sort_index": thread}
        events.append({"name": "thread_sort_index", "ph": "M", "pid": process, "tid": thread, "args": index})
    for span in sorted(spans, key=lambda span: span.start_s):
        events.append(
            {
                "name": span.task,
                "cat": group_of(span.worker),
                "ph": "X",
                "pid": process,
                "tid": threads[span.worker],
                "ts": round(span.start_s * 1e6, 3),
                "dur": round((span.end_s - span.start_s) * 1e6, 3),
                "args": {"detail": span.detail},
            }
        )
    return events


def group_of(worker: str) -> str:
    """Give the group of a worker, `trainers` for `trainer-0`."""
    return worker.rpartition("-")[0] + "s"


def divisors(number: int) -> list[int]:
    """Give all divisors, the smallest first."""
    return [value for value in range(1, number + 1) if number % value == 0]


class _Work:
    """The drawn costs of steps, and their sums over all samples, in seconds on a worker of speed 1."""

    def __init__(self, workload: Workload, seed: int, *, trainers_score: bool) -> None:
        self._trainers_score = trainers_score
        self.generate_s = 0.0
        self.score_s = 0.0
        self.assist_s = 0.0
        self.update_s = 0.0
        self._workload = workload
        self._seed = seed
        self._making: dict[int, _Factors] = {}
        self._updating: dict[int, _Factors] = {}

    def add(self, step: int) -> None:
        """Draw a step."""
        work = self._workload
        making = updating = float(work.num_samples)
        if work.jitter > 0:
            rng = random.Random(f"{self._seed} {step}")
            self._making[step], self._updating[step] = (
                _Factors([_draw(rng, work.jitter) for _ in range(work.num_groups)], work.group_size) for _ in range(2)
            )
            making, updating = (factors[step].sum(0, work.num_samples) for factors in (self._making, self._updating))
        self.generate_s += making * work.generate_s
        self.score_s += making * work.score_s
        self.assist_s += making * work.assisted_sample_s(scores=self._trainers_score)
        self.update_s += updating * work.update_s

    def making(self, part: Slice | MicroBatch) -> float:
        """Give how many average samples it takes as long to make and score as these."""
        return self._making[part.step].sum(part.start, part.stop) if self._making else len(part)

    def updating(self, part: Slice | MicroBatch) -> float:
        """Give how many average samples it takes as long to train as these."""
        return self._updating[part.step].sum(part.start, part.stop) if self._updating else len(part)


class _Factors:
    """A factor for each group of a step; the same for any cut of the step."""

    def __init__(self, factors: Sequence[float], group_size: int) -> None:
        self._factors = (*factors, 0.0)
        self._group_size = group_size
        self._sums = tuple(itertools.accumulate(factors, initial=0.0))

    def sum(self, start: int, stop: int) -> float:
        """Sum over the samples [start, stop)."""
        return self._up_to(stop) - self._up_to(start)

    def _up_to(self, stop: int) -> float:
        group, rest = divmod(stop, self._group_size)
        return self._sums[group] * self._group_size + rest * self._factors[group]


@dataclass(frozen=True)
class _Published:
    """A step's weights are there."""

    step: int


@dataclass(frozen=True)
class _Restarted:
    """A lost generator is back."""

    generator: str


class _Run:
    """A simulation: a heap of what will happen, the scheduler that answers, and what each worker does at present."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        policy: SchedulingPolicy,
        num_steps: int,
        seed: int,
        record_spans: bool,
    ) -> None:
        self._cluster, self._workload, self._policy = cluster, workload, policy
        self._num_steps = num_steps
        self._record_spans = record_spans
        self._scheduler = Scheduler(cluster.generator_names, reward_workers=cluster.reward_worker_names, policy=policy)
        self._speed = dict(zip(cluster.generator_names, cluster.speeds, strict=True))
        self._speed.update(dict.fromkeys(cluster.reward_worker_names, 1.0))
        self._trainers_speed = cluster.trainer_speed
        self._trainer_names = cluster.trainer_names
        workers = (*self._speed, *cluster.trainer_names)
        self._busy_s, self._moving_s = dict.fromkeys(workers, 0.0), dict.fromkeys(workers, 0.0)
        self._trainers_busy_s = self._trainers_moving_s = 0.0
        self._work = _Work(workload, seed, trainers_score=not cluster.reward_workers)
        self._spans: list[SimulatedSpan] = []
        self._now_s = 0.0
        self._queue: list[tuple[float, int, Event | _Published | _Restarted, str]] = []
        self._num_queued = 0
        self._void: set[int] = set()  # entries of the queue whose worker is lost
        self._doing: dict[str, tuple[int, str, Slice | int, float]] = {}  # entry, task, subject, start
        self._lost: set[str] = set()
        self._is_switched = False
        self._num_events = 0
        self._ends_s: list[float] = []
        self._num_assisted: list[int] = []
        self._stale_fraction: list[float] = []
        self._perform = {
            Generate: self._generate,
            Score: self._score,
            LoadWeights: self._load,
            Assist: self._assist,
            Update: self._update,
            FinishStep: self._finish_step,
        }

    def run(self) -> SimulationResult:
        for time_s, worker in self._cluster.failures:
            self._push(time_s, WorkerLost(worker))
        self._start_step(0)
        queue, void, doing = self._queue, self._void, self._doing
        while len(self._ends_s) < self._num_steps:
            assert queue, "the scheduler leaves workers idle while there is work"
            self._now_s, number, event, worker = heapq.heappop(queue)
            if void and number in void:
                void.discard(number)
            elif worker:
                if worker in doing:
                    self._end(worker)
                self._observe(event)  # type: ignore[arg-type]
            elif isinstance(event, _Published):
                self._on_published(event.step)
            elif isinstance(event, _Restarted):
                self._on_restarted(event.generator)
            else:
                assert isinstance(event, WorkerLost)
                self._on_lost(event)
        return self._result()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _add_step(self, step: int) -> None:
        micro_batches = cut_step(
            step,
            num_groups=self._workload.num_groups,
            group_size=self._workload.group_size,
            groups_per_micro_batch=self._workload.micro_batch_groups,
            num_generators=self._cluster.generators,
            generation_batch_size=self._workload.generation_batch_size,
        )
        self._work.add(step)
        self._observe(StepAdded(micro_batches, policy_version=step))

    def _start_step(self, step: int) -> None:
        is_ahead = self._policy.staleness > 0
        if step == 0 or not is_ahead:
            self._add_step(step)
        self._observe(StepStarted(step))
        if is_ahead and step + 1 < self._num_steps:
            self._add_step(step + 1)

    def _on_published(self, step: int) -> None:
        self._ends_s.append(self._now_s)
        if step + 1 < self._num_steps:
            self._observe(WeightsPublished(step + 1))
            self._start_step(step + 1)

    def _finish_step(self, action: FinishStep) -> None:
        self._num_assisted.append(action.num_assisted)
        self._stale_fraction.append(action.num_stale_samples / self._workload.num_samples)
        version = f"version {action.step + 1}"
        at_s = self._spend("optimizer", version, self._now_s, self._workload.optimizer_s)
        at_s = self._spend("sync", version, at_s, self._workload.publish_s)
        self._push(at_s, _Published(action.step))

    # ---- failures ------------------------------------------------------------------------------------------

    def _on_lost(self, event: WorkerLost) -> None:
        worker = event.worker
        if worker in self._lost:
            return
        self._lost.add(worker)
        if worker in self._doing:
            self._void.add(self._doing[worker][0])
            self._end(worker)
        if self._cluster.restart_s is not None and worker not in self._cluster.reward_worker_names:
            self._push(self._now_s + self._cluster.restart_s, _Restarted(worker))
        self._observe(event)

    def _on_restarted(self, generator: str) -> None:
        self._lost.remove(generator)
        self._observe(WorkerJoined(generator, policy_version=len(self._ends_s)))

    # ---- what the scheduler wants --------------------------------------------------------------------------

    def _observe(self, event: Event) -> None:
        self._num_events += 1
        for action in self._scheduler.observe(event, self._now_s):
            self._perform[type(action)](action)  # type: ignore[operator]

    def _generate(self, action: Generate) -> None:
        part, generator, work = action.slice, action.generator, self._workload
        seconds = work.generate_call_s + work.generate_s * self._work.making(part)
        self._begin(generator, "generate", part, seconds / self._speed[generator], Generated(part, generator))

    def _score(self, action: Score) -> None:
        part, worker, work = action.slice, action.worker, self._workload
        seconds = work.score_call_s + work.score_s * self._work.making(part)
        self._begin(worker, "score", part, seconds / self._speed[worker], Scored(part, worker))

    def _load(self, action: LoadWeights) -> None:
        loaded = WeightsLoaded(action.generator, action.policy_version)
        self._begin(action.generator, "sync", action.policy_version, self._workload.load_s, loaded)

    def _assist(self, action: Assist) -> None:
        micro_batch, work = action.micro_batch, self._workload
        switch_s = self._switch(to_generation=True)
        share = self._work.making(micro_batch) * self._largest_share(micro_batch)
        seconds = work.assist_call_s + share * work.assisted_sample_s(scores=not self._cluster.reward_workers)
        end_s = self._spend("assist", micro_batch, self._now_s + switch_s, seconds / self._trainers_speed)
        self._push(end_s, Assisted(micro_batch, switch_s), "trainer")

    def _update(self, action: Update) -> None:
        micro_batch, work = action.micro_batch, self._workload
        switch_s = self._switch(to_generation=False)
        share = self._work.updating(micro_batch) * self._largest_share(micro_batch)
        seconds = work.update_call_s + share * work.update_s
        end_s = self._spend("update", micro_batch, self._now_s + switch_s, seconds / self._trainers_speed)
        self._push(end_s, Updated(micro_batch, switch_s), "trainer")

    def _largest_share(self, micro_batch: MicroBatch) -> float:
        return math.ceil(len(micro_batch) / self._cluster.trainers) / len(micro_batch)

    def _switch(self, *, to_generation: bool) -> float:
        if to_generation == self._is_switched:
            return 0.0
        self._is_switched = to_generation
        detail = "to generation" if to_generation else "to training"
        self._spend("switch", detail, self._now_s, self._workload.switch_s)
        return self._workload.switch_s

    # ---- time ----------------------------------------------------------------------------------------------

    def _push(self, time_s: float, event: Event | _Published | _Restarted, worker: str = "") -> int:
        self._num_queued += 1
        heapq.heappush(self._queue, (time_s, self._num_queued, event, worker))
        return self._num_queued

    def _begin(self, worker: str, task: str, subject: Slice | int, seconds: float, event: Event) -> None:
        number = self._push(self._now_s + seconds, event, worker)
        self._doing[worker] = number, task, subject, self._now_s

    def _end(self, worker: str) -> None:
        _, task, subject, start_s = self._doing.pop(worker)
        account = self._moving_s if task == "sync" else self._busy_s
        account[worker] += self._now_s - start_s
        if self._record_spans and self._now_s > start_s:
            detail = f"version {subject}" if isinstance(subject, int) else str(subject)
            self._spans.append(SimulatedSpan(worker, task, detail, start_s, self._now_s))

    def _spend(self, task: str, subject: MicroBatch | str, start_s: float, seconds: float) -> float:
        """Give trainers' time to a task; returns when it ends."""
        if task in _COMPUTING:
            self._trainers_busy_s += seconds
        else:
            self._trainers_moving_s += seconds
        end_s = start_s + seconds
        if self._record_spans and seconds > 0:
            detail = str(subject)
            self._spans.extend(SimulatedSpan(name, task, detail, start_s, end_s) for name in self._trainer_names)
        return end_s

    def _result(self) -> SimulationResult:
        for worker in list(self._doing):  # a load that nobody waits for
            self._end(worker)
        for trainer in self._trainer_names:
            self._busy_s[trainer] = self._trainers_busy_s
            self._moving_s[trainer] = self._trainers_moving_s
        ends_s = (0.0, *self._ends_s)
        return SimulationResult(
            num_steps=self._num_steps,
            num_samples=self._num_steps * self._workload.num_samples,
            step_s=tuple(end_s - start_s for start_s, end_s in zip(ends_s, ends_s[1:], strict=False)),
            busy_s=self._busy_s,
            moving_s=self._moving_s,
            num_assisted=tuple(self._num_assisted),
            stale_fraction=tuple(self._stale_fraction),
            fluid_bound_s=_fluid_bound(
                self._cluster,
                self._workload,
                num_steps=self._num_steps,
                generate_s=self._work.generate_s,
                score_s=self._work.score_s,
                assist_s=self._work.assist_s,
                update_s=self._work.update_s,
            ),
            num_events=self._num_events,
            spans=tuple(self._spans),
        )


def _fluid_bound(
    cluster: Cluster,
    workload: Workload,
    *,
    num_steps: int,
    generate_s: float,
    score_s: float,
    assist_s: float,
    update_s: float,
) -> float:
    """Compute `fluid_bound_s` from the seconds of all samples on one worker of speed 1."""
    between_s = workload.optimizer_s + workload.publish_s
    trainers_speed = cluster.trainers * cluster.trainer_speed
    fixed_s = num_steps * between_s + update_s / trainers_speed
    assist_all_s = assist_s / trainers_speed
    made_all_s = (generate_s + (0.0 if cluster.reward_workers else score_s)) / sum(cluster.speeds)
    bounds_s = [fixed_s]
    if cluster.reward_workers:
        bounds_s.append(between_s + score_s / cluster.reward_workers)
    if made_all_s > 0:
        # Falling line between_s + (1 - x) made_all_s, rising line fixed_s + x assist_all_s.
        fraction = (between_s + made_all_s - fixed_s) / (made_all_s + assist_all_s)
        fraction = min(max(fraction, 0.0), 1.0)
        bounds_s.append(max(between_s + (1 - fraction) * made_all_s, fixed_s + fraction * assist_all_s))
    return max(bounds_s)


def _draw(rng: random.Random, sigma: float) -> float:
    """Draw from a lognormal distribution of mean 1."""
    return math.exp(sigma * rng.gauss(0.0, 1.0) - sigma * sigma / 2)


def _names(role: str, count: int) -> tuple[str, ...]:
    return tuple(f"{role}-{index}" for index in range(count))


def _check_count(name: str, value: object, *, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` counts {meaning} and must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` counts {meaning} and must be at least {least}, got {value}.")


def _check_seconds(name: str, value: object, *, meaning: str, is_positive: bool = False) -> None:
    bound = "above 0" if is_positive else "at least 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{name}` is the {meaning} and must be a number, got {value!r}.")
    if not math.isfinite(value) or value < 0 or (is_positive and value == 0):
        raise ValueError(f"`{name}` is the {meaning} and must be {bound}, got {value}.")
