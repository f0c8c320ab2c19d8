"""How a module asks its reward, and what it does about samples whose reward failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from digenrl.functional import rows_of_whole_groups, weighted_sum, zero_std_groups
from digenrl.module.advantages import AdvantageSettings
from digenrl.module.rows import RowHelpers
from digenrl.policies.prompt_fields import check_prompt_fields
from digenrl.rewards import (
    ErrorPolicy,
    JoinedReward,
    Reward,
    RewardError,
    RewardTraits,
    check_prompts,
    reward_name,
    score_samples,
    set_up_reward,
)
from digenrl.types import Prompt, PromptBatch

log = logging.getLogger(__name__)

_MAX_EMPTY_STEPS = 3  # in a row; a reward that always fails would otherwise train nothing for days
_MAX_MESSAGES = 3  # of one call


class Scoring(RowHelpers):
    """The part of `DiffusionRLModule` that asks the reward."""

    reward_errors: ErrorPolicy
    advantage_settings: AdvantageSettings

    def __init__(self, reward: Reward) -> None:
        super().__init__()
        if not callable(reward):
            raise ValueError(f"`reward` must be callable as reward(media, prompts), got {reward!r}.")
        RewardTraits.of(reward)
        self._reward = (reward,)  # in a tuple, so that a reward's own network is not taken for a part of the module
        self._is_reward_set_up = False
        self._validated: list[bool] = []
        self._num_empty_steps = 0

    @property
    def reward(self) -> Reward:
        """What a sample is worth."""
        return self._reward[0]

    def check_prompts(self, prompts: Sequence[Prompt], *, name: str = "prompts") -> None:
        """Check that the policy can encode prompts and the reward can score their samples.

        Raises:
            ValueError: one cannot, or a column that is for policies would have no effect.
        """
        check_prompt_fields(
            self.policy,
            prompts,
            is_guided=any(scale != 1 for scale in self.guidance_scales),
            read_by_reward=RewardTraits.of(self.reward).requires,
            name=name,
        )
        check_prompts(self.reward, prompts, name=name)

    def set_up_reward(self) -> None:
        """Let the reward load what it needs, once per process; whoever scores asks for it before generation.

        Raises:
            RewardError: it could not.
        """
        if not self._is_reward_set_up:
            set_up_reward(self.reward, self.device)
            self._is_reward_set_up = True

    def ask_reward(self, media: Tensor, prompts: PromptBatch) -> Tensor:
        """Ask the reward about B samples, [B] float32, or [B, R] of R rewards.

        Args:
            media: [B, (F), C, H, W] in [0, 1].
            prompts: of B rows.

        Returns:
            NaN for samples whose reward has failed, only with `on_reward_error="drop_group"`.

        Raises:
            RewardError: the reward has failed, else.
        """
        self.set_up_reward()
        # A reward computes as it would outside of this run, whatever precision the policy is trained in.
        with torch.autocast(media.device.type, enabled=False):
            scored = score_samples(self.reward, media.float(), prompts, self.reward_errors, poll=self._look_for_sigterm)
        for failure in scored.failures[:_MAX_MESSAGES]:
            log.warning("%s; left out with its group.", failure)
        if len(scored.failures) > _MAX_MESSAGES:
            log.warning("... and for %d more of %d samples.", len(scored.failures) - _MAX_MESSAGES, len(prompts))
        return scored.rewards

    def _look_for_sigterm(self) -> None:
        # Lightning looks for it between batches only; workers have no trainer, and their driver ends them.
        if self._trainer is not None and self._trainer.received_sigterm:
            raise SIGTERMException

    def kept_rows(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Say which samples [B] of whole groups are trained: no reward of their group has failed.

        Raises:
            RewardError: a reward is not finite, and no group is to be dropped.
        """
        is_good = rewards.isfinite() if rewards.ndim == 1 else rewards.isfinite().all(dim=1)
        if self.reward_errors.on_error != "drop_group" and not is_good.all():
            raise RewardError(f"`{type(self).__name__}.score` gave {rewards.tolist()}; rewards must be finite.")
        return rows_of_whole_groups(is_good, group_ids)

    def note_dropped_groups(self, num_dropped: int, num_groups: int) -> None:
        """Note how many of a step's groups were left out.

        Raises:
            RewardError: none was left in several steps in a row.
        """
        if num_dropped < num_groups:
            self._num_empty_steps = 0
            return
        self._num_empty_steps += 1
        if self._num_empty_steps >= _MAX_EMPTY_STEPS:
            raise RewardError(
                f"the reward has failed for every group of {self._num_empty_steps} steps in a row, so nothing was "
                "trained: see the warnings above for its reasons."
            )
        log.warning("the reward has failed for all %d groups of the step: the weights stay as they are.", num_groups)

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """The weights of several rewards."""
        return self.reward.weights if isinstance(self.reward, JoinedReward) else (1.0,)

    def total_rewards(self, rewards: Tensor) -> Tensor:
        """Add up several rewards [B, R] by their weights; one reward [B] is itself."""
        return rewards if rewards.ndim == 1 else weighted_sum(rewards, self.reward_weights)

    def compared_rewards(self, rewards: Tensor) -> Tensor:
        """Give what samples are compared by: each of several rewards, [B, R], or their sum, [B], if it is asked for."""
        if isinstance(self.reward, JoinedReward) and self.reward.sums_raw_rewards:
            return self.total_rewards(rewards)
        return rewards

    def reward_metrics(self, rewards: Tensor, group_ids: Tensor) -> Mapping[str, Tensor | float]:
        """Give the metrics of rewards [B] or [B, R] of whole groups.

        Of several rewards, each has its mean as it is, its part of `reward/mean`, and how much it says once it is
        compared with its own kind: the mean absolute advantage, and the share of groups for which it says nothing.
        """
        num_groups = len(group_ids.unique())
        totals = self.total_rewards(rewards)
        metrics: dict[str, Tensor | float] = {
            "reward/zero_std_group_frac": zero_std_groups(totals, group_ids) / num_groups,
        }
        if not isinstance(self.reward, JoinedReward):
            return {f"reward/{reward_name(self.reward)}": rewards.mean(), **metrics}
        advantages = self.advantage_settings.compare(rewards, group_ids)
        for column, (name, weight) in enumerate(zip(self.reward.names, self.reward.weights, strict=True)):
            values = rewards[:, column]
            metrics |= {
                f"reward/{name}": values.mean(),
                f"reward/{name}/weighted": weight / sum(self.reward.weights) * values.mean(),
                f"reward/{name}/normalized_abs_mean": advantages[:, column].abs().mean(),
                f"reward/{name}/zero_std_group_frac": zero_std_groups(values, group_ids) / num_groups,
            }
        return metrics


def advantages_of_kept(
    rewards: Tensor, is_kept: Tensor, group_ids: Tensor, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Compare the rewards of samples that are kept; the others have advantage 0.

    Args:
        rewards: [B] or [B, R] of whole groups.
        is_kept: [B].
        group_ids: [B].
        compare: of rewards and group ids.

    Returns:
        [B] or [B, R].
    """
    if is_kept.all():
        return compare(rewards, group_ids)
    if not is_kept.any():
        return compare(torch.zeros_like(rewards), group_ids)  # equal rewards have advantage 0
    compared = compare(rewards[is_kept], group_ids[is_kept])
    advantages = compared.new_zeros((len(rewards), *compared.shape[1:]))
    advantages[is_kept] = compared
    return advantages
