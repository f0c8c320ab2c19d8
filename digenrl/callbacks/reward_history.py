"""The rewards of a run, as its callbacks see them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

TRAINING_REWARD = "reward/mean"
VALIDATION_REWARD = "val/reward/mean"
_DROPPED_GROUPS = "reward/dropped_groups"


def has_training_reward(trainer: Trainer, batch: Any) -> bool:
    """Whether `reward/mean` is that of `batch`, at its end.

    A batch of which all groups were dropped has none.
    """
    metrics = trainer.callback_metrics
    if _DROPPED_GROUPS in metrics and metrics[_DROPPED_GROUPS] >= len(batch):
        return False
    return TRAINING_REWARD in metrics


class RewardHistory:
    """Records mean rewards over the optimizer steps that their policy had seen.

    The samples of the first batch come from a policy of 0 steps, a validation after two steps sees one of 2. The
    batches of an accumulation window count as one step.
    """

    def __init__(self) -> None:
        self.training: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._window: list[float] = []
        self._num_steps = 0

    def begin(self, trainer: Trainer) -> None:
        """Continue at the step the Trainer is at; what lies after it belongs to a run that is not continued."""
        self._num_steps, self._window = trainer.global_step, []
        self.training = [point for point in self.training if point[0] < self._num_steps]
        self.validation = [point for point in self.validation if point[0] <= self._num_steps]

    def record_training(self, trainer: Trainer, batch: Any) -> None:
        """Note the reward of a batch, if it has one; to be called once at the end of each."""
        if has_training_reward(trainer, batch):
            self._window.append(float(trainer.callback_metrics[TRAINING_REWARD]))
        if trainer.global_step > self._num_steps:
            if self._window:
                self.training.append((self._num_steps, sum(self._window) / len(self._window)))
            self._num_steps, self._window = trainer.global_step, []

    def record_validation(self, trainer: Trainer) -> None:
        """Note the reward of a validation; one that is run again at the same step replaces the first."""
        metrics = trainer.callback_metrics
        if trainer.sanity_checking or VALIDATION_REWARD not in metrics:
            return
        if self.validation and self.validation[-1][0] == trainer.global_step:
            self.validation.pop()
        self.validation.append((trainer.global_step, float(metrics[VALIDATION_REWARD])))

    def state_dict(self) -> dict[str, Any]:
        """Give the records, so that a resumed run continues them."""
        return {"training": list(self.training), "validation": list(self.validation)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the records of a checkpoint."""
        self.training = [(step, value) for step, value in state_dict["training"]]
        self.validation = [(step, value) for step, value in state_dict["validation"]]
