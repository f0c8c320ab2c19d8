"""What holds for every preference model: loading, precision, batches, frames, placement and errors."""

from __future__ import annotations

import logging
import re
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from digenrl.rewards import FrameReward, RewardError, compute_rewards, set_up_reward
from tests.rewards.preference.tiny_preference_models import NAMES, TinyModels, images, prompts

CPU = torch.device("cpu")

NOWHERE = {
    "PickScore": {"model": "nobody/nothing"},
    "CLIPScore": {"model": "nobody/nothing"},
    "AestheticScore": {"predictor": "nobody/nothing/head.pth"},
    "HPSv2": {"checkpoint": "nobody/nothing/HPS.pt"},
    "ImageReward": {"checkpoint": "nobody/nothing/IR.pt"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels.save(tmp_path_factory.mktemp("tiny"))


def ready(tiny: TinyModels, name: str, **settings: Any) -> FrameReward:
    reward = tiny.make(name, **settings)
    set_up_reward(reward, CPU)
    return reward


@pytest.mark.parametrize("name", NAMES)
def test_scores_do_not_depend_on_batches_frames_precision_or_a_trip_between_processes(
    tiny: TinyModels, name: str
) -> None:
    media, texts = images(), prompts()
    reward = ready(tiny, name)
    scores = compute_rewards(reward, media, texts)
    assert scores.std() > 1e-3  # so that the comparisons say something

    alone = [compute_rewards(reward, media[[row]], texts.select([row])) for row in range(4)]
    torch.testing.assert_close(torch.cat(alone), scores, atol=1e-5, rtol=0)

    sent = cloudpickle.loads(cloudpickle.dumps(tiny.make(name, batch_size=3)))
    set_up_reward(sent, CPU)
    torch.testing.assert_close(compute_rewards(sent, media, texts), scores, atol=1e-5, rtol=0)

    video = torch.stack([media, media.flip(-1), media.flip(-2)], dim=1)
    by_frame = torch.stack([compute_rewards(reward, video[:, frame], texts) for frame in range(3)])
    torch.testing.assert_close(compute_rewards(reward, video, texts), by_frame.mean(0), atol=1e-5, rtol=0)

    rough = compute_rewards(ready(tiny, name, dtype="bfloat16"), media, texts)
    assert 0 < (rough - scores).abs().max() < 0.3 * max(1.0, float(scores.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_an_offloaded_model_is_on_the_samples_device_only_while_it_is_asked(tiny: TinyModels, name: str) -> None:
    reward = tiny.make(name, offload=True)
    moves: list[str] = []
    original = reward.to
    reward.to = lambda device: (moves.append(device.type), original(device))[1]  # type: ignore[method-assign]
    set_up_reward(reward, torch.device("meta"))  # an offloaded one is set up in host memory whatever the device
    modules = [value for value in vars(reward).values() if isinstance(value, torch.nn.Module)]
    assert modules
    assert {weight.device.type for module in modules for weight in module.parameters()} == {"cpu"}
    compute_rewards(reward, images(), prompts())
    assert moves == ["cpu", "cpu"]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_hub_does_not_give_is_named_with_reward_and_remedy(
    tiny: TinyModels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    reward = tiny.make(name)
    for argument, source in NOWHERE[name].items():
        setattr(reward, argument, source)
        with pytest.raises(
            RewardError, match=rf"`{name}` cannot be set up: `{argument}` {source} .*`hf download nobody/nothing"
        ) as info:
            set_up_reward(reward, CPU)
        assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_set_up_says_so(tiny: TinyModels, name: str) -> None:
    with pytest.raises(RewardError, match=rf"`setup\(device\)` of reward `{name}` must be called"):
        tiny.make(name)(images(), prompts())


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_checked_at_construction(tiny: TinyModels, name: str) -> None:
    with pytest.raises(ValueError, match="`dtype` must be float32 or bfloat16, got 'half'"):
        tiny.make(name, dtype="half")
    with pytest.raises(ValueError, match="`frames` must be one of"):
        tiny.make(name, frames="some")


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Transformers warns, too, of tokens that tiny models lack."""
    return [record for record in caplog.records if record.name.startswith("digenrl")]


@pytest.mark.parametrize("name", ["PickScore", "CLIPScore", "HPSv2", "ImageReward"])
def test_a_prompt_that_is_too_long_is_said_once(tiny: TinyModels, name: str, caplog: pytest.LogCaptureFixture) -> None:
    reward = ready(tiny, name)
    limit = 35 if name == "ImageReward" else 77
    with caplog.at_level(logging.WARNING, logger="digenrl"):
        reward(images(2), prompts(["a dog", "cat"]))
        assert not own_records(caplog)
        scores: Tensor = reward(images(2)[[0, 0]], prompts(["cat " * 200, "cat " * 100]))
        reward(images(2), prompts(["dog " * 200, "dog"]))
    (record,) = own_records(caplog)
    assert re.fullmatch(
        rf"reward `{name}` reads the first {limit} tokens of a prompt; 'cat .*' has 20\d. Said once; .*",
        record.getMessage(),
    )
    torch.testing.assert_close(scores[0], scores[1])  # what differs is beyond the limit
