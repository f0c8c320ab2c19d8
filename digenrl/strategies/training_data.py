"""The training data of a fit, as far ahead of Lightning's loop as it can be known."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from digenrl.data import PromptData
from digenrl.module import DiffusionRLModule
from digenrl.strategies.lookahead import LookaheadLoader

log = logging.getLogger(__name__)

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class TrainingData:
    """Wraps the loaders of a fit, so that the batch after Lightning's can be looked at and a resume is exact.

    Lifecycle: `begin` with a fit, `wrap` with each loader that Lightning makes, then `next_batches` with each step and
    `commit` with each optimizer step.
    """

    def __init__(self) -> None:
        self._loaders: list[LookaheadLoader] = []
        self._loaders_epoch = -1  # in which they were given
        self._transfer_hook: str | None = None  # of the user, which may change batches behind the loader

    def begin(self, module: LightningModule, datamodule: LightningDataModule | None) -> None:
        """Forget the loaders of the fit before, and warn where the batches of this one cannot be known ahead."""
        self._loaders, self._loaders_epoch = [], -1
        self._transfer_hook = _overridden_transfer_hook(module, datamodule)
        if self._transfer_hook is not None:
            log.warning(
                "`%s` is overridden, so no step is begun before Lightning asks for its batch: change prompts in the "
                "data loader instead.",
                self._transfer_hook,
            )

    def wrap(self, loader: Any, trainer: Trainer) -> LookaheadLoader:
        """Wrap a loader, so that a resume repeats exactly the batches that no optimizer step has seen."""
        if self._loaders_epoch != trainer.current_epoch:  # Lightning may give new ones in a later epoch
            self._loaders, self._loaders_epoch = [], trainer.current_epoch
        wrapped = LookaheadLoader(loader, limit=trainer.limit_train_batches)
        self._loaders.append(wrapped)
        return wrapped

    def commit(self, num_batches: int) -> None:
        """Count batches as done, with the optimizer step that they led to."""
        for loader in self._loaders:
            loader.commit(num_batches)

    def obstacle(self) -> str | None:
        """Say why the batch that Lightning will give next cannot be known, if it cannot."""
        if len(self._loaders) != 1:
            return f"{len(self._loaders)} data loaders, of which Lightning makes one batch in a way of its own"
        if not self._loaders[0].has_length:
            return "a data loader without a length, which Lightning reads ahead of itself"
        return None if self._transfer_hook is None else f"an overridden `{self._transfer_hook}`"

    def next_batches(self, trainer: Trainer) -> list[Any]:
        """Give the one batch that Lightning will ask for next, if it will; to be called where no `obstacle` is."""
        return [] if self._is_last_step(trainer) else self._loaders[0].peek(1)

    def _is_last_step(self, trainer: Trainer) -> bool:
        """Whether Lightning will not ask for the batch that the loader would give next."""
        if trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps:
            return True
        if not trainer.is_last_batch:
            return False
        if trainer.reload_dataloaders_every_n_epochs > 0:  # type: ignore[attr-defined]
            return True
        is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        # `limit_train_batches` leaves an epoch before the loader does.
        return is_last_epoch or trainer.num_training_batches != len(self._loaders[0])


def _overridden_transfer_hook(module: LightningModule, datamodule: LightningDataModule | None) -> str | None:
    """Find a hook of the user that may change batches on their way from the loader."""
    harmless = [
        getattr(owner, hook) for owner in (LightningModule, DiffusionRLModule, PromptData) for hook in _TRANSFER_HOOKS
    ]
    for owner in (module, datamodule):
        for hook in _TRANSFER_HOOKS:
            method = getattr(owner, hook, None)
            if method is not None and getattr(method, "__func__", method) not in harmless:
                return hook
    return None
