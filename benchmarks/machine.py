"""What else the machine does while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

_IDLE_COLUMNS = (3, 4)  # of /proc/stat: idle, and waiting for disks


class OtherLoad:
    """Measures the share of the machine's processor time that goes to others than this process and its children.

    Time that a hypervisor takes away counts as others'. Linux only. Children that end in between are not counted.

    Example:
        >>> load = OtherLoad()
        >>> 0 <= load.share()
        True
    """

    def __init__(self) -> None:
        """Start to measure."""
        self._start_s, self._busy_s, self._own_s = time.monotonic(), _machine_busy_s(), _own_s()

    def share(self) -> float:
        """Give the share since the start, from 0 to about 1."""
        others_s = (_machine_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        available_s = (time.monotonic() - self._start_s) * (os.cpu_count() or 1)
        return max(others_s, 0.0) / available_s if available_s > 0 else 0.0


def _machine_busy_s() -> float:
    columns = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(columns) - sum(columns[index] for index in _IDLE_COLUMNS)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    process = psutil.Process()
    total_s = 0.0
    for member in (process, *process.children(recursive=True)):
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:  # it has just ended
            continue
        total_s += times.user + times.system
    return total_s
