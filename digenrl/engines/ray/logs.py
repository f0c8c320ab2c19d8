"""What workers print, in the folder of the run."""

from __future__ import annotations

import sys
from pathlib import Path


class RunLogs:
    """Writes a file for each worker, its name ahead of each line; without a folder, to stderr."""

    def __init__(self, folder: Path | None) -> None:
        """Write to `folder`, which is made when there is something to write."""
        self._folder = folder
        self._begun: dict[str, str] = {}  # lines that a worker has not ended yet

    def add(self, worker: str, text: str) -> None:
        """Write what a worker has printed, the last line only once it is whole."""
        if not text:
            return
        *lines, self._begun[worker] = (self._begun.get(worker, "") + text).split("\n")
        self._write(worker, lines)

    def end(self, worker: str) -> None:
        """Write the line that a worker has begun and will not end."""
        begun = self._begun.pop(worker, "")
        if begun:
            self._write(worker, [begun])

    def _write(self, worker: str, lines: list[str]) -> None:
        text = "".join(f"[{worker}] {line}\n" for line in lines)
        if self._folder is None:
            sys.stderr.write(text)
        elif text:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"{worker}.log", "a") as file:
                file.write(text)
