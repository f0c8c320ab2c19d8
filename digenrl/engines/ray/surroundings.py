"""What a worker takes over from the driver: where it imports from, and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# What belongs to a host, or to what started a process on it, and means nothing on another one.
_OF_HOST = (
    "CONDA", "CUDA_VISIBLE_DEVICES", "DBUS_", "KUBERNETES_", "LD_", "PMI", "SLURM", "SSH_", "VIRTUAL_ENV", "XDG_",
)  # fmt: skip
_OF_RAY = "RAY_"


def import_path(*, one_host: bool) -> tuple[list[str], str | None]:
    """Say where workers import from, and the folder that they work in.

    On other hosts only what lies in the working directory is known, relative to wherever Ray has put it (None).
    """
    if one_host:
        return list(sys.path), os.getcwd()
    folder = Path.cwd()
    inside = [os.path.relpath(path, folder) for path in sys.path if Path(path).resolve().is_relative_to(folder)]
    return [path for path in inside if not path.startswith((".venv", "venv"))], None


def environment(*, one_host: bool) -> dict[str, str]:
    """Give the variables of this process that workers take over."""
    left_out = (_OF_RAY,) if one_host else (_OF_RAY, *_OF_HOST)
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def take_over(env: Mapping[str, str], extra: Mapping[str, str], *, one_host: bool, kept: Iterable[str]) -> None:
    """Give this process, a worker, the driver's environment.

    On another host a variable that the host has itself stays as it is, the number of threads apart: Ray sets that one.

    Args:
        env: what `environment` gave in the driver.
        extra: what this worker alone is given.
        one_host: whether the driver is on this host.
        kept: names that are not to be touched.
    """
    kept = set(kept) | {name for name in os.environ if name.startswith(_OF_RAY)}
    if one_host:
        for name in os.environ.keys() - env.keys() - kept:
            del os.environ[name]
    else:
        kept |= os.environ.keys() - extra.keys() - {"OMP_NUM_THREADS"}
    # One thread where the driver says nothing: Ray's number is that of the reserved CPUs.
    wanted = {"OMP_NUM_THREADS": "1", **env, **extra}
    os.environ.update({name: value for name, value in wanted.items() if name not in kept})
