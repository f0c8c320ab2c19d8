"""Rewards: what a sample is worth."""

from digenrl.rewards.frames import FrameReward
from digenrl.rewards.reward import (
    JoinedReward,
    Reward,
    RewardError,
    RewardTraits,
    check_prompts,
    reward_name,
    set_up_reward,
)
from digenrl.rewards.scoring import (
    ErrorPolicy,
    OnRewardError,
    RewardBatch,
    RewardFailure,
    compute_rewards,
    score_samples,
)
from digenrl.rewards.several import SeveralRewards

__all__ = [
    "ErrorPolicy",
    "FrameReward",
    "JoinedReward",
    "OnRewardError",
    "Reward",
    "RewardBatch",
    "RewardError",
    "RewardFailure",
    "RewardTraits",
    "SeveralRewards",
    "check_prompts",
    "compute_rewards",
    "reward_name",
    "score_samples",
    "set_up_reward",
]
