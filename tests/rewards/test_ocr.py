"""The reward by what is read in an image: text that Pillow has drawn."""

from __future__ import annotations

import logging
import socket
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from digenrl.rewards import RewardError, check_prompts, compute_rewards
from digenrl.rewards.ocr import OCRReward
from digenrl.types import Prompt, PromptBatch

WORDS = ["42", "07", "HI", "9"]


def drawn(*lines: tuple[str, tuple[int, int]], size: tuple[int, int] = (32, 16), font_size: int = 14) -> Tensor:
    """Draw texts with their upper left corners at these places: [3, H, W]."""
    image = Image.new("RGB", size, (250, 230, 90))
    for text, place in lines:
        font = ImageFont.load_default(font_size)
        ImageDraw.Draw(image).text(place, text, fill=(10, 20, 120), font=font, anchor="lt")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def media() -> Tensor:
    return torch.stack([drawn((word, (6, 3))) for word in WORDS])


def prompts(*texts: str, **metadata: Any) -> PromptBatch:
    return PromptBatch.for_validation([Prompt(text, uid, 0, metadata) for uid, text in enumerate(texts)], seed=0)


def asking(*words: str) -> PromptBatch:
    return prompts(*(f'digits that say "{word}"' for word in words))


def set_up(reward: OCRReward) -> OCRReward:
    reward.setup(torch.device("cpu"))
    return reward


@pytest.fixture(scope="module")
def reader() -> OCRReward:
    return set_up(cloudpickle.loads(cloudpickle.dumps(OCRReward(detect=False))))  # what a worker receives


def like(reader: OCRReward, **settings: Any) -> OCRReward:
    """Make a reward that shares the loaded networks."""
    reward = OCRReward(**{"detect": reader.detect, **settings})
    reward._ocr = reader._ocr
    return reward


@pytest.fixture(scope="module")
def detector() -> OCRReward:
    return set_up(OCRReward())


def test_drawn_words_are_read(reader: OCRReward) -> None:
    assert reader.read(media()) == WORDS


@pytest.mark.parametrize(
    ("metric", "rewards"),
    [("exact", [1.0, 0.0, 1.0, 0.0]), ("edit", [1.0, 0.5, 1.0, 0.25])],
)
def test_what_is_read_is_compared_with_the_text_in_quotes(reader: OCRReward, metric: Any, rewards: list[float]) -> None:
    wanted = asking("42", "0", "HI", "9876")
    assert compute_rewards(like(reader, metric=metric), media(), wanted).tolist() == rewards


def test_case_and_spaces_count_if_asked(reader: OCRReward) -> None:
    wanted = asking("4 2", "07", "hi", " 9 ")
    assert compute_rewards(like(reader, metric="exact"), media(), wanted).tolist() == [1, 1, 1, 1]
    strict = like(reader, metric="exact", case_sensitive=True, ignore_spaces=False)
    assert compute_rewards(strict, media(), wanted).tolist() == [0, 1, 0, 1]


def test_a_column_may_hold_the_text(reader: OCRReward) -> None:
    reward = like(reader, column="target", metric="exact")
    assert compute_rewards(reward, media(), prompts(*"abcd", target="07")).tolist() == [0, 1, 0, 0]
    assert compute_rewards(reward, media(), prompts(*"abcd", target=42)).tolist() == [1, 0, 0, 0]


def test_a_blank_image_is_worth_nothing(reader: OCRReward) -> None:
    blank = torch.ones(2, 1, 16, 32)
    assert reader.read(blank) == ["", ""]
    assert compute_rewards(reader, blank, asking("42", "1")).tolist() == [0, 0]


def test_a_reward_does_not_depend_on_the_batch(reader: OCRReward) -> None:
    words = [f"{number}" for number in range(10, 20)]  # more than go through the networks in one call
    images = torch.stack([drawn((word, (6, 3))) for word in words])
    together = compute_rewards(reader, images, asking(*words))
    assert torch.equal(
        torch.cat([compute_rewards(reader, images[row, None], asking(words[row])) for row in range(10)]), together
    )
    assert torch.equal(compute_rewards(like(reader, batch_size=3), images, asking(*words)), together)


def test_the_reward_of_a_video_is_the_mean_of_its_frames(reader: OCRReward) -> None:
    videos = media().unflatten(0, (2, 2))
    assert compute_rewards(reader, videos, asking("42", "HI")).tolist() == [0.5 + 0.0 / 2, 0.5]


def test_lines_are_found_and_joined_in_reading_order(detector: OCRReward) -> None:
    page = drawn(("Tea", (30, 20)), ("42", (150, 22)), ("Open", (40, 90)), size=(224, 160), font_size=28)[None]
    assert detector.read(page) == ["Tea 42 Open"]
    assert compute_rewards(detector, page, asking("tea42 open")).tolist() == [1]


def test_small_images_are_enlarged_to_find_text(detector: OCRReward) -> None:
    images = torch.cat([media()[:2], torch.ones(1, 3, 16, 32)])
    assert detector.read(images) == ["42", "07", ""]


def test_a_line_goes_to_the_networks_with_blue_first_and_a_grey_margin(
    reader: OCRReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    recognize = reader._ocr.recognize_txt
    monkeypatch.setattr(reader._ocr, "recognize_txt", lambda lines: seen.extend(lines) or recognize(lines))
    reader.read(media()[:1])
    assert seen[0].shape == (16, 32 + 11, 3)  # 11 columns of 16 rows are 32 of 48
    assert seen[0][0, 0].tolist() == [90, 230, 250]
    assert (seen[0][:, 32:] == 128).all()


def test_one_thread_is_used_and_nothing_is_written_or_fetched(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with caplog.at_level(logging.DEBUG):
        reward = set_up(OCRReward(detect=False))
        reward.read(torch.ones(1, 3, 16, 32))
    options = reward._ocr.text_rec.session.session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if "ocr" in record.name.lower()]


def test_a_prompt_without_a_text_in_quotes_is_an_error_that_names_it(reader: OCRReward) -> None:
    wanted = prompts('say "42"', "a cat", 'say "A" or "B"', 'say "9"')
    with pytest.raises(
        RewardError, match="does not know what to read for prompt 'a cat': .* got none; or give .*column"
    ):
        compute_rewards(reader, media(), wanted)
    with pytest.raises(ValueError, match='\'say "A" or "B"\': .* got 2'):
        OCRReward().check_prompts(wanted.prompts[2:])
    OCRReward().check_prompts(wanted.prompts[:1])


def test_prompts_are_checked_before_anything_is_generated() -> None:
    with pytest.raises(ValueError, match="column `target`"):
        check_prompts(OCRReward("target"), [Prompt("a cat", 0)])
    with pytest.raises(ValueError, match="for prompt 'a cat'"):
        check_prompts(OCRReward(), [Prompt("a cat", 0)])
    check_prompts(OCRReward("target"), [Prompt("a cat", 0, 0, {"target": "42"})])


@pytest.mark.parametrize("value", ["", " ", None, 1.5, True, ["42"]])
def test_a_column_that_holds_no_text_is_an_error_that_names_prompt_and_value(value: Any) -> None:
    with pytest.raises(ValueError, match="for prompt 'a cat': the column `target` must be a text, got") as info:
        OCRReward("target").check_prompts([Prompt("a cat", 0, 0, {"target": value})])
    assert repr(value) in str(info.value)


def test_it_must_be_set_up() -> None:
    with pytest.raises(RewardError, match=r"`setup\(device\)` of reward `OCRReward` must be called before"):
        OCRReward()(media(), asking(*WORDS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"column": ""}, "`column` must be the name of a metadata column, got ''"),
        ({"column": 3}, "`column` must be the name"),
        ({"metric": "levenshtein"}, "`metric` must be edit or exact, got 'levenshtein'"),
        ({"num_threads": 0}, "`num_threads` is a count and must be at least 1, got 0"),
        ({"detect_size": 16}, "`detect_size` is in pixels and must be at least 32, got 16"),
        ({"frames": "median"}, "`frames` must be one of"),
    ],
)
def test_arguments_that_cannot_be_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OCRReward(**settings)
