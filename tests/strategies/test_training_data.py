"""Which batch Lightning will ask for next, and when nobody can know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, IterableDataset

from digenrl.strategies.training_data import TrainingData


def trainer_at(step: int, **state: Any) -> Any:
    """A Trainer in its only epoch of four batches, after `step` of them."""
    return SimpleNamespace(
        **{
            "current_epoch": 0,
            "max_epochs": 1,
            "max_steps": -1,
            "global_step": step,
            "is_last_batch": step == 3,
            "num_training_batches": 4,
            "limit_train_batches": None,
            "reload_dataloaders_every_n_epochs": 0,
            **state,
        }
    )


def data_of(module: LightningModule | None = None, *loaders: Any, **state: Any) -> TrainingData:
    data = TrainingData()
    data.begin(module or LightningModule(), None)
    for loader in loaders or [range(4)]:
        iter(data.wrap(loader, trainer_at(0, **state)))
    return data


@pytest.mark.parametrize(
    ("step", "state", "next_batches"),
    [
        (0, {}, [0]),
        (2, {}, [0]),
        (3, {}, []),  # the last epoch ends
        (3, {"max_epochs": 2}, [0]),  # of the next epoch; nothing was taken here
        (3, {"max_epochs": None}, [0]),
        (3, {"max_epochs": None, "num_training_batches": 3}, []),  # the loader would go on where Lightning does not
        (3, {"max_epochs": None, "reload_dataloaders_every_n_epochs": 1}, []),
        (1, {"max_steps": 2}, []),
        (0, {"max_steps": 2}, [0]),
    ],
)
def test_the_next_batch_is_shown_only_if_lightning_will_ask_for_it(
    step: int, state: dict[str, Any], next_batches: list[int]
) -> None:
    assert data_of().next_batches(trainer_at(step, **state)) == next_batches


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Changing(LightningModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_what_keeps_the_next_batch_unknown_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert data_of().obstacle() is None
    assert str(data_of(None, range(4), range(4)).obstacle()).startswith("2 data loaders")
    assert str(data_of(None, DataLoader(Endless())).obstacle()).startswith("a data loader without a length")
    assert not caplog.messages
    assert data_of(Changing()).obstacle() == "an overridden `on_before_batch_transfer`"
    assert caplog.messages[0].startswith("`on_before_batch_transfer` is overridden, so no step is begun")


def test_loaders_of_a_later_epoch_replace_those_before() -> None:
    data = data_of()
    iter(data.wrap(range(10, 14), trainer_at(0, current_epoch=1)))
    assert data.obstacle() is None
    assert data.next_batches(trainer_at(0, current_epoch=1, max_epochs=2)) == [10]
