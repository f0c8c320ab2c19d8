"""Both engines, where they agree; then processes, what they leave behind, and how their ends are told."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from digenrl.engines import (
    Engine,
    InlineEngine,
    LocalEngine,
    ObjectLost,
    ObjectRef,
    ObjectStore,
    RemoteTraceback,
    WorkerDied,
    WorkerTimeout,
)
from digenrl.engines.fork_server import ForkServer
from tests.leftovers import left_in_shared_memory, names_in_shared_memory

ROOT = Path(__file__).parents[2]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@dataclass(frozen=True)
class Parcel:
    label: str
    tensor: Tensor  # [N]
    inner: dict[str, Any]


class TidyError(Exception):
    """Survives pickling with its attributes."""

    def __init__(self, detail: int) -> None:
        super().__init__(detail)
        self.detail = detail


class StubbornError(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


class Unreadable:
    """Pickles, but raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Bench:
    """A worker with a task for each thing that can happen."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.calls: list[int] = []
        self.refs: list[ObjectRef] = []

    def add(self, left: int, right: int, *, scale: int = 1) -> int:
        return (left + right) * scale

    def note(self, number: int) -> list[int]:
        self.calls.append(number)
        return list(self.calls)

    def fail(self, error: Exception) -> None:
        raise error

    def fail_stubbornly(self) -> None:
        raise StubbornError("no luck", "home")

    def lock(self) -> Any:
        return threading.Lock()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def exit(self, code: int) -> None:
        os._exit(code)

    def commit_suicide(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def pid(self) -> int:
        return os.getpid()

    def fork_a_sleeper(self) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def folder(self) -> str:
        return os.getcwd()

    def num_threads(self) -> int:
        return torch.get_num_threads()

    def num_fds(self) -> int:
        return psutil.Process().num_fds()

    def keep(self, value: Any) -> ObjectRef:
        return self.store.put(value)

    def keep_shapes(self, dtype: torch.dtype) -> ObjectRef:
        return self.store.put(shapes_of(dtype))

    def keep_zeros(self, size: int) -> ObjectRef:
        return self.store.put(torch.zeros(size))

    def read(self, ref: ObjectRef) -> Any:
        return self.store.get(ref)

    def hold(self, ref: ObjectRef) -> None:
        self.held = self.store.get(ref)

    def show_held(self) -> Any:
        return self.held

    def free(self, refs: list[ObjectRef]) -> None:
        self.store.free(refs)

    def length(self, data: bytes) -> int:
        return len(data)

    def blob(self, size: int) -> bytes:
        return b"x" * size


class Stillborn:
    """A worker whose factory fails."""

    def __init__(self, store: ObjectStore) -> None:
        raise OSError("no such weights")


@pytest.fixture(params=[InlineEngine, LocalEngine])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine: Engine = request.param(30.0)
    engine.start("a", Bench)
    yield engine
    engine.shutdown()


@pytest.fixture
def local() -> Iterator[LocalEngine]:
    engine = LocalEngine(30.0)
    engine.start("a", Bench)
    yield engine
    engine.shutdown()


def shapes_of(dtype: torch.dtype) -> list[Tensor]:
    """Make contiguous, strided, transposed, 0-dimensional and empty tensors, the same in every process."""
    rng = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, (3, 4, 16), dtype=torch.uint8, generator=rng).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        tensor = torch.randn(3, 4, 16, generator=rng).to(dtype)
        tensor[1] = float("nan")
    return [tensor, tensor[:, 1:, ::3], tensor.transpose(0, 2), tensor[0, 0, 0], tensor[:0], tensor[:, :0]]


def same_bits(left: Tensor, right: Tensor) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(raw(left), raw(right))


# ---- calls ---------------------------------------------------------------------------------------------------


def test_a_call_gives_what_the_method_returns(engine: Engine) -> None:
    assert engine.call("a", "add", 1, 2) == 3
    assert engine.call("a", "add", 1, right=2, scale=5) == 15


def test_tasks_are_done_in_the_order_in_which_they_were_submitted(engine: Engine) -> None:
    tasks = [engine.submit("a", "note", number) for number in range(20)]
    assert engine.gather(tasks) == [list(range(number + 1)) for number in range(20)]


def test_gather_gives_results_in_the_order_of_its_tasks(engine: Engine) -> None:
    engine.start("b", Bench)
    tasks = [engine.submit("a", "sleep", 0.05), engine.submit("b", "add", 1, 1), engine.submit("a", "add", 2, 2)]
    assert engine.gather(tasks[::-1]) == [4, 2, None]


def test_wait_gives_only_the_tasks_that_are_done(local: LocalEngine) -> None:
    local.start("b", Bench)
    slow, fast = local.submit("a", "sleep", 20), local.submit("b", "add", 1, 1)
    assert local.wait([slow, fast], timeout_s=20) == [fast]
    assert local.wait([slow], timeout_s=0.01) == []
    assert not slow.is_done
    local.kill("a")


def test_a_task_that_is_still_running_has_no_result(local: LocalEngine) -> None:
    task = local.submit("a", "sleep", 0.2)
    with pytest.raises(AssertionError, match="still running"):
        task.result()
    assert str(task) == "`sleep` on worker a"


def test_a_name_is_used_once(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="worker a runs already"):
        engine.start("a", Bench)


# ---- errors --------------------------------------------------------------------------------------------------


def test_an_error_arrives_with_its_type_and_attributes_and_the_worker_goes_on(engine: Engine) -> None:
    with pytest.raises(TidyError) as caught:
        engine.call("a", "fail", TidyError(7))
    assert caught.value.detail == 7
    assert engine.call("a", "add", 1, 1) == 2


def test_the_cause_of_an_error_is_the_traceback_of_the_worker(local: LocalEngine) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        local.call("a", "fail", ZeroDivisionError("by hand"))
    cause = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in worker a, task `fail`" in cause
    assert "raise error" in cause
    assert "test_engines.py" in cause


def test_an_error_that_cannot_be_pickled_arrives_as_text(local: LocalEngine) -> None:
    with pytest.raises(RuntimeError, match="^StubbornError: no luck at home$") as caught:
        local.call("a", "fail_stubbornly")
    assert "fail_stubbornly" in str(caught.value.__cause__)
    assert local.call("a", "add", 1, 1) == 2


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_task(local: LocalEngine) -> None:
    with pytest.raises(TypeError, match="lock"):
        local.call("a", "lock")
    assert local.call("a", "add", 1, 1) == 2


def test_an_argument_that_cannot_be_unpickled_is_an_error_of_the_task(local: LocalEngine) -> None:
    with pytest.raises(ValueError, match="not a number"):
        local.call("a", "add", Unreadable(), 1)
    assert local.call("a", "add", 1, 1) == 2


def test_gather_raises_the_first_failure(engine: Engine) -> None:
    tasks = [engine.submit("a", "add", 1, 1), engine.submit("a", "fail", TidyError(1)), engine.submit("a", "pid")]
    with pytest.raises(TidyError):
        engine.gather(tasks)


def test_an_unknown_method_is_an_error_that_names_it(engine: Engine) -> None:
    with pytest.raises(AttributeError, match="subtract"):
        engine.call("a", "subtract", 1, 2)


def test_an_error_of_the_factory_is_raised_at_the_start_and_leaves_the_name_free(engine: Engine) -> None:
    with pytest.raises(OSError, match="no such weights"):
        engine.start("b", Stillborn)
    engine.start("b", Bench)
    assert engine.call("b", "add", 1, 1) == 2


# ---- ends ----------------------------------------------------------------------------------------------------


def test_a_killed_workers_tasks_fail_with_its_name_the_signal_and_the_task(local: LocalEngine) -> None:
    tasks = [local.submit("a", "commit_suicide"), local.submit("a", "add", 1, 1)]
    for task in tasks:
        with pytest.raises(WorkerDied, match=f"worker a killed by SIGKILL, task `{task.name}`"):
            local.gather([task])
    with pytest.raises(WorkerDied, match="worker a killed by SIGKILL, task `pid`"):
        local.call("a", "pid")


def test_a_worker_that_is_killed_from_outside_in_mid_task_is_reported(local: LocalEngine) -> None:
    pid = local.call("a", "pid")
    task = local.submit("a", "sleep", 60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker a killed by SIGKILL, task `sleep`"):
        local.gather([task])


def test_a_reader_that_misses_what_a_dead_worker_kept_is_told_by_the_death(local: LocalEngine) -> None:
    local.start("b", Bench)
    pid, ref = local.call("a", "pid"), local.call("a", "keep", torch.ones(3))
    death = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([death], [], [])  # it is dead, and the driver does not know yet
    os.close(death)
    with pytest.raises(WorkerDied, match="worker a killed by SIGKILL, task `read` on worker b needed what it kept"):
        local.call("b", "read", ref)


def test_a_reader_of_what_was_freed_is_told_by_the_keeper(local: LocalEngine) -> None:
    local.start("b", Bench)
    ref = local.call("a", "keep", torch.ones(3))
    local.call("a", "free", [ref])
    with pytest.raises(ObjectLost, match="an object that worker a kept is gone"):
        local.call("b", "read", ref)


def test_a_worker_that_is_killed_while_its_own_child_lives_is_reported(local: LocalEngine) -> None:
    # A child, of a data loader for example, inherits the worker's end of the connection.
    child, pid = local.call("a", "fork_a_sleeper"), local.call("a", "pid")
    local.task_timeout_s = 5.0
    task = local.submit("a", "sleep", 60)
    os.kill(pid, signal.SIGKILL)
    try:
        with pytest.raises(WorkerDied, match="worker a killed by SIGKILL, task `sleep`"):
            local.gather([task])
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_worker_that_exits_is_reported_with_its_code(local: LocalEngine) -> None:
    with pytest.raises(WorkerDied, match="worker a exited with code 3, task `exit`"):
        local.call("a", "exit", 3)


def test_the_death_of_one_worker_leaves_the_others_alone(local: LocalEngine) -> None:
    local.start("b", Bench)
    with pytest.raises(WorkerDied):
        local.call("a", "exit", 1)
    assert local.call("b", "add", 1, 1) == 2


def test_the_tasks_of_a_worker_that_was_killed_fail_with_worker_died(engine: Engine) -> None:
    engine.kill("a")
    engine.kill("a")
    with pytest.raises(WorkerDied, match="worker a"):
        engine.call("a", "add", 1, 1)
    engine.start("a", Bench)
    assert engine.call("a", "add", 1, 1) == 2


def test_a_missed_deadline_names_the_worker_the_task_and_the_time(local: LocalEngine) -> None:
    local.task_timeout_s = 0.1
    with pytest.raises(WorkerTimeout, match=r"`sleep` on worker a did not finish within 0\.1 s"):
        local.call("a", "sleep", 60)
    local.kill("a")


def test_a_worker_is_drained_once_it_has_done_everything(local: LocalEngine) -> None:
    tasks = [local.submit("a", "note", number) for number in range(3)]
    local.drain("a", 30.0)
    assert [task.result() for task in tasks] == [[0], [0, 1], [0, 1, 2]]
    assert local.unfinished("a") == []


def test_a_worker_that_is_not_drained_in_time_is_told_with_the_task_it_is_at(local: LocalEngine) -> None:
    local.submit("a", "sleep", 600.0)
    local.submit("a", "note", 1)
    with pytest.raises(WorkerTimeout, match="worker a is still at task `sleep`"):
        local.drain("a", 0.0)


def test_a_worker_that_has_died_has_nothing_to_do(local: LocalEngine) -> None:
    local.submit("a", "commit_suicide")
    local.drain("a", 30.0)
    with pytest.raises(WorkerDied, match="worker a killed by SIGKILL"):
        local.call("a", "note", 1)


def test_workers_ignore_control_c(local: LocalEngine) -> None:
    os.kill(local.call("a", "pid"), signal.SIGINT)
    assert local.call("a", "add", 1, 1) == 2


def test_shutdown_may_be_called_twice(engine: Engine) -> None:
    engine.shutdown()
    engine.shutdown()


def test_shutdown_leaves_no_process_and_nothing_in_shared_memory() -> None:
    before = names_in_shared_memory()
    engine = LocalEngine(30.0)
    for name in "abc":
        engine.start(name, Bench)
    pids = [engine.call(name, "pid") for name in "abc"]
    for name in "abc":
        engine.call(name, "keep", torch.zeros(1000))
    engine.submit("b", "sleep", 0.1)
    with pytest.raises(WorkerDied):
        engine.call("c", "commit_suicide")
    engine.shutdown()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert left_in_shared_memory(before) == []


# ---- objects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive_bit_by_bit(engine: Engine, dtype: torch.dtype) -> None:
    ref = engine.call("a", "keep_shapes", dtype)
    for made, got in zip(shapes_of(dtype), engine.store.get(ref), strict=True):
        assert same_bits(made, got)


def test_a_conjugate_view_arrives_as_the_values_it_shows(engine: Engine) -> None:
    tensor = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    got = engine.store.get(engine.call("a", "keep", tensor))
    assert torch.equal(got, tensor)


def test_nested_objects_keep_their_types_and_other_workers_may_read_them(engine: Engine) -> None:
    engine.start("b", Bench)
    inner = {"list": [torch.arange(3), "text", None], "tuple": (torch.tensor(True), 2.5), "empty": torch.empty(0, 4)}
    ref = engine.call("a", "keep", Parcel("label", torch.randn(5), inner))
    for parcel in (engine.call("b", "read", ref), engine.store.get(ref)):
        assert type(parcel).__name__ == "Parcel"
        assert parcel.label == "label"
        assert parcel.inner["list"][1:] == ["text", None]
        assert torch.equal(parcel.inner["list"][0], torch.arange(3))
        assert parcel.inner["tuple"][0].item() is True
        assert parcel.inner["tuple"][1] == 2.5
        assert parcel.inner["empty"].shape == (0, 4)
    assert ref.worker == "a"


def test_the_driver_keeps_objects_for_the_workers(engine: Engine) -> None:
    value = {"weight": torch.randn(7)}
    ref = engine.store.put(value)
    assert torch.equal(engine.call("a", "read", ref)["weight"], value["weight"])
    engine.store.free([ref])


def test_a_reader_keeps_what_it_has_read_after_it_was_freed(engine: Engine) -> None:
    engine.start("b", Bench)
    value = torch.randn(100_000)
    ref = engine.call("a", "keep", value)
    read = engine.store.get(ref)
    engine.call("b", "hold", ref)
    engine.call("a", "free", [ref])
    engine.call("a", "keep", torch.zeros(100_000))  # takes the memory, if it is free to be taken
    assert torch.equal(read, value)
    assert torch.equal(engine.call("b", "show_held"), value)


def test_what_a_reader_writes_nobody_else_sees(local: LocalEngine) -> None:
    ref = local.call("a", "keep", torch.zeros(10))
    local.store.get(ref).add_(1)
    assert torch.equal(local.store.get(ref), torch.zeros(10))
    assert torch.equal(local.call("a", "read", ref), torch.zeros(10))


def test_the_size_of_an_object_does_not_show_in_what_the_driver_receives(local: LocalEngine) -> None:
    received = []
    for size in (10, 2_000_000):
        before = local.bytes_received
        assert local.call("a", "keep_zeros", size).num_bytes >= 4 * size
        received.append(local.bytes_received - before)
    assert 0 < received[0] < 2000
    assert abs(received[1] - received[0]) < 50


def test_files_stay_few_over_many_objects(local: LocalEngine) -> None:
    def one_round() -> None:
        ref = local.call("a", "keep", [torch.zeros(100), "text"])
        kept = local.store.put(local.store.get(ref))
        local.call("a", "read", kept)
        local.store.free([kept])
        local.call("a", "free", [ref])

    one_round()
    before = (psutil.Process().num_fds(), local.call("a", "num_fds"))
    for _ in range(200):
        one_round()
    assert (psutil.Process().num_fds(), local.call("a", "num_fds")) == before


def test_files_stay_few_over_many_workers(local: LocalEngine) -> None:
    before = psutil.Process().num_fds()
    for _ in range(5):
        local.start("b", Bench)
        local.kill("b")
    assert psutil.Process().num_fds() == before


def test_a_signal_handler_may_call_workers_while_the_driver_waits(local: LocalEngine) -> None:
    answers: list[int] = []
    local.start("b", Bench)
    handler = signal.signal(signal.SIGALRM, lambda *_: answers.append(local.call("b", "add", 1, 1)))
    try:
        slow = local.submit("a", "sleep", 1.0)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        local.gather([slow])
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert answers == [2]
    assert local.call("a", "add", 1, 2) == 3


def test_large_messages_may_cross(local: LocalEngine) -> None:
    size = 20_000_000
    tasks = [local.submit("a", "blob", size), local.submit("a", "length", b"y" * size), local.submit("a", "blob", size)]
    assert [entry if isinstance(entry, int) else len(entry) for entry in local.gather(tasks)] == [size] * 3


# ---- processes -----------------------------------------------------------------------------------------------


def test_a_worker_gets_its_environment_and_nobody_elses(local: LocalEngine) -> None:
    local.start("b", Bench, env={"DIGENRL_TEST": "yes"})
    assert local.call("b", "env", "DIGENRL_TEST") == "yes"
    assert local.call("a", "env", "DIGENRL_TEST") is None
    assert "DIGENRL_TEST" not in os.environ


def test_a_worker_gets_the_environment_and_the_folder_that_the_driver_has_when_it_starts(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DIGENRL_TEST", "later")
    monkeypatch.chdir(tmp_path)
    local.start("b", Bench)
    assert local.call("b", "env", "DIGENRL_TEST") == "later"
    assert local.call("b", "folder") == str(tmp_path)


def test_an_environment_may_be_large(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_TEST", "x" * 300_000)
    local.start("b", Bench)
    assert local.call("b", "env", "DIGENRL_TEST") == "x" * 300_000
    assert local.call("a", "add", 1, 1) == 2


def test_a_variable_that_the_driver_has_deleted_is_gone_in_later_workers(local: LocalEngine) -> None:
    # The fork server always has a PYTHONPATH of its own.
    local.start("b", Bench)
    assert local.call("b", "env", "PYTHONPATH") == os.environ.get("PYTHONPATH")


def test_workers_compute_in_one_thread_unless_told_otherwise(local: LocalEngine) -> None:
    local.start("b", Bench, env={"OMP_NUM_THREADS": "3"})
    assert local.call("a", "num_threads") == int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert local.call("b", "num_threads") == 3


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run a script that defines its worker, has no `if __name__ == "__main__"`, and is killed in mid-task."""
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(
        "print('body', flush=True)\n"
        "import os, signal, time\n"
        "import psutil\n"
        "from digenrl.engines import LocalEngine\n"
        "class Mine:\n"
        "    def __init__(self, store): self.base = 40\n"
        "    def add(self, number): return self.base + number\n"
        "    def sleep(self): time.sleep(60)\n"
        "engine = LocalEngine(60)\n"
        "engine.start('idle', Mine)\n"
        "engine.start('busy', Mine)\n"
        "print(engine.call('idle', 'add', 2), flush=True)\n"
        "engine.submit('busy', 'sleep')\n"
        "print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=120)


def test_a_script_without_a_main_guard_runs_once(script: subprocess.CompletedProcess[str]) -> None:
    assert script.returncode == -signal.SIGKILL, script.stderr
    assert script.stdout.split("\n")[:2] == ["body", "42"]
    assert script.stdout.count("body") == 1


def test_starting_workers_prints_nothing(script: subprocess.CompletedProcess[str]) -> None:
    assert script.stderr == ""


def test_nothing_outlives_a_driver_that_is_killed(script: subprocess.CompletedProcess[str]) -> None:
    pids = [int(pid) for pid in script.stdout.split("\n")[2].split()]
    assert len(pids) == 3  # the fork server and two workers
    end_s = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


def test_a_driver_ends_although_a_child_of_its_own_lives_on() -> None:
    # The child, of a data loader for example, has copies of all that the driver had open.
    script = (
        "import multiprocessing, time\n"
        "from digenrl.engines import LocalEngine\n"
        "class Mine:\n"
        "    def __init__(self, store): pass\n"
        "engine = LocalEngine(60)\n"
        "engine.start('a', Mine)\n"
        "context = multiprocessing.get_context('fork')\n"
        "context.Process(target=time.sleep, args=(600,), daemon=True).start()\n"
        "engine.shutdown()\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)  # the child is ended last


def test_workers_that_die_with_their_fork_server_are_reported_and_harm_no_later_ones(local: LocalEngine) -> None:
    bystander, later = LocalEngine(30.0), LocalEngine(30.0)
    bystander.start("b", Bench)
    task = local.submit("a", "sleep", 60)
    psutil.Process(bystander.call("b", "pid")).parent().kill()
    with pytest.raises(WorkerDied, match="worker a .*task `sleep`"):
        local.gather([task])
    later.start("c", Bench)  # starts another server
    with pytest.raises(WorkerDied, match="worker b .*task `add`"):
        bystander.call("b", "add", 1, 1)
    assert later.call("c", "add", 1, 1) == 2
    bystander.shutdown()
    later.shutdown()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a container may have nobody to reap it
    except psutil.NoSuchProcess:
        return False


def test_an_answer_that_ctrl_c_kept_from_its_reader_is_not_taken_for_the_next_one() -> None:
    server = ForkServer()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server._socket, server._num_requests = ours, 1
        theirs.send(pickle.dumps((1, "a process id")))
        theirs.send(pickle.dumps((2, "an exit code")))
        assert server._request(("reap", 0), []) == "an exit code"


def test_a_worker_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a main guard that is imported there would begin the run again, and again."""
    monkeypatch.setenv("DIGENRL_WORKER", "generator-0")
    with pytest.raises(RuntimeError, match="worker generator-0 would start workers of its own"):
        LocalEngine()
