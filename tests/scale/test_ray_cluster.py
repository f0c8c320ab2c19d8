"""Three hosts of a Ray cluster, as three nodes of this machine: generators on two, trainers on the third."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.engines import Requirements, WorkerDied, WorkerError
from digenrl.engines.ray import RayEngine, placement
from digenrl.engines.ray import cluster as connection
from digenrl.engines.ray.placement import Placement
from digenrl.strategies.step_book import StepBook
from tests.engines.ray_rig import Rig
from tests.integration.toy_runs import fit, relative_difference

RESOURCES: dict[str, Any] = {"generator_resources": {"making": 1}, "trainer_resources": {"training": 1}}
TRAINERS = {"generator": {"making": 1.0}, "trainer": {"training": 1.0}}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"training": 2}})
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"making": 2})
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def needs(num_generators: int, num_trainers: int) -> dict[str, Requirements]:
    generators = {f"generator-{index}": "generator" for index in range(num_generators)}
    trainers = {f"trainer-{index}": "trainer" for index in range(num_trainers)}
    return {worker: Requirements(role, resources=TRAINERS[role]) for worker, role in {**generators, **trainers}.items()}


def test_a_run_on_three_hosts_has_the_weights_of_the_local_engine(cluster: Cluster, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "default_root_dir": str(tmp_path)}
    shape: dict[str, Any] = {"generators": 2, "trainers": 2, "trainer_assist": "off"}
    _, _, local = fit(DisaggregatedStrategy(engine="local", **shape), **settings)
    strategy = DisaggregatedStrategy(engine="auto", ray_address=cluster.address, **RESOURCES, **shape)
    _, _, on_ray = fit(strategy, **settings)
    assert relative_difference(on_ray, local) <= 1e-6  # two micro-batches are summed in the order of the clock
    assert not ray.is_initialized()
    assert cluster.connect() is None  # it runs on


def test_roles_are_on_hosts_that_have_what_they_need_and_survive_the_loss_of_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    engine = RayEngine(170.0, address=cluster.address, log_folder=tmp_path / "logs", placement_timeout_s=60.0)
    engine.reserve(needs(2, 2))
    for worker in needs(2, 2):
        engine.start(worker, Rig)
    nodes = {worker: engine.call(worker, "node") for worker in needs(2, 2)}
    making = {node["NodeID"] for node in ray.nodes() if "making" in node["Resources"]}
    assert {nodes["generator-0"], nodes["generator-1"]} == making
    assert nodes["trainer-0"] == nodes["trainer-1"] not in making

    refs = {worker: engine.call(worker, "keep", torch.arange(50_000)) for worker in ("generator-0", "generator-1")}
    for ref in refs.values():  # between hosts, past the driver
        assert torch.equal(engine.call("trainer-0", "read", ref), torch.arange(50_000))
    refs["unread"] = engine.call("generator-1", "keep", torch.arange(50_000))
    task = engine.submit("generator-1", "sleep", 600)
    lost = next(node for node in cluster.worker_nodes if node.node_id == nodes["generator-1"])
    cluster.remove_node(lost, allow_graceful=False)
    with pytest.raises(WorkerDied, match="worker generator-1 .*task `sleep`") as caught:
        engine.gather([task])
    assert caught.value.worker == "generator-1"
    with pytest.raises(WorkerDied, match="worker generator-1 .*needed what it kept") as caught:
        engine.call("trainer-1", "read", refs["unread"])
    assert caught.value.worker == "generator-1"
    assert torch.equal(engine.call("trainer-1", "read", refs["generator-0"]), torch.arange(50_000))

    engine.start("generator-1", Rig)  # where there is still room
    assert engine.call("generator-1", "node") == nodes["generator-0"]
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    with pytest.raises(WorkerDied, match="worker generator-0"):
        engine.gather([engine.submit("generator-0", "sleep", 600)])
    engine._placement._timeout_s = 1.0
    with pytest.raises(WorkerError, match=r"worker generator-0 could not be placed .* within 1 s"):
        engine.start("generator-0", Rig)
    engine.shutdown()


def test_what_no_host_has_is_said_with_what_the_cluster_has(cluster: Cluster) -> None:
    engine = RayEngine(170.0, address=cluster.address)
    with pytest.raises(ValueError, match=r"3 trainers need training 3 together, .* CPU 3, making 4, training 2\.$"):
        engine.reserve(needs(0, 3))
    with pytest.raises(ValueError, match=r"the generators need making 3 on one host each, .* making 4"):
        engine.reserve({"generator-0": Requirements("generator", resources={"making": 3})})
    together = {f"rank-{rank}": Requirements("generator", 0, {"making": 1}, "generator-0") for rank in range(3)}
    with pytest.raises(ValueError, match=r"the generators need making 3 on one host each"):
        engine.reserve(together)
    engine.shutdown()
    with pytest.raises(ValueError, match="`num_nodes` is 9, but the Ray cluster has 1 hosts"):
        RayEngine(170.0, address=cluster.address, num_hosts=9)


def test_resources_that_others_use_are_waited_for_and_named(cluster: Cluster) -> None:
    first = RayEngine(170.0, address=cluster.address)
    first.reserve(needs(0, 2))
    second = RayEngine(170.0, address=cluster.address, placement_timeout_s=0.5)
    with pytest.raises(WorkerError, match=r"the trainers could not be placed on the cluster within 0\.5 s"):
        second.reserve(needs(0, 1))
    first.shutdown()
    second.shutdown()
    third = RayEngine(170.0, address=cluster.address, placement_timeout_s=60.0)
    third.reserve(needs(0, 2))
    third.shutdown()


def test_a_run_holds_no_part_of_what_it_needs_while_the_rest_is_not_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two runs that start at the same time would wait for each other."""
    caplog.set_level("INFO", "digenrl")
    monkeypatch.setattr(placement, "_HOLD_S", 1.0)
    ray.init(cluster.address, log_to_driver=False)
    trains = ray.util.placement_group([{"training": 2}])
    ray.get(trains.ready())
    run = Placement(120.0)
    with ThreadPoolExecutor(1) as thread:
        reserved = thread.submit(run.reserve, needs(4, 2))
        while [entry["state"] for entry in placement_group_table().values()].count("CREATED") < 2:  # trains, generators
            time.sleep(0.02)
        rival = ray.util.placement_group([{"making": 2}] * 2)  # all of it, so that the run may have none
        assert rival.wait(60)
        assert not reserved.done()
        ray.util.remove_placement_group(trains)
        ray.util.remove_placement_group(rival)
        assert len(reserved.result(60)) == 6
    assert "wait for resources that others use" in caplog.text
    run.release()


def test_other_hosts_get_the_working_directory_and_the_environment(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def word():\n    return 'shipped'\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "big.ckpt").write_bytes(b"0" * 100)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "inner.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setenv("DIGENRL_TEST", "yes")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(connection, "is_one_host", lambda: False)  # as if the nodes were on other machines
    engine = RayEngine(170.0, address=cluster.address)
    engine.start("a", Rig, env={"OMP_NUM_THREADS": "2"})
    folder = Path(engine.call("a", "folder"))
    assert folder != tmp_path
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["lib", "mine.py"]
    assert engine.call("a", "import_and_call", "mine", "word") == "shipped"
    assert engine.call("a", "imports_from", "inner") == str(folder / "lib" / "inner.py")
    assert engine.call("a", "env", "DIGENRL_TEST") == "yes"
    assert engine.call("a", "env", "SLURM_JOB_ID") is None
    assert engine.call("a", "num_threads") == 2
    engine.shutdown()


def test_a_runtime_env_of_the_users_own_is_passed_on(cluster: Cluster, tmp_path: Path) -> None:
    runtime_env = {"env_vars": {"DIGENRL_TEST": "by hand", "PYTHONPATH": os.pathsep.join([str(Path.cwd())])}}
    engine = RayEngine(170.0, address=cluster.address, runtime_env=runtime_env)
    engine.start("a", Rig)
    assert engine.call("a", "env", "DIGENRL_TEST") == "by hand"
    engine.shutdown()


# ---- hosts that are lost in the middle of a run ---------------------------------------------------------------


@pytest.fixture
def pairs() -> Iterator[Cluster]:
    """A host for the driver alone, and two with room for a generator and a trainer each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"making": 1, "training": 1})
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@cache
def undisturbed(**settings: Any) -> dict[str, Tensor]:
    strategy = DisaggregatedStrategy(engine="local", generators=2, trainers=1, trainer_assist="off", **settings)
    return fit(strategy, max_steps=4)[2]


def run_that_loses_the_host_of(
    worker: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Four steps; the host goes when the third one's first micro-batch is whole, and not trained yet."""
    shape: dict[str, Any] = {"generators": 2, "trainers": 1, "trainer_assist": "off", **RESOURCES}
    strategy = DisaggregatedStrategy(
        **{"engine": "ray", "ray_address": cluster.address, "max_restarts": 3, **shape, **settings}
    )
    undisturbed()
    compare, has_gone = StepBook.compare, False

    def compare_and_lose(book: StepBook, *args: Any) -> None:
        nonlocal has_gone
        compare(book, *args)
        if book.plan.prompts.step == 2 and not has_gone:
            has_gone = True
            engine = strategy.pool.engine
            assert isinstance(engine, RayEngine)
            node_id = engine._where(worker).node_id
            lost = next(node for node in cluster.worker_nodes if node.node_id == node_id)
            cluster.remove_node(lost, allow_graceful=False)

    monkeypatch.setattr(StepBook, "compare", compare_and_lose)
    trainer, _, weights = fit(strategy, max_steps=4)
    assert has_gone
    return trainer, weights


def test_a_run_goes_on_when_the_host_of_a_generator_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, weights = run_that_loses_the_host_of("generator-1", cluster, monkeypatch)
    assert relative_difference(weights, undisturbed()) <= 1e-6
    assert trainer.callback_metrics["restarts"] == 1
    assert "slices were lost with their host, and are made again" in caplog.text


def test_a_generator_that_has_no_room_any_more_is_gone_without(
    pairs: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = {"weight_plane": "object_store", "trainer_resources": {"CPU": 1}}
    monkeypatch.setattr("digenrl.engines.ray.placement._MOVE_S", 2.0)
    trainer, weights = run_that_loses_the_host_of("generator-1", pairs, monkeypatch, **strategy)
    assert relative_difference(weights, undisturbed()) <= 1e-6
    assert trainer.callback_metrics["restarts"] == 1
    assert "worker generator-1 could not be placed on the cluster within 2 s" in caplog.text
    assert "The run goes on without generator-1, with generator-0." in caplog.text


def test_a_run_goes_on_when_the_host_of_the_trainers_is_lost(
    pairs: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pairs.add_node(num_cpus=1, resources={"making": 1})
    pairs.wait_for_nodes()
    trainer, weights = run_that_loses_the_host_of("trainer-0", pairs, monkeypatch, snapshot="every_2")
    assert relative_difference(weights, undisturbed()) <= 1e-6
    assert trainer.callback_metrics["restarts"] >= 1
