"""Rewards of images: how videos and batches are taken apart, and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.rewards import ErrorPolicy, FrameReward, score_samples
from digenrl.types import Prompt, PromptBatch

PROMPTS = PromptBatch.for_step([Prompt("a", 0), Prompt("b", 1)], step=0, group_size=1, seed=0)
# Five frames with brightness 0 to 4, and 4 to 0 with a bright last one, in sixteenths.
VIDEOS = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 10]])[:, :, None, None, None] / 16


class Brightness(FrameReward):
    """The brightness of each image in sixteenths; an exception in place of one that is `bad`."""

    def __init__(self, *, bad: int | None = None, as_list: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.bad, self.as_list = bad, as_list
        self.sizes: list[int] = []

    def score_images(self, images: Tensor, prompts: PromptBatch) -> Any:
        assert len(images) == len(prompts)
        self.sizes.append(len(images))
        values = (images.flatten(1).mean(1) * 16).round()
        if not self.as_list:
            return values
        return [ValueError("too dark") if value == self.bad else value for value in values.tolist()]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 10])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [2.0, 4.0]),
        ({"frames": "min"}, [0.0, 1.0]),
        ({"frames": "max"}, [4.0, 10.0]),
        ({"frames": "first"}, [0.0, 4.0]),
        ({"frames": "middle"}, [2.0, 2.0]),
        ({"frames": "last"}, [4.0, 10.0]),
        ({"num_frames": 3}, [2.0, 16 / 3]),
        ({"num_frames": 1}, [0.0, 4.0]),
        ({"num_frames": 9}, [2.0, 4.0]),
    ],
)
def test_frames_are_reduced_as_declared(
    settings: dict[str, Any], expected: list[float], batch_size: int | None, as_list: bool
) -> None:
    reward = Brightness(**settings, batch_size=batch_size, as_list=as_list)
    scored = score_samples(reward, VIDEOS, PROMPTS, ErrorPolicy())
    torch.testing.assert_close(scored.rewards, torch.tensor(expected))
    assert max(reward.sizes) <= (batch_size or 10)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_frame_that_fails_fails_its_video_alone(batch_size: int | None) -> None:
    reward = Brightness(bad=10, as_list=True, batch_size=batch_size)
    scored = score_samples(reward, VIDEOS, PROMPTS, ErrorPolicy(on_error="drop_group", num_retries=0))
    assert scored.rewards[0] == 2
    assert [failure.reason for failure in scored.failures] == ["failed: ValueError: too dark"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames": "median"}, "`frames` must be one of mean, min, max, first, middle, last, got 'median'"),
        ({"num_frames": 0}, "`num_frames` is a count and must be at least 1, got 0"),
        ({"batch_size": True}, "`batch_size`.*got True"),
        ({"frames": "last", "num_frames": 2}, "`num_frames` must be left out with `frames` last, got 2"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Brightness(**settings)
