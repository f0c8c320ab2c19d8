"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from digenrl.engines.engine import (
    Engine,
    ObjectLost,
    ObjectRef,
    RemoteTraceback,
    Requirements,
    Task,
    WorkerDied,
    WorkerError,
    WorkerFactory,
)
from digenrl.engines.fork_server import PRELOAD
from digenrl.engines.ray.cluster import Cluster
from digenrl.engines.ray.logs import RunLogs
from digenrl.engines.ray.objects import DriverStore, Serial, Source
from digenrl.engines.ray.placement import Placement
from digenrl.engines.ray.surroundings import environment, import_path
from digenrl.engines.ray.worker import Machine, Whereabouts, ask_for_stacks, read_log

_SLICE_S = 0.2  # longest wait without a look at signals and deadlines
_LOOK_S = 1e-3  # least time between looks that do not wait: one costs Ray a tenth of it
_STOP_S = 5.0  # what a worker gets to end by itself
_HOST_S = 20.0  # what another host gets to answer about a worker that does not
_DEATH_S = 1.0  # in which the death that explains a lost object is heard of
_NUM_PINGS = 5
_PLACEMENT_S = 300.0
_LOST = "was lost with its host"


@dataclass
class _Call:
    """A task on its way."""

    task: Task
    reply: ray.ObjectRef[Any]
    objects: ray.ObjectRef[Any]
    """What the task puts."""
    sources: Mapping[Serial, Source]
    """What it reads."""
    arguments: Any
    """Keeps the references to that, which may come back."""


@dataclass
class _Worker:
    """The driver's view of an actor."""

    actor: Any
    calls: deque[_Call] = field(default_factory=deque)
    where: Whereabouts | None = None
    clock_offset_s: float = 0.0


class RayEngine(Engine):
    """Runs each worker as an actor of a Ray cluster, on any of its hosts.

    A worker's tasks run in the order in which they were submitted. What they put stays in Ray's object store, owned by
    this process, which sees only references, and of the tiniest the few bytes. A dead worker is not restarted by Ray.

    Example:
        >>> from digenrl.engines.ray import RayEngine
        >>> engine = RayEngine(address="auto")  # doctest: +SKIP
        >>> engine.start("adder-0", Adder)  # doctest: +SKIP
        >>> engine.call("adder-0", "add", 1, 2)  # doctest: +SKIP
        3
    """

    store: DriverStore

    def __init__(
        self,
        task_timeout_s: float = 3600.0,
        *,
        address: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        num_hosts: int = 1,
        log_folder: Path | None = None,
        placement_timeout_s: float = _PLACEMENT_S,
    ) -> None:
        """Connect to a cluster.

        Args:
            task_timeout_s: after which a task is given up.
            address: of the cluster, as `ray.init` takes it; None is that of `RAY_ADDRESS`, or starts one here.
            runtime_env: what to ship to workers in place of the working directory.
            num_hosts: that the cluster must have.
            log_folder: for what workers print, a file each; None is stderr.
            placement_timeout_s: after which resources that others use are no longer waited for.

        Raises:
            ValueError: there is no such cluster.
        """
        super().__init__(task_timeout_s)
        self._cluster = Cluster(address, runtime_env)
        num_alive = len({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})
        if num_alive < num_hosts:
            self._cluster.close()
            raise ValueError(f"`num_nodes` is {num_hosts}, but the Ray cluster has {num_alive} hosts.")
        self._placement = Placement(placement_timeout_s)
        self._logs = RunLogs(log_folder)
        self._machine = Machine.here()
        self._launched: dict[str, Any] = {}  # actors that wait for `start`
        self._workers: dict[str, _Worker] = {}
        self._causes: dict[str, str] = {}
        self._log_positions: dict[str, int] = {}
        self._copies: dict[ray.ObjectRef[Any], tuple[Task, ObjectRef]] = {}  # on their way
        self._misses_hosts = False  # since the start
        self._looked_s = 0.0  # when for results
        self.store = DriverStore(task_timeout_s)

    def reserve(self, workers: Mapping[str, Requirements]) -> None:
        """Set aside what workers need and launch their processes, so that all import at the same time.

        Raises:
            ValueError: the cluster does not have it.
            WorkerError: others use it for longer than `placement_timeout_s`.
        """
        for worker in self._placement.reserve(workers):
            self._launched[worker] = self._launch(worker, PRELOAD)

    def start(self, worker: str, factory: WorkerFactory, *, env: Mapping[str, str] | None = None) -> None:
        """Let a process make its object; an error of the factory is raised here.

        Ray may learn of a host's loss from a worker that was to start there; it is started on another one then.
        """
        while True:
            try:
                self._start(worker, factory, env or {})
                return
            except WorkerDied:
                if self._causes[worker] != _LOST:
                    raise

    def _start(self, worker: str, factory: WorkerFactory, env: Mapping[str, str]) -> None:
        assert worker not in self._workers, f"worker {worker} runs already"
        one_host = self._cluster.is_one_host
        actor = self._launched.pop(worker) if worker in self._launched else self._launch(worker, ())
        self._causes.pop(worker, None)
        self._log_positions.pop(worker, None)
        state = self._workers[worker] = _Worker(actor)
        try:
            state.where = self.call(
                worker,
                "__start__",
                cloudpickle.dumps(factory),
                environment(one_host=one_host),
                env,
                one_host=one_host,
                kept=self._set_by_ray(worker),
            )
            if state.where.machine.boot_id != self._machine.boot_id:
                state.clock_offset_s = self._measure_clock(worker)
        except BaseException:
            self.kill(worker)
            raise

    def submit(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> Task:
        """Send the call; what it refers to goes from host to host while the worker is still busy."""
        task = Task(worker, method.strip("_"), self.task_timeout_s)
        state = self._workers.get(worker)
        if state is None:
            task.finish(error=self._death(task))
            return task
        arguments, sources = self.store.dump((args, kwargs))
        # What a worker has made itself is on its host, and need not be there: it may be about to be freed.
        own = [serial for serial, source in sources.items() if source.maker == worker]
        others = [serial for serial in sources if serial not in own]
        # Each argument costs Ray some time, so what is no reference goes as one.
        message = pickle.dumps((method, arguments, own, others))
        held = [[sources[serial].ref for serial in own]] if own else []
        reply, objects = state.actor.run.remote(message, *held, *(sources[serial].ref for serial in others))
        state.calls.append(_Call(task, reply, objects, sources, (args, kwargs)))
        return task

    def wait(self, tasks: Sequence[Task], timeout_s: float) -> list[Task]:
        """Receive results until one of `tasks` is done or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not any(task.is_done for task in tasks):
            self._check_deadlines(tasks)
            left_s = end_s - time.monotonic()
            self._receive(min(max(left_s, 0.0), _SLICE_S))
            if left_s <= 0:
                break
        return [task for task in tasks if task.is_done]

    def unfinished(self, worker: str) -> list[Task]:
        """Give what was sent to a worker and has brought no result."""
        state = self._workers.get(worker)
        return [] if state is None else [call.task for call in state.calls]

    def kill(self, worker: str) -> None:
        """Have Ray end a worker's process, whatever it is at."""
        if worker in self._workers:
            self._bury(worker, "was killed")

    def shutdown(self) -> None:
        """Ask the workers to stop; kill those that do not within five seconds, and leave the cluster."""
        if ray.is_initialized():
            self._stop_workers()
            for worker in list(self._workers):
                self.kill(worker)
            for actor in self._launched.values():
                ray.kill(actor)
        self._workers, self._launched, self._copies = {}, {}, {}
        self._placement.release()
        self._cluster.close()

    def host(self, worker: str) -> str:
        """Give the name and the address of a worker's host, or the driver's name for its own."""
        where = self._where(worker)
        if where.machine == self._machine:
            return super().host(worker)
        return f"{where.machine.name} ({where.address})"

    @property
    def driver_address(self) -> str:
        """Address under which Ray knows this host."""
        address: str = ray.util.get_node_ip_address()
        return address

    def clock_offset_s(self, worker: str) -> float:
        """Give what was measured when the worker started; exact to about half of a message's way there and back."""
        return self._workers[worker].clock_offset_s if worker in self._workers else 0.0

    def adopt(self, ref: ObjectRef) -> ObjectRef:
        """Give another name to an object: the driver owns it already; it is lost only with the host that keeps it."""
        return self.store.adopt(ref)

    def free(self, refs: Sequence[ObjectRef]) -> list[Task]:
        """Let go of objects: the driver owns them, whoever made them. Ray keeps what tasks on their way will read."""
        self.store.free(refs)
        return []

    def lost(self, refs: Sequence[ObjectRef]) -> list[ObjectRef]:
        """Name those that no host has any more; nobody is asked while all hosts live."""
        return self.store.lost(refs) if self._misses_hosts else []

    def copy(self, ref: ObjectRef) -> Task | None:
        """Copy an object on the host with the most memory among those that do not have it."""
        node = self.store.another_node(ref)
        if node is None:
            return None
        task = Task("driver", "copy", self.task_timeout_s)
        placed = NodeAffinitySchedulingStrategy(node, soft=False)
        # A function that travels by value, so that the process that runs it imports nothing.
        give_back = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=placed)(lambda encoded: encoded)
        self._copies[give_back.remote(ref.address[0].ref)] = task, ref
        return task

    # ---- actors --------------------------------------------------------------------------------------------

    def _launch(self, worker: str, modules: Sequence[str]) -> Any:
        """Start a process; `modules` are what it imports before it is asked anything."""
        path, folder = import_path(one_host=self._cluster.is_one_host)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **self._placement.options(worker)}
        return _actor_class().options(**options).remote(worker, path, folder, modules)

    def _set_by_ray(self, worker: str) -> list[str]:
        """Name the environment variables that Ray gives a worker: the user's own, and which GPUs are reserved."""
        given = list(ray.get_runtime_context().runtime_env.get("env_vars", {}))
        return [*given, "CUDA_VISIBLE_DEVICES"] if self._placement.num_gpus(worker) else given

    def _measure_clock(self, worker: str) -> float:
        """Ask for the time; the answer that was on its way for the shortest time is off by the least."""
        best_s, offset_s = float("inf"), 0.0
        for _ in range(_NUM_PINGS):
            sent_s = time.monotonic()
            there_s: float = self.call(worker, "__clock__")
            back_s = time.monotonic()
            if back_s - sent_s < best_s:
                best_s, offset_s = back_s - sent_s, (sent_s + back_s) / 2 - there_s
        return offset_s

    def _where(self, worker: str) -> Whereabouts:
        where = self._workers[worker].where
        assert where is not None, "`start` waits for it"
        return where

    def _stop_workers(self) -> None:
        stops = [self.submit(worker, "__stop__") for worker in self._workers]
        end_s = time.monotonic() + _STOP_S
        while any(not task.is_done for task in stops) and time.monotonic() < end_s:
            self._receive(_SLICE_S)

    # ---- results -------------------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        """Take what workers have done; a worker's first unfinished task is the only one that can be."""
        heads = {state.calls[0].reply: worker for worker, state in self._workers.items() if state.calls}
        heads.update(dict.fromkeys(self._copies, ""))
        if not heads:
            time.sleep(timeout_s)
            return
        if timeout_s == 0 and time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        ready, _ = ray.wait(list(heads), num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(heads) > 1:
            ready, _ = ray.wait(list(heads), num_returns=len(heads), timeout=0, fetch_local=False)
        for reply in ready:
            if reply in self._copies:
                self._take_copy(reply)
            elif heads[reply] in self._workers:  # not buried for another's sake just now
                self._take(heads[reply])

    def _take_copy(self, copy: ray.ObjectRef[Any]) -> None:
        task, ref = self._copies.pop(copy)
        kept = ObjectRef("driver", (self.store.keep(copy, "driver", [ref.address[1]]), ref.address[1]), ref.num_bytes)
        self._misses_hosts |= bool(lost := self.store.lost([kept]))
        task.finish(None if lost else kept)

    def _take(self, worker: str) -> None:
        """Take a result, or bury a worker that has died and has left none."""
        state = self._workers[worker]
        call = state.calls[0]
        try:
            message: bytes = ray.get(call.reply)
        except ray.exceptions.RayActorError as error:
            self._bury(worker, _cause_of_death(error))
            return
        except ray.exceptions.RayError as error:
            state.calls.popleft()
            call.task.finish(error=self._why_not_run(call, error))
            return
        state.calls.popleft()
        payload, num_made, num_inline, serial, freed, text, self._log_positions[worker] = pickle.loads(message)
        self.bytes_received += len(message) + num_inline
        self._logs.add(worker, text)
        kept = None
        if num_made:
            kept = self.store.keep(call.objects, worker, range(num_made), serial, is_inline=num_inline > 0)
        self.store.free_by_name(freed)
        value, failure = self.store.load(payload, kept)
        if failure is None:
            call.task.finish(value)
        else:
            call.task.finish(error=self._remote_error(call.task, *failure))

    def _remote_error(self, task: Task, error: BaseException, text: str) -> BaseException:
        if isinstance(error, ObjectLost):
            error = self._why_lost(task, error)
        error.__cause__ = RemoteTraceback(f"in worker {task.worker}, task `{task.name}`:\n{text}")
        return error

    def _why_lost(self, task: Task, error: ObjectLost) -> Exception:
        """Tell by the death of its maker why an object is lost, if that is why."""
        maker = error.args[0]
        if not self._has_died(maker):
            return error
        cause = self._causes[maker]
        return WorkerDied(
            f"worker {maker} {cause}, task `{task.name}` on worker {task.worker} needed what it kept.", maker
        )

    def _has_died(self, worker: str) -> bool:
        if worker in self._workers:
            probe = self.submit(worker, "__clock__")
            end_s = time.monotonic() + _DEATH_S
            while not probe.is_done and time.monotonic() < end_s:
                self._receive(_SLICE_S)
        return worker in self._causes

    def _why_not_run(self, call: _Call, error: Exception) -> Exception:
        """Say why Ray did not run a task: most likely an object that it was to read is gone."""
        cause = getattr(error, "cause", error)
        lost = getattr(cause, "object_ref_hex", None)
        for source in call.sources.values():
            if source.ref.hex() == lost:
                self._misses_hosts = True
                self.store.note_missed(source.ref)
                return self._why_lost(call.task, ObjectLost(source.keeper))
        problem = WorkerError(f"{call.task} did not run: {str(error).strip().splitlines()[0]}")
        problem.__cause__ = error
        return problem

    def _bury(self, worker: str, cause: str) -> None:
        state = self._workers.pop(worker)
        ray.kill(state.actor)
        self._causes[worker] = cause
        self._misses_hosts |= cause == _LOST
        if state.where is not None:
            self._add_log(worker, state.where)
        self._logs.end(worker)
        for call in state.calls:
            call.task.finish(error=self._death(call.task))

    def _death(self, task: Task) -> WorkerDied:
        return WorkerDied(
            f"worker {task.worker} {self._causes.get(task.worker, 'is not running')}, task `{task.name}`.", task.worker
        )

    # ---- what a worker cannot say itself -------------------------------------------------------------------

    def _add_log(self, worker: str, where: Whereabouts) -> str:
        """Write what a worker has printed and not sent, if its host can still be asked; returns it."""
        text: str
        try:
            text, self._log_positions[worker] = self._on_host(
                where, read_log, where.log_file, self._log_positions.get(worker, 0)
            )
        except (OSError, ray.exceptions.RayError):
            return ""
        self._logs.add(worker, text)
        return text

    def _dump_stacks(self, worker: str) -> None:
        """Have a stuck worker's stacks printed to its log, and here."""
        state = self._workers.get(worker)
        if state is None or state.where is None:
            return
        with suppress(OSError, ray.exceptions.RayError):
            self._on_host(state.where, ask_for_stacks, state.where.pid)
            time.sleep(_SLICE_S)  # it prints when it gets the signal
        sys.stderr.write(self._add_log(worker, state.where))

    def _on_host(self, where: Whereabouts, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a worker's host, beside the worker.

        Raises:
            RayError: the host does not answer.
        """
        if where.machine == self._machine:
            return function(*args)
        node = NodeAffinitySchedulingStrategy(where.node_id, soft=False)
        remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=node)(function)
        return ray.get(remote.remote(*args), timeout=_HOST_S)


def _cause_of_death(error: ray.exceptions.RayActorError) -> str:
    """Put in a few words what Ray says of an actor's end."""
    text = str(error).strip()
    if getattr(error, "_actor_init_failed", False):
        return f"could not start: {text.splitlines()[-1].strip()}"
    if "node" in text.lower() and ("node has died" in text.lower() or "node died" in text.lower()):
        return _LOST
    if "ray.kill" in text:
        return "was killed"
    return "died, as its process ended"


@cache
def _actor_class() -> Any:
    """Make the class of actors; being local, it travels by value, and so can say where this package is found."""

    class DigenrlWorker:
        def __init__(self, worker: str, path: list[str], folder: str | None, modules: Sequence[str]) -> None:
            if folder is not None:
                os.chdir(folder)
            path = [os.path.join(os.getcwd(), entry) for entry in path]
            sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
            runner = importlib.import_module("digenrl.engines.ray.worker").TaskRunner
            self._run = runner(worker).run
            for name in modules:
                importlib.import_module(name)

        @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
        def run(self, *args: Any) -> Any:
            return self._run(*args)

    return ray.remote(DigenrlWorker)
