"""This process's connection to Ray: to a cluster that runs, or to one of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray

log = logging.getLogger(__name__)

_ANSWER_S = 5.0  # in which somebody must answer at an address; Ray itself tries for two minutes
_HOST_AND_PORT = r"(.+):(\d+)"
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in the driver of a submitted job

_OWN_CLUSTER = {
    "RAY_worker_niceness": "0",  # workers do the work; Ray lets all else go first
    # What Ray keeps for its dashboard, which such a cluster has not, is a tenth of what a task costs.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_enable_timeline": "0",
    "RAY_enable_metrics_collection": "0",
}
"""Environment of a cluster that this process starts; what is set already stays."""

NOT_SHIPPED = [
    ".git", ".venv*", "venv", "runs", "lightning_logs", "wandb", "__pycache__", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", "*.ckpt", "*.safetensors", "*.pt", "*.pth", "*.bin",
]  # fmt: skip
"""What of the working directory stays where it is, beside what its .gitignore names."""


class Cluster:
    """Ray, as this process is connected to it.

    Several may be open at a time; the last one that is closed disconnects, and ends what the first one started. A
    connection that was there before stays.
    """

    _num_open = 0
    _is_ours = False

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None) -> None:
        """Connect to a cluster.

        Args:
            address: as `ray.init` takes it; None is that of `RAY_ADDRESS`, or starts one on this host.
            runtime_env: what to ship to its workers; None is the working directory, where other hosts need it.

        Raises:
            ValueError: there is no cluster, or it does not take this process.
        """
        if address == "":
            raise ValueError("`ray_address` is empty: name a cluster, or leave it away to start one on this host.")
        if not ray.is_initialized():
            connect(address or os.environ.get("RAY_ADDRESS") or "local", runtime_env)
            Cluster._is_ours = True
        elif runtime_env is not None and not Cluster._num_open:
            raise ValueError(
                "`ray_runtime_env` was given, but this process is connected to Ray already: give it to that `ray.init`."
            )
        else:
            check_connection(address)
        Cluster._num_open += 1
        self._is_open = True
        self.is_one_host = is_one_host()

    def close(self) -> None:
        """Disconnect if this was the last user; safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        Cluster._num_open -= 1
        if Cluster._is_ours and not Cluster._num_open:
            Cluster._is_ours = False
            if ray.is_initialized():  # it ends itself at exit
                ray.shutdown()


def check_connection(address: str | None) -> None:
    """Check that an address is the one to which this process is connected.

    Raises:
        ValueError: it is that of another cluster.
    """
    connected: str = ray.get_runtime_context().gcs_address
    match = re.fullmatch(_HOST_AND_PORT, address or "")
    if match is None or address == connected:
        return
    host, port = connected.rsplit(":", 1)
    if match[2] != port or socket.gethostbyname(match[1]) not in (socket.gethostbyname(host), "127.0.0.1"):
        raise ValueError(f"`ray_address` is {address}, but this process is connected to Ray at {connected} already.")


def connect(address: str, runtime_env: Mapping[str, Any] | None) -> None:
    """Connect this process; a cluster on several hosts gets the working directory, if nothing else was said."""
    check_address(address)
    _init(address, runtime_env)
    if runtime_env is None and not is_one_host() and not _job_ships_folder():
        ray.shutdown()  # what is to be shipped must be said on connecting
        _init(address, {"working_dir": os.getcwd(), "excludes": NOT_SHIPPED})


def check_address(address: str) -> None:
    """Check that somebody answers at an address.

    Raises:
        ValueError: nobody does, or only a proxy for clients, or it wants a token.
    """
    if address.startswith("ray://"):
        raise ValueError(
            f"{_named(address)} is that of Ray Client, whose driver is outside of the cluster: run on the "
            "cluster, with `ray job submit` for example."
        )
    match = re.fullmatch(_HOST_AND_PORT, address)
    if match is None:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), _ANSWER_S).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster answers at {_named(address)}: {error.strerror or error}.") from error
    if not takes_token(address):
        raise ValueError(
            f"the Ray cluster at {_named(address)} lets in only who has its token: set RAY_AUTH_MODE=token, and put "
            "its token into ~/.ray/auth_token or RAY_AUTH_TOKEN."
        )


def takes_token(address: str) -> bool:
    """Whether a cluster lets in who comes with what this process would show; Ray itself asks for 20 seconds.

    Only a refusal counts: what else may be wrong at this address Ray says on connecting.
    """
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=_ANSWER_S, metadata=_token())
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.UNAUTHENTICATED)
    return True


def _token() -> list[tuple[str, str]]:
    """Give the header with the token that Ray would send, if it sends one."""
    try:
        from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    except ImportError:  # a version before there were tokens
        return []
    return [(name.lower(), value) for name, value in get_auth_headers_if_auth_enabled({}).items()]


def _named(address: str) -> str:
    """Say where an address was given."""
    return f"{'RAY_ADDRESS' if address == os.environ.get('RAY_ADDRESS') else '`ray_address`'} {address}"


def is_one_host() -> bool:
    """Whether the cluster consists of the host of this process."""
    here = ray.util.get_node_ip_address()
    return all(node["NodeManagerAddress"] in (here, "127.0.0.1") for node in ray.nodes() if node["Alive"])


def _job_ships_folder() -> bool:
    """Whether this is the driver of a submitted job that has a working directory of its own."""
    config = json.loads(os.environ.get(_JOB_CONFIG) or "{}")
    return bool((config.get("runtime_env") or {}).get("working_dir"))


def _init(address: str, runtime_env: Mapping[str, Any] | None) -> None:
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    if runtime_env is not None:
        options["runtime_env"] = dict(runtime_env)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    if address == "local":
        for name, value in _OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what a later Ray does anyway; else it says so
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
        with suppress(Exception):
            ray.shutdown()
        if address == "auto" and "not find any running" in str(error):
            raise ValueError(
                f"{_named(address)}: no Ray cluster runs on this host: start one with `ray start`, or give an address."
            ) from error
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"Ray cannot be used at {_named(address)}: {said}") from error
    finally:
        if is_main:  # Ray's handler would end the process with no more word than an exit code
            signal.signal(signal.SIGTERM, handler)
    _silence_deaths()


def _silence_deaths() -> None:
    """Keep Ray from printing, for each worker that dies, what the error that is raised here says in a line."""
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False
