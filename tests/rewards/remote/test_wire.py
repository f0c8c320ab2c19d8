"""What goes over the wire comes out as it went in, or is refused; nothing of it is ever run."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards import RewardBatch, RewardError, RewardFailure
from digenrl.rewards.jpeg import JpegCompressibility
from digenrl.rewards.remote.wire import (
    WireError,
    check_metadata,
    decode_answer,
    decode_media,
    decode_prompts,
    encode_answer,
    encode_request,
    served_name,
)
from digenrl.types import Prompt, PromptBatch
from tests.cli.toy_parts import Bright
from tests.toy import level_reward

MB = 2**20
PROMPTS = PromptBatch.for_step(
    [Prompt("a \u732b\n", 4, metadata={"target": "4", "box": [1, 2.5, None]}), Prompt("b", 9)],
    step=7,
    group_size=2,
    seed=1,
)


def media(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(4, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def sent(values: Tensor, encoding: Any = "npz") -> dict[str, Any]:
    request: dict[str, Any] = json.loads(encode_request(values, PROMPTS, encoding))
    return request


def npz(array: Any, *, save: Any = np.savez, name: str = "media") -> dict[str, str]:
    buffer = io.BytesIO()
    save(buffer, **{name: array})
    return as_npz(buffer.getvalue())


def as_npz(data: bytes) -> dict[str, str]:
    return {"encoding": "npz", "dtype": "float32", "data": base64.b64encode(data).decode()}


def with_header(header: str, content: bytes = b"") -> dict[str, str]:
    """Put a hand-written array into an npz."""
    text = header.encode().ljust(117) + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("media.npy", member)
    return as_npz(buffer.getvalue())


def png(array: Any, mode: str | None = None) -> str:
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 1, 4, 5)])
def test_npz_keeps_every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = media(*shape, dtype=dtype)
    received = decode_media(sent(values)["media"], max_bytes=MB)
    assert received.dtype == dtype
    assert torch.equal(received, values)


def test_npz_keeps_views_and_values_outside_the_range() -> None:
    values = (media(3, 4, 5) * 3 - 1).transpose(2, 3)[:, [2, 0]]
    assert torch.equal(decode_media(sent(values)["media"], max_bytes=MB), values)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", [{"order": "F"}, {"dtype": ">f4"}])
def test_arrays_of_other_writers_are_read_alike(save: Any, order: Any) -> None:
    values = media(3, 4, 5)
    received = decode_media(npz(np.array(values.numpy(), **order), save=save), max_bytes=MB)
    assert torch.equal(received, values)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 5), (2, 3, 4, 5), (2, 1, 4, 5)])
def test_png_rounds_to_eight_bits_and_nothing_else(shape: tuple[int, ...]) -> None:
    values = media(*shape)
    received = decode_media(sent(values, "png")["media"], max_bytes=MB)
    assert torch.equal(received, (values * 255).round() / 255)


def test_png_refuses_values_outside_the_range() -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        encode_request(media(3, 4, 5) * 2, PROMPTS, "png")


def test_media_that_are_not_floats_are_refused() -> None:
    with pytest.raises(ValueError, match="`media` must be floats to be scored by a server, got torch.uint8"):
        encode_request(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), PROMPTS, "npz")


def test_prompts_come_out_as_they_went_in() -> None:
    request = sent(media(3, 4, 5))
    received = decode_prompts(request["samples"], request["step"])
    for name in ("texts", "group_ids", "sample_indices", "seeds", "step"):
        assert getattr(received, name) == getattr(PROMPTS, name)
    assert [prompt.uid for prompt in received.prompts] == [4, 4, 9, 9]
    assert [prompt.metadata for prompt in received.prompts] == [prompt.metadata for prompt in PROMPTS.prompts]


@pytest.mark.parametrize("value", [(1, 2), float("nan"), {1: 2}, object(), np.ones(2), b"x"])
def test_metadata_that_json_would_change_are_refused_by_column_and_prompt(value: Any) -> None:
    prompts = [Prompt("fine", 0, metadata={"box": [1]}), Prompt("bad", 1, metadata={"box": value})]
    with pytest.raises(ValueError, match="column `box` must hold JSON for a reward that is served, got .* 'bad'"):
        check_metadata(prompts)


def test_what_is_pickled_is_refused_with_415_and_never_unpickled(tmp_path: Path) -> None:
    trap = Trap(tmp_path / "ran")
    array = np.empty((4, 1, 1, 1), dtype=object)
    array[:] = trap
    for given in (npz(array), as_npz(pickle.dumps(trap)), as_npz(pickle.dumps(array))):
        with pytest.raises(WireError, match="pickled data is refused") as info:
            decode_media(given, max_bytes=MB)
        assert info.value.status == 415
    assert not trap.folder.exists()
    pickle.loads(pickle.dumps(trap))
    assert trap.folder.exists(), "the trap works"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (npz(np.zeros((4, 3, 2, 2), int)), "must be floats of 16, 32 or 64 bits, got int64"),
        (npz(np.zeros((4, 3, 2, 2), np.longdouble)), "must be floats"),
        (npz(np.zeros((4, 3, 2))), r"must be \[B, \(F\), C, H, W\], got shape \[4, 3, 2\]"),
        (npz(np.zeros((0, 3, 2, 2))), r"got shape \[0, 3, 2, 2\]"),
        (npz(np.zeros((4, 3, 2, 2)), name="images"), "must be an npz with an array `media`"),
        (as_npz(b""), "must be an npz"),
        (as_npz(b"PK\x03\x04"), "must be an npz"),
        ({**as_npz(b""), "data": "%%%"}, "must be in base64"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 2)}", b"1234"), "as many numbers"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1)}", b"12345"), "as many numbers"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 1, 1, 1)}"), "got shape"),
        (with_header("__import__('os').abort()"), "must be an npz"),
        (with_header("(" * 90), "must be an npz"),
    ],
)
def test_what_is_no_array_of_media_is_refused_with_422(given: Any, message: str) -> None:
    with pytest.raises(WireError, match=message) as info:
        decode_media(given, max_bytes=MB)
    assert info.value.status == 422


@pytest.mark.parametrize(
    "given",
    [
        npz(np.zeros((1, 1, 1024, 1024), np.float32), save=np.savez_compressed),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000, 10000000, 1000, 1)}"),
        {"encoding": "png", "images": [png(np.zeros((512, 600), np.uint8))]},
    ],
)
def test_what_unpacks_to_more_than_is_taken_is_refused_before_it_is_unpacked(given: Any) -> None:
    with pytest.raises(WireError, match="are too large, at most 1048576 are taken") as info:
        decode_media(given, max_bytes=MB)
    assert info.value.status == 413


NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
GRAY, COLOR = np.zeros((4, 5), np.uint8), np.zeros((4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "at least one"),
        ([[]], "at least one"),
        ([[png(GRAY)], [png(GRAY)] * 2], "equally many frames"),
        ([png(GRAY), [png(GRAY)]], "all images or all videos"),
        ([png(GRAY), png(COLOR)], "must be alike"),
        ([png(GRAY), png(GRAY.T)], "must be alike"),
        ([png(GRAY, "P")], "8 bits of gray or of RGB, got mode P"),
        ([png(COLOR, "RGBA")], "got mode RGBA"),
        (["AAAA"], "must be a PNG file"),
        ([png(NOISE)[:1000]], "is damaged"),
    ],
)
def test_what_is_no_png_of_media_is_refused(images: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_media({"encoding": "png", "images": images}, max_bytes=MB)


@pytest.mark.parametrize("encoding", ["npz", "png"])
def test_damaged_media_are_read_or_refused_and_raise_nothing_else(encoding: Any) -> None:
    rng = random.Random(0)
    values = media(1, 4, 5)
    whole = sent(values, encoding)["media"]
    data = base64.b64decode(whole["data"] if encoding == "npz" else whole["images"][0])
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        text = base64.b64encode(damaged[: rng.choice([len(data), rng.randrange(len(data))])]).decode()
        given = {**whole, "data": text} if encoding == "npz" else {**whole, "images": [text, *whole["images"][1:]]}
        with suppress(WireError):
            assert decode_media(given, max_bytes=MB).ndim >= 4


def test_a_failed_sample_is_null_with_its_reason_and_an_exception_at_the_other_end() -> None:
    failure = RewardFailure("mine", 1, "a", "returned nan")
    answer = encode_answer(RewardBatch(torch.tensor([0.1, float("nan"), 0.3]), (failure,)))
    assert answer["rewards"][1] is None
    first, second, third = decode_answer(json.dumps(answer, allow_nan=False).encode(), 3, url="http://a:1")
    assert torch.tensor([first, third]).tolist() == torch.tensor([0.1, 0.3]).tolist()
    assert isinstance(second, RewardError)
    assert str(second) == "http://a:1: the reward there returned nan"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "must be JSON, got b'<html>'"),
        (b"\xff\xfe", "must be JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b"{}", "`rewards` must be a list of 2 values, got None"),
        (b'{"rewards": [1]}', "must be a list of 2 values, got 1 values"),
        (b'{"rewards": [1, null], "failures": [1]}', "`failures` must be a list of rows and reasons"),
    ],
)
def test_what_is_no_answer_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_answer(content, 2, url="http://a:1")


def test_a_reward_is_named_as_on_the_command_line() -> None:
    assert served_name(level_reward) == "tests.toy.level_reward"
    assert served_name(JpegCompressibility()) == "JpegCompressibility"
    assert served_name(Bright()) == "tests.cli.toy_parts.Bright"
