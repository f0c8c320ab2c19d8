from __future__ import annotations

import pytest

from digenrl.rewards import JpegCompressibility, JpegIncompressibility, OCRReward, SafetyReward
from digenrl.rewards.cpu import CPUReward


@pytest.mark.parametrize("reward", [OCRReward, SafetyReward, JpegCompressibility, JpegIncompressibility])
def test_a_reward_on_the_cpu_has_nothing_to_offload(reward: type[CPUReward]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'offload'"):
        reward(offload=False)  # type: ignore[call-arg]
    made = reward(frames="max", num_frames=2, batch_size=3)
    assert (made.frames, made.num_frames, made.batch_size, made.offload) == ("max", 2, 3, False)
