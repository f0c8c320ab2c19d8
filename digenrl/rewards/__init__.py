"""Rewards: what a sample is worth."""

from digenrl.rewards.reward import Reward, RewardError, compute_rewards, reward_name

__all__ = ["Reward", "RewardError", "compute_rewards", "reward_name"]
