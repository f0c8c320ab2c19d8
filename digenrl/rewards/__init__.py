"""Rewards: what a sample is worth."""

from digenrl.rewards.aesthetic import AestheticScore
from digenrl.rewards.clip_score import CLIPScore
from digenrl.rewards.frames import FrameReward
from digenrl.rewards.hpsv2 import HPSv2
from digenrl.rewards.image_reward import ImageReward
from digenrl.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from digenrl.rewards.ocr import OCRReward
from digenrl.rewards.pick_score import PickScore
from digenrl.rewards.reward import (
    JoinedReward,
    Reward,
    RewardError,
    RewardTraits,
    check_prompts,
    reward_name,
    set_up_reward,
)
from digenrl.rewards.safety import SafetyReward
from digenrl.rewards.scoring import (
    ErrorPolicy,
    OnRewardError,
    RewardBatch,
    RewardFailure,
    compute_rewards,
    score_samples,
)
from digenrl.rewards.several import SeveralRewards
from digenrl.rewards.vlm_judge import VLMJudge, VLMRubric

__all__ = [
    "AestheticScore",
    "CLIPScore",
    "ErrorPolicy",
    "FrameReward",
    "HPSv2",
    "ImageReward",
    "JoinedReward",
    "JpegCompressibility",
    "JpegIncompressibility",
    "OCRReward",
    "OnRewardError",
    "PickScore",
    "Reward",
    "RewardBatch",
    "RewardError",
    "RewardFailure",
    "RewardTraits",
    "SafetyReward",
    "SeveralRewards",
    "VLMJudge",
    "VLMRubric",
    "check_prompts",
    "compute_rewards",
    "reward_name",
    "score_samples",
    "set_up_reward",
]
