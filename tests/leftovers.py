"""What a run leaves in shared memory, although other tests run at the same time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def names_in_shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def left_in_shared_memory(before: set[str], patience_s: float = 5.0) -> list[str]:
    """New names in /dev/shm that stay, and that no process but this one and its descendants has open.

    What ended processes have left is open nowhere and is found here. A name that somebody else has open is theirs,
    and so is one that vanishes by itself.
    """
    end_s = time.monotonic() + patience_s
    while True:
        new = names_in_shared_memory() - before
        left = sorted(new - opened_by_others()) if new else []
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.1)


def opened_by_others() -> set[str]:
    this = psutil.Process()
    family = {this.pid, *(child.pid for child in this.children(recursive=True))}
    return {name for pid in psutil.pids() if pid not in family for name in opened_by(pid)}


def opened_by(pid: int) -> set[str]:
    """Names in /dev/shm that a process has open or mapped; none if it has ended or is another user's."""
    process = Path("/proc", str(pid))
    try:
        paths = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
        paths += [os.readlink(fd) for fd in (process / "fd").iterdir()]
    except OSError:
        return set()
    return {Path(path).name for path in paths if Path(path).parent == SHARED_MEMORY}
