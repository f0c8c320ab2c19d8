"""What a run has measured of itself: the costs from which the next one is planned."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from digenrl.scheduling.simulate import Workload

TimestepBatchSize = int | Literal["all"]

_PER_SAMPLE = {"generate": True, "score": True, "update": True, "assist": False}
"""Keys of `seconds_per_sample`, and whether they are required: a run without assistance measures none."""

_PER_CALL = {"load": True, "optimizer": True, "publish": True, "switch": False}
"""Keys of `seconds`, and whether they are required."""

_COUNTS = ("num_groups", "group_size", "generators", "trainers")
_UPDATES = "update_by_timestep_batch_size"
_KEYS = ("seconds_per_sample", "seconds", *_COUNTS, "timestep_batch_size", _UPDATES)


@dataclass(frozen=True)
class Profile:
    """Durations that a run has measured, in the form of `profile.json`.

    Seconds per sample are those of the scheduler: of one generator, or reward worker, for `generate` and `score`; of
    all trainers together for `update` and `assist`, as they share each micro-batch. Times of calls are in them.

    Example:
        >>> profile = Profile(
        ...     generate_s=2.0, score_s=0.5, update_s=0.25, num_groups=8, group_size=4, generators=2, trainers=4
        ... )
        >>> profile.workload().update_s  # on one trainer
        1.0
    """

    generate_s: float
    """Seconds in which one generator makes a sample."""
    score_s: float
    """Seconds in which one worker scores a sample."""
    update_s: float
    """Seconds in which the run's trainers, together, train a sample."""
    num_groups: int
    """Prompts of a step."""
    group_size: int
    """Samples per prompt."""
    generators: int
    """Generators of the run."""
    trainers: int
    """Trainers of the run."""
    assist_s: float | None = None
    """Seconds in which the run's trainers, together, make and score a sample; None if they never did."""
    load_s: float = 0.0
    """Seconds in which a generator loads weights."""
    optimizer_s: float = 0.0
    """Seconds of an optimizer step."""
    publish_s: float = 0.0
    """Seconds in which trainers publish weights."""
    switch_s: float = 0.0
    """Seconds in which trainers switch to generation, and again back; 0 if they never did."""
    timestep_batch_size: TimestepBatchSize | None = None
    """Timesteps trained at a time in the run; None if not known."""
    update_s_by_timestep_batch_size: Mapping[TimestepBatchSize, float] | None = None
    """`update_s` for other numbers of timesteps at a time, if measured."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is a count and must be a whole number of at least 1, got {value!r}.")
        for name in (*_PER_SAMPLE, *_PER_CALL):
            value = getattr(self, f"{name}_s")
            is_positive = name in ("generate", "update", "assist")
            if value is not None or _PER_SAMPLE.get(name, True):
                _check_seconds(name, value, is_positive=is_positive)
        if self.timestep_batch_size is not None:
            _check_timestep_batch_size("timestep_batch_size", self.timestep_batch_size)
        for size, seconds in (self.update_s_by_timestep_batch_size or {}).items():
            _check_timestep_batch_size(_UPDATES, size)
            _check_seconds(f"{_UPDATES}.{size}", seconds, is_positive=True)

    @property
    def update_costs(self) -> dict[TimestepBatchSize | None, float]:
        """Give `update_s` for each number of timesteps at a time that was measured; None is the run's own, unnamed."""
        costs: dict[TimestepBatchSize | None, float] = {}
        for size, seconds in (self.update_s_by_timestep_batch_size or {}).items():
            costs[size] = seconds
        costs[self.timestep_batch_size] = self.update_s
        return costs

    def workload(self) -> Workload:
        """Give the costs of single workers, as the simulator wants them; assistance costs what generators need if it
        was never measured.
        """
        return Workload(
            num_groups=self.num_groups,
            group_size=self.group_size,
            generate_s=self.generate_s,
            score_s=self.score_s,
            update_s=self.update_s * self.trainers,
            assist_s=None if self.assist_s is None else self.assist_s * self.trainers,
            load_s=self.load_s,
            optimizer_s=self.optimizer_s,
            publish_s=self.publish_s,
            switch_s=self.switch_s,
        )

    def write(self, path: Path | str) -> None:
        """Write `profile.json`."""
        content: dict[str, Any] = {
            "seconds_per_sample": {name: getattr(self, f"{name}_s") for name in _PER_SAMPLE},
            "seconds": {name: getattr(self, f"{name}_s") for name in _PER_CALL},
            **{name: getattr(self, name) for name in _COUNTS},
            "timestep_batch_size": self.timestep_batch_size,
            _UPDATES: self.update_s_by_timestep_batch_size,
        }
        if self.assist_s is None:
            del content["seconds_per_sample"]["assist"]
        content = {key: value for key, value in content.items() if value is not None}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Read `profile.json`.

        Raises:
            ValueError: there is no such file, or it is not a profile; the message names the file and fits on a line.
        """
        try:
            return cls._parse(_load(Path(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _parse(cls, content: Any) -> Profile:
        if not isinstance(content, dict):
            raise ValueError(f"a profile must be a mapping with seconds_per_sample and seconds, got {content!r:.60}.")
        _check_keys(content, dict.fromkeys(_KEYS[:-2], True) | dict.fromkeys(_KEYS[-2:], False), "")
        seconds: dict[str, Any] = {}
        for part, names in (("seconds_per_sample", _PER_SAMPLE), ("seconds", _PER_CALL)):
            if not isinstance(content[part], dict):
                raise ValueError(f"`{part}` must be a mapping, got {content[part]!r:.60}.")
            _check_keys(content[part], names, f"{part}.")
            seconds |= {f"{name}_s": value for name, value in content[part].items()}
        updates = content.get(_UPDATES)
        if updates is not None:
            if not isinstance(updates, dict):
                raise ValueError(f"`{_UPDATES}` must be a mapping, got {updates!r:.60}.")
            updates = {int(size) if size.isdecimal() else size: value for size, value in updates.items()}
        return cls(
            **seconds,
            **{name: content[name] for name in _COUNTS},
            timestep_batch_size=content.get("timestep_batch_size"),
            update_s_by_timestep_batch_size=updates,
        )


def _load(path: Path) -> Any:
    if path.is_dir():
        raise ValueError("is a folder; a profile is a file, `profile.json` of a run folder.")
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*")]
        close = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean `{path.with_name(close[0])}`?" if close else "`digenrl fit` writes it to the run folder."
        raise ValueError(f"there is no such file; {hint}")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON in line {error.lineno}: {error.msg}.") from error
    except UnicodeDecodeError as error:
        raise ValueError("is not a text file.") from error


def _check_keys(given: Mapping[str, Any], known: Mapping[str, bool], prefix: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{prefix}{close[0]}`?" if close else f"known: {', '.join(known)}."
            raise ValueError(f"`{prefix}{name}` is not a key of a profile; {hint}")
    for name, is_required in known.items():
        if is_required and name not in given:
            raise ValueError(f"`{prefix}{name}` is missing.")


def _check_seconds(name: str, value: object, *, is_positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"`{name}` is a time in seconds and must be a number, got {value!r}.")
    if value < 0 or (is_positive and value == 0):
        raise ValueError(f"`{name}` is a time and must be {'above' if is_positive else 'at least'} 0 s, got {value}.")


def _check_timestep_batch_size(name: str, value: object) -> None:
    if value != "all" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"`{name}` counts timesteps and must be at least 1, or `all`, got {value!r}.")
