"""Classes that configurations of the tests name by their dotted path."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from digenrl import PromptBatch
from digenrl.algorithms import FlowGRPO
from digenrl.engines import WorkerTimeout
from tests.toy import ToyCondition, ToyPolicy


class Bright:
    """A reward with a setting."""

    def __init__(self, level: float = 0.5) -> None:
        self.level = level

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return -((media.flatten(1).mean(1) - self.level) ** 2)


def unannotated(media, prompts):  # type: ignore[no-untyped-def]
    return media.flatten(1).mean(1)


def not_a_number(media: Tensor, prompts: PromptBatch) -> Tensor:
    return torch.full((len(media),), float("nan"))


def broken(media: Tensor, prompts: PromptBatch) -> Tensor:
    raise ValueError("the reward has a bug")


class Silent:
    """Cannot be called."""


class Buggy:
    def __init__(self, level: Any = 1) -> None:
        self.level = level + None

    def __call__(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        return media


class MyGRPO(FlowGRPO):
    """Passes what it does not know to its base class."""

    def __init__(self, *args: Any, margin: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.margin = margin


class UntypedGRPO(FlowGRPO):
    """Leaves the types of what it passes on to its base class."""

    def __init__(self, policy, reward, lr=None, *, margin=0.5, **settings):  # type: ignore[no-untyped-def]
        super().__init__(policy, reward, lr=3e-4 if lr is None else lr, **settings)
        self.margin = margin


class SignalAt(Callback):
    """Sends this process a signal at the end of the first batch."""

    def __init__(self, name: str = "SIGINT") -> None:
        self.number = signal.Signals[name]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        os.kill(os.getpid(), self.number)


class ImpatientUser(SignalAt):
    """Presses Ctrl-C again while the run ends."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        os.kill(os.getpid(), self.number)


class StateOfABusyTrainer(Callback):
    """Wants what it cannot have when the run ends."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        raise WorkerTimeout("worker trainer-0 is still at task `update`.")


class ImpatientPolicy(ToyPolicy):
    """Encodes no prompt without its real weights."""

    def encode(self, prompts: Sequence[str]) -> ToyCondition:
        raise RuntimeError("no")


class ExamplePolicy(ImpatientPolicy):
    """Says what its conditions look like."""

    def example_condition(self, prompts: Sequence[str]) -> ToyCondition:
        return ToyCondition(torch.zeros(len(prompts)))
