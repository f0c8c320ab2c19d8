"""What a run may do to keep its workers busy."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from digenrl.scheduling.assist import check_assist_method


@dataclass(frozen=True)
class SchedulingPolicy:
    """The options of the scheduler that are not the workers' or the work's."""

    trainer_assist: str = "off"
    """Whether idle trainers generate: `off`, `static:K`, `search` or `optimal` (docs/design/assist.md)."""
    staleness: float = 0.0
    """Largest fraction of a step made with the weights before its own, in [0, 1) (docs/design/staleness.md)."""
    staleness_mode: Literal["cap", "exact"] = "cap"
    """`cap` makes samples early as timing allows, up to the bound; `exact` makes the same ones early in every run."""

    def __post_init__(self) -> None:
        check_assist_method(self.trainer_assist, name="trainer_assist")
        if not isinstance(self.staleness, Real) or not 0 <= self.staleness < 1:
            raise ValueError(
                f"`staleness` is the largest stale fraction of a step and must be in [0, 1), got {self.staleness!r}."
            )
        if self.staleness_mode not in ("cap", "exact"):
            raise ValueError(f"`staleness_mode` must be cap or exact, got {self.staleness_mode!r}.")
