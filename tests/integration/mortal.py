"""Workers of the toy that die where a test wants them to."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from digenrl.algorithms import FlowGRPO
from digenrl.strategies.workers import Worker
from tests.toy import ToyPolicy, level_reward


@dataclass(frozen=True)
class Death:
    """Of one worker, by SIGKILL, when it calls a method of its own, of its module or of its policy."""

    method: str
    trains: bool = True
    """Whether it is a trainer."""
    call: int = 1
    """Which of the calls that the process makes, from 1."""
    rank: int = 0
    after: bool = False
    """Whether the method is left before."""
    follows: bool = False
    """Whether it dies only if the one before it in the list has died."""
    hangs: bool = False
    """Whether it stands still instead."""


class Mortal(FlowGRPO):
    """FlowGRPO on the toy; `deaths` are noted in a folder, so that each happens once."""

    def __init__(self, folder: Path, deaths: Sequence[Death], **settings: Any) -> None:
        defaults = {
            "group_size": 4,
            "num_steps": 5,
            "timestep_fraction": 0.8,
            "lr": 1e-3,
            "clip_range": 1e-2,
            "seed": 0,
        }
        super().__init__(ToyPolicy(), level_reward, **{**defaults, **settings})
        self._folder, self._deaths = folder, tuple(deaths)

    def configure_model(self) -> None:
        worker: Worker = self._place_policy.__self__  # type: ignore[attr-defined]  # that builds this module
        for index, death in enumerate(self._deaths):
            if death.trains == worker._trains and death.rank in (0, worker._rank):
                self._arm(worker, index, death)
        super().configure_model()

    def _arm(self, worker: Worker, index: int, death: Death) -> None:
        owner = next(owner for owner in (worker, self, self.policy) if hasattr(owner, death.method))
        method = getattr(owner, death.method)
        num_calls = 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == death.call and not death.after:
                self._die(index, death)
            result = method(*args, **kwargs)
            if num_calls == death.call and death.after:
                self._die(index, death)
            return result

        object.__setattr__(owner, death.method, deadly)

    def _die(self, index: int, death: Death) -> None:
        if death.follows and not (self._folder / str(index - 1)).exists():
            return
        try:
            (self._folder / str(index)).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGSTOP if death.hangs else signal.SIGKILL)


def num_deaths(folder: Path) -> int:
    """How many have happened."""
    return len(list(folder.iterdir()))


class SteadyDescent(Mortal):
    """Without an optimizer's own state, which would hide a gradient that is lost or counted twice."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)
