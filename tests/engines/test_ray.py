"""Workers on Ray: what they have in common with local ones, and where their objects live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
import ray
import torch
from ray._private.internal_api import memory_summary

from digenrl import DisaggregatedStrategy
from digenrl.engines import ObjectLost, RemoteTraceback, Requirements, WorkerDied, WorkerTimeout
from digenrl.engines.ray import RayEngine
from digenrl.engines.ray import cluster as connection
from digenrl.engines.ray.cluster import check_address
from digenrl.engines.ray.placement import check_amounts, check_resources
from tests.engines.ray_rig import Rig
from tests.engines.test_engines import (
    DTYPES,
    ROOT,
    Parcel,
    Stillborn,
    TidyError,
    Unreadable,
    same_bits,
    shapes_of,
)
from tests.integration.toy_runs import fit, largest_difference


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "logs"


@pytest.fixture(scope="module")
def shared(logs: Path) -> Iterator[RayEngine]:
    """One engine, and so one Ray, for all tests of this file: it takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        handler = signal.getsignal(signal.SIGTERM)
        engine = RayEngine(60.0, log_folder=logs)
        assert signal.getsignal(signal.SIGTERM) is handler, "Ray's own handler was left in place"
        engine.start("a", Rig, env={"DIGENRL_TEST": "yes"})
        engine.start("b", Rig)
        yield engine
        engine.shutdown()


@pytest.fixture
def engine(shared: RayEngine) -> Iterator[RayEngine]:
    yield shared
    shared.task_timeout_s = 60.0
    for worker in "ab":  # a test may have ended it
        if worker not in shared._workers:
            shared.start(worker, Rig)


def num_stored() -> int:
    """How many objects Ray's store of this host has."""
    address = ray.get_runtime_context().gcs_address
    summary: str = memory_summary(address, stats_only=True)
    line = next(line for line in summary.splitlines() if line.startswith("Plasma memory usage"))
    return int(line.split(",")[1].split()[0])


def becomes(read: Callable[[], Any], wanted: Any, patience_s: float = 30.0) -> bool:
    """Ray frees in the background."""
    end_s = time.monotonic() + patience_s
    while read() != wanted and time.monotonic() < end_s:
        time.sleep(0.05)
    return bool(read() == wanted)


# ---- calls and errors ----------------------------------------------------------------------------------------


def test_calls_are_done_in_order_and_give_what_the_method_returns(engine: RayEngine) -> None:
    assert engine.call("a", "add", 1, right=2, scale=5) == 15
    tasks = [engine.submit("b", "note", number) for number in range(20)]
    assert engine.gather(tasks) == [list(range(number + 1)) for number in range(20)]


def test_a_worker_that_is_busy_does_not_hold_up_another(engine: RayEngine) -> None:
    slow, fast = engine.submit("a", "sleep", 2.0), engine.submit("b", "add", 1, 1)
    assert engine.wait([slow, fast], timeout_s=60) == [fast]
    assert engine.wait([slow], timeout_s=0.01) == []
    assert engine.unfinished("a") == [slow]
    engine.drain("a", 60.0)
    assert slow.result() is None


def test_an_error_arrives_as_it_was_raised_and_the_worker_goes_on(engine: RayEngine) -> None:
    with pytest.raises(TidyError) as caught:
        engine.call("a", "fail", TidyError(7))
    assert caught.value.detail == 7
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in worker a, task `fail`" in str(caught.value.__cause__)
    assert "test_engines.py" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="^StubbornError: no luck at home$"):
        engine.call("a", "fail_stubbornly")
    with pytest.raises(TypeError, match="lock"):
        engine.call("a", "lock")
    with pytest.raises(ValueError, match="not a number"):
        engine.call("a", "add", Unreadable(), 1)
    with pytest.raises(AttributeError, match="subtract"):
        engine.call("a", "subtract", 1, 2)
    assert engine.call("a", "add", 1, 1) == 2


def test_large_messages_may_cross(engine: RayEngine) -> None:
    size = 5_000_000
    tasks = [engine.submit("a", "blob", size), engine.submit("a", "length", b"y" * size)]
    assert [entry if isinstance(entry, int) else len(entry) for entry in engine.gather(tasks)] == [size] * 2


# ---- objects -------------------------------------------------------------------------------------------------


def test_tensors_of_every_dtype_arrive_bit_by_bit(engine: RayEngine) -> None:
    for dtype in DTYPES:
        ref = engine.call("a", "keep_shapes", dtype)
        for copy in (ref, engine.call("b", "copy", ref), engine.call("a", "copy", ref)):
            got = engine.store.get(copy)
            assert all(same_bits(left, right) for left, right in zip(shapes_of(dtype), got, strict=True))
        assert ref.worker == "a"


def test_objects_of_one_task_are_read_and_freed_one_by_one(engine: RayEngine) -> None:
    inner = {"list": [torch.arange(3), "text"], "empty": torch.empty(0, 4)}
    first, second = engine.call("a", "keep_two", Parcel("label", torch.randn(5), inner), torch.ones(4))
    engine.call("a", "free", [second])
    for parcel in (engine.call("b", "read", first), engine.store.get(first)):
        assert parcel.label == "label"
        assert torch.equal(parcel.inner["list"][0], torch.arange(3))
        assert parcel.inner["empty"].shape == (0, 4)
    engine.call("a", "free", [first])
    with pytest.raises(ObjectLost, match="an object that worker a kept is gone"):
        engine.call("b", "read", first)
    with pytest.raises(ObjectLost, match="worker a"):
        engine.store.get(first)


def test_a_task_reads_and_frees_what_it_has_put_itself(engine: RayEngine) -> None:
    assert torch.equal(engine.call("a", "keep_and_read", torch.arange(4)), torch.arange(4))


def test_a_worker_frees_what_a_task_before_has_put(engine: RayEngine) -> None:
    ref = engine.call("a", "keep_here", torch.arange(4))
    assert torch.equal(engine.call("b", "read", ref), torch.arange(4))
    engine.call("a", "free_what_is_here")
    with pytest.raises(ObjectLost, match="worker a"):
        engine.call("b", "read", ref)


def test_a_reference_may_go_through_workers(engine: RayEngine) -> None:
    ref = engine.call("b", "pass_on", engine.call("a", "keep", torch.arange(3)))
    assert ref.worker == "a"
    engine.call("b", "remember", ref)
    assert torch.equal(engine.call("b", "read_remembered"), torch.arange(3))
    engine.call("b", "remember", None)


def test_the_driver_keeps_objects_for_the_workers(engine: RayEngine) -> None:
    ref = engine.store.put({"weight": torch.arange(7.0)})
    assert torch.equal(engine.call("a", "read", ref)["weight"], torch.arange(7.0))
    engine.store.free([ref])


def test_tiny_objects_travel_with_replies_and_outlive_their_makers(engine: RayEngine) -> None:
    assert becomes(num_stored, 0)
    before = engine.bytes_received
    refs = [engine.call("a", "keep_zeros", 10) for _ in range(3)]
    assert sum(ref.num_bytes for ref in refs) < engine.bytes_received - before < 3 * 1500
    adopted = engine.adopt(refs[1])
    assert engine.call("a", "read", refs[0]).shape == (10,), "its maker reads it, too"
    engine.start("maker", Rig)
    kept = engine.call("maker", "keep_zeros", 5)
    engine.kill("maker")
    assert engine.lost([*refs, adopted, kept]) == []
    assert engine.copy(kept) is None  # it is here
    assert engine.call("b", "read", kept).shape == (5,)
    engine.call("b", "hold", refs[2])
    engine.free([*refs, kept])
    assert engine.call("b", "show_held").shape == (10,)
    assert engine.call("b", "read", adopted).shape == (10,)
    engine.free([adopted])
    engine.call("b", "let_go")
    with pytest.raises(ObjectLost):
        engine.call("b", "read", refs[0])
    assert num_stored() == 0


@pytest.mark.parametrize("size", [300, 100_000])
def test_objects_are_in_the_store_until_they_are_freed(engine: RayEngine, size: int) -> None:
    assert becomes(num_stored, 0)
    before = engine.bytes_received
    refs = [engine.call("a", "keep_zeros", size) for _ in range(3)]
    assert 0 < engine.bytes_received - before < 3 * 500  # those of a kilobyte, too, stay off the driver
    assert num_stored() == 3
    engine.call("b", "hold", refs[0])
    engine.call("a", "free", refs)
    assert becomes(num_stored, 1)  # what a reader has, it keeps
    assert engine.call("b", "show_held").shape == (size,)
    engine.call("b", "let_go")
    assert becomes(num_stored, 0)


def test_a_task_that_fails_leaves_nothing_in_the_store(engine: RayEngine) -> None:
    assert becomes(num_stored, 0)
    with pytest.raises(TidyError):
        engine.call("a", "keep_and_fail")
    assert num_stored() == 0


# ---- ends ----------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_in_a_task_is_reported_and_what_it_made_lives_on(engine: RayEngine) -> None:
    kept, adopted = engine.call("a", "keep_two", torch.arange(3), torch.arange(4))
    adopted = engine.adopt(adopted)
    tasks = [engine.submit("a", "commit_suicide"), engine.submit("a", "add", 1, 1)]
    for task in tasks:
        with pytest.raises(WorkerDied, match=f"worker a died, as its process ended, task `{task.name}`") as caught:
            engine.gather([task])
        assert caught.value.worker == "a"
    with pytest.raises(WorkerDied, match="worker a died"):
        engine.call("a", "pid")
    assert torch.equal(engine.call("b", "read", kept), torch.arange(3))
    engine.start("a", Rig)
    assert engine.call("a", "note", 1) == [1]  # a new one
    engine.call("a", "free", [kept])  # by its name, as the new worker has the old one's
    assert adopted.worker == "driver"
    assert torch.equal(engine.call("a", "read", adopted), torch.arange(4))
    engine.store.free([adopted])
    with pytest.raises(ObjectLost):
        engine.adopt(adopted)


def test_a_worker_that_is_killed_leaves_its_name_free(engine: RayEngine) -> None:
    task = engine.submit("b", "sleep", 600)
    engine.kill("b")
    engine.kill("b")
    with pytest.raises(WorkerDied, match="worker b was killed, task `sleep`"):
        task.result()
    with pytest.raises(AssertionError, match="worker a runs already"):
        engine.start("a", Rig)
    with pytest.raises(OSError, match="no such weights"):
        engine.start("b", Stillborn)


def test_a_missed_deadline_names_the_task_and_shows_where_it_hangs(engine: RayEngine, logs: Path) -> None:
    engine.task_timeout_s = 0.1
    with pytest.raises(WorkerTimeout, match=r"`sleep` on worker b did not finish within 0\.1 s"):
        engine.call("b", "sleep", 600)
    assert "in sleep" in (logs / "b.log").read_text()
    engine.kill("b")


# ---- surroundings --------------------------------------------------------------------------------------------


def test_workers_are_on_this_host_in_its_folder_with_its_environment(engine: RayEngine) -> None:
    assert engine.host("a") == engine.host("b") == "localhost"
    assert engine.clock_offset_s("a") == 0.0
    assert engine.call("b", "folder") == os.getcwd()
    assert engine.call("b", "env", "DIGENRL_TEST") is None
    assert engine.call("b", "env", "PATH") == os.environ["PATH"]
    assert engine.call("b", "num_threads") == int(os.environ.get("OMP_NUM_THREADS", "1"))


def test_what_workers_print_is_in_the_folder_of_the_run_with_their_names(engine: RayEngine, logs: Path) -> None:
    engine.call("a", "print_lines", "first", "second")
    engine.call("b", "print_natively", "native")
    assert (logs / "a.log").read_text().splitlines()[-2:] == ["[a] first", "[a] second"]
    assert "[b] native" in (logs / "b.log").read_text().splitlines()


def test_what_the_cluster_lacks_is_said_before_a_worker_starts(engine: RayEngine) -> None:
    with pytest.raises(ValueError, match=r"the generators need wings 1 on one host .* in all it has CPU \d+;"):
        engine.reserve({"c": Requirements("generator", resources={"wings": 1})})
    with pytest.raises(WorkerDied, match="worker c is not running"):
        engine.call("c", "pid")


def test_resources_must_fit_one_by_one_and_together() -> None:
    hosts = [{"CPU": 8.0, "GPU": 2.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0, "node:10.0.0.2": 1.0}]
    check_resources({"trainer": [{"GPU": 2.0}, {"GPU": 2.0}], "generator": [{}]}, hosts)
    with pytest.raises(ValueError, match=r"trainers need GPU 4 on one host each, .* in all it has CPU 16, GPU 4; see"):
        check_resources({"trainer": [{"GPU": 4.0}]}, hosts)
    with pytest.raises(ValueError, match=r"^3 generators, 2 trainers need GPU 5 together, .* only CPU 16, GPU 4\.$"):
        check_resources({"generator": [{"GPU": 1.0}] * 3, "trainer": [{"GPU": 1.0}] * 2}, hosts)


def test_hosts_may_have_enough_together_and_no_room() -> None:
    hosts = [{"CPU": 8.0, "GPU": 6.0}, {"CPU": 8.0, "GPU": 6.0}]
    said = r"^3 generators need GPU 4 on one host each, .* have room for 2 of them: in all it has CPU 16, GPU 12\.$"
    with pytest.raises(ValueError, match=said):
        check_resources({"generator": [{"GPU": 4.0}] * 3}, hosts)
    check_resources({"generator": [{"GPU": 4.0}] * 2, "trainer": [{"GPU": 2.0}] * 2}, hosts)
    check_resources({"generator": [{"GPU": 0.1}] * 120}, hosts)


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), 1.5])
def test_an_amount_that_ray_does_not_take_is_refused(amount: float) -> None:
    with pytest.raises(ValueError, match=f"`trainer_resources` asks for big {amount:g}: .* at least 0"):
        check_amounts("trainer", {"CPU": 0, "GPU": 0.5, "big": amount})
    check_amounts("trainer", {"CPU": 0, "GPU": 0.5, "big": 2})


def test_an_address_at_which_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no Ray cluster answers at `ray_address` 127\.0\.0\.1:9: Connection refused"):
        check_address("127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ValueError, match=r"no Ray cluster answers at RAY_ADDRESS 127\.0\.0\.1:9: Connection refused"):
        check_address("127.0.0.1:9")
    with pytest.raises(ValueError, match="`ray_address` is empty"):
        RayEngine(60.0, address="")
    with pytest.raises(ValueError, match=r"`ray_address` ray://head:10001 is that of Ray Client"):
        check_address("ray://head:10001")


def test_a_cluster_that_wants_its_token_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, call: Any) -> Any:
            def answer(request: bytes, context: Any) -> bytes:
                if dict(call.invocation_metadata).get("authorization") != "Bearer right":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), interceptors=[Guard()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for token in ([], [("authorization", "Bearer wrong")]):
        monkeypatch.setattr(connection, "_token", lambda token=token: token)
        with pytest.raises(ValueError, match=f"cluster at `ray_address` {address} lets in only who has its token: set"):
            check_address(address)
    monkeypatch.setattr(connection, "_token", lambda: [("authorization", "Bearer right")])
    check_address(address)
    server.stop(None)


def test_the_address_of_another_cluster_is_refused_where_there_is_a_connection(engine: RayEngine) -> None:
    connected = ray.get_runtime_context().gcs_address
    RayEngine(60.0, address=connected).shutdown()
    RayEngine(60.0, address="auto").shutdown()
    with pytest.raises(ValueError, match=f"`ray_address` is 10.0.0.9:6379, .* connected to Ray at {connected} already"):
        RayEngine(60.0, address="10.0.0.9:6379")
    assert engine.call("a", "add", 1, 1) == 2


def test_ray_is_imported_only_by_its_engine_and_says_how_to_install_it() -> None:
    script = (
        "import sys\n"
        "import digenrl.engines, digenrl.strategies\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None\n"
        "digenrl.engines.RayEngine\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: engine `ray` needs the package ray; install it with `pip install 'digenrl[ray]'`."
    )


# ---- runs ----------------------------------------------------------------------------------------------------


def test_a_run_has_the_weights_of_the_local_engine(shared: RayEngine, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "default_root_dir": str(tmp_path)}
    options: dict[str, Any] = {"trainer_assist": "off"}
    _, _, local = fit(DisaggregatedStrategy(engine="local", **options), **settings)
    _, _, on_ray = fit(DisaggregatedStrategy(engine="ray", **options), **settings)
    assert largest_difference(on_ray, local) == 0.0
    assert shared.call("a", "add", 1, 1) == 2  # the run has ended, and Ray has not
