"""Rewards: what a sample is worth."""

from digenrl.rewards.reward import JoinedReward, Reward, RewardError, compute_rewards, reward_name
from digenrl.rewards.several import SeveralRewards

__all__ = ["JoinedReward", "Reward", "RewardError", "SeveralRewards", "compute_rewards", "reward_name"]
