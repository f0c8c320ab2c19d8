from __future__ import annotations

import pytest

from digenrl.rewards import JpegCompressibility, JpegIncompressibility, OCRReward, SafetyReward
from digenrl.rewards.cpu import CPUReward


@pytest.mark.parametrize("reward", [OCRReward, SafetyReward, JpegCompressibility, JpegIncompressibility])
def test_a_reward_on_the_cpu_has_nothing_to_offload(reward: type[CPUReward]) -> None:
    with pytest.raises(ValueError, match=f"^`offload` must be left out: {reward.__name__} runs on the CPU anyway.$"):
        reward(offload=True)
    assert reward(offload=False, num_frames=2).num_frames == 2
