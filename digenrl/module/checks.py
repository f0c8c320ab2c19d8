"""What a run's data and Trainer must be like for a module, found before anything is generated."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from digenrl.data import PromptData
from digenrl.module.scoring import Scoring
from digenrl.rewards import ErrorPolicy, RewardTraits


def accumulated_batches(trainer: Trainer) -> int:
    """Give the batches of an optimizer step, which a callback may set only once the first epoch begins."""
    values = [
        value
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler)
        for value in callback.scheduling.values()
    ]
    return max([trainer.accumulate_grad_batches, *values])


def check_data(module: Scoring, data: object) -> None:
    """Check that policy and reward can take the prompts of `PromptData`; other data are checked batch by batch.

    Raises:
        ValueError: one cannot, or groups cannot be whole where the reward needs them so.
    """
    if not isinstance(data, PromptData):
        return
    module.check_prompts(data.prompts, name="prompts")
    module.check_prompts(data.validation_prompts, name="validation_prompts")
    if not RewardTraits.of(module.reward).groupwise or not data.validation_prompts:
        return
    samples, size = data.validation_samples_per_prompt, data.validation_batch_size
    if samples < 2:
        raise ValueError(
            f"`validation_samples_per_prompt` must be at least 2, got {samples}: the reward compares the samples of a "
            "prompt."
        )
    if size % samples != 0:
        raise ValueError(
            f"`validation_batch_size` must be a multiple of `validation_samples_per_prompt` {samples}, got {size}: the "
            "reward compares the samples of a prompt and needs all of them."
        )


def check_dropping(policy: ErrorPolicy, trainer: Trainer) -> None:
    """Check that the rows left of each batch can be weighed rightly, if groups may be dropped.

    Raises:
        ValueError: gradients of batches with different numbers of rows would be added up.
    """
    if policy.on_error != "drop_group":
        return
    num_batches = accumulated_batches(trainer)
    if num_batches > 1:
        raise ValueError(
            f"`on_reward_error` must be raise or retry with `accumulate_grad_batches` {num_batches}, got drop_group: "
            "gradients of batches of which different numbers of rows are left are added up."
        )
    if trainer.world_size > 1:
        raise ValueError(
            f"`on_reward_error` must be raise or retry on {trainer.world_size} ranks of a data-parallel strategy, got "
            "drop_group: `DisaggregatedStrategy` drops groups with any number of trainers."
        )
