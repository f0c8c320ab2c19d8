"""Rewards: what a sample is worth."""

from digenrl.rewards.frames import FrameReward
from digenrl.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from digenrl.rewards.judge.vlm_judge import VLMJudge, VLMRubric
from digenrl.rewards.ocr import OCRReward
from digenrl.rewards.preference.aesthetic import AestheticScore
from digenrl.rewards.preference.clip_score import CLIPScore
from digenrl.rewards.preference.hpsv2 import HPSv2
from digenrl.rewards.preference.image_reward import ImageReward
from digenrl.rewards.preference.pick_score import PickScore
from digenrl.rewards.remote.http import HTTPReward
from digenrl.rewards.reward import (
    JoinedReward,
    Reward,
    RewardError,
    RewardTraits,
    check_picklable,
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

__all__ = [
    "AestheticScore",
    "CLIPScore",
    "ErrorPolicy",
    "FrameReward",
    "HPSv2",
    "HTTPReward",
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
    "check_picklable",
    "check_prompts",
    "compute_rewards",
    "reward_name",
    "score_samples",
    "set_up_reward",
]
