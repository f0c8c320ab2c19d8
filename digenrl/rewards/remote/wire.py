"""The protocol between `HTTPReward` and `digenrl serve-reward`: JSON, in it media as npz or PNG in base64.

`docs/rewards_openapi.json` describes it. Nothing is ever unpickled: the header of an array is read and checked before
its numbers are, and what is larger than its reader allows is refused before it is unpacked.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards.images import to_uint8
from digenrl.rewards.reward import Reward, RewardError, shortened
from digenrl.rewards.scoring import RewardBatch
from digenrl.types import Prompt, PromptBatch

PROTOCOL = 1
"""Version of the protocol; both ends must have the same."""

DEFAULT_PORT = 8200

Encoding = Literal["npz", "png"]
"""`"npz"` keeps every bit; `"png"` rounds to 8 bits and takes a tenth to a quarter of the size."""

_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
_MEMBER = "media.npy"
_PICKLE = "pickled data is refused: it could run code; send the media as npz of floats, or as png"
_NPZ_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
    *(KeyError, ValueError, EOFError, RuntimeError, MemoryError),  # what zipfile and numpy raise for garbage
)
_PNG_ERRORS = (OSError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError)


class WireError(ValueError):
    """What came over the wire is not as the protocol says; `status` is the HTTP status that says so."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


def encode_request(media: Tensor, prompts: PromptBatch, encoding: Encoding) -> bytes:
    """Write what is asked about B samples.

    Args:
        media: [B, (F), C, H, W] floats in [0, 1].
        prompts: of B rows.
        encoding: of the media.

    Raises:
        ValueError: media that are not floats, or not in [0, 1] for PNG, or metadata that JSON does not keep.
    """
    check_metadata(prompts.prompts)
    samples = [
        {
            "prompt": prompt.text,
            "metadata": dict(prompt.metadata),
            "uid": prompt.uid,
            "group_id": group,
            "sample_index": index,
            "seed": seed,
        }
        for prompt, group, index, seed in zip(
            prompts.prompts, prompts.group_ids, prompts.sample_indices, prompts.seeds, strict=True
        )
    ]
    encoded = _encode_png(media) if encoding == "png" else _encode_npz(media)
    request = {"protocol": PROTOCOL, "step": prompts.step, "samples": samples, "media": encoded}
    return json.dumps(request, allow_nan=False).encode()


def check_metadata(prompts: Sequence[Prompt]) -> None:
    """Check that a server sees the metadata that a reward in this process would see.

    Raises:
        ValueError: a value that JSON changes or does not have.
    """
    for prompt in prompts:
        for column, value in prompt.metadata.items():
            try:
                is_kept = json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                is_kept = False
            if not isinstance(is_kept, bool) or not is_kept:
                raise ValueError(
                    f"column `{column}` must hold JSON for a reward that is served, got {value!r} for prompt "
                    f"{shortened(prompt.text)}."
                )


def decode_prompts(samples: Sequence[Mapping[str, Any]], step: int) -> PromptBatch:
    """Read the rows of a request whose types have been checked; numbers that are left out are the row's."""
    numbered = [{**sample, "row": row} for row, sample in enumerate(samples)]

    def number(sample: Mapping[str, Any], key: str) -> int:
        return int(sample["row"] if sample.get(key) is None else sample[key])

    return PromptBatch(
        prompts=tuple(
            Prompt(sample["prompt"], number(sample, "uid"), sample["sample_index"], sample["metadata"])
            for sample in numbered
        ),
        group_ids=tuple(number(sample, "group_id") for sample in numbered),
        sample_indices=tuple(sample["sample_index"] for sample in numbered),
        seeds=tuple(sample["seed"] for sample in numbered),
        step=step,
    )


def decode_media(media: Mapping[str, Any], *, max_bytes: int) -> Tensor:
    """Read the media of a request whose types have been checked.

    Args:
        media: with `encoding`, and `data` and `dtype` of npz or `images` of PNG.
        max_bytes: most that they may take in memory as they are stored, PNG in float32.

    Returns:
        [B, (F), C, H, W].

    Raises:
        WireError: they are not what they say, pickled (415) or too large (413).
    """
    if media["encoding"] == "png":
        return _decode_png(media["images"], max_bytes)
    return _decode_npz(_from_base64(media["data"]), max_bytes).to(_DTYPES[media["dtype"]])


def encode_answer(batch: RewardBatch) -> dict[str, Any]:
    """Write rewards [B]; JSON has no NaN, so a failed sample has null and its reason."""
    failures = {failure.row: failure.reason for failure in batch.failures}
    return {
        "rewards": [None if row in failures else reward for row, reward in enumerate(batch.rewards.tolist())],
        "failures": [{"row": row, "reason": reason} for row, reason in failures.items()],
    }


def decode_answer(content: bytes, num_samples: int, *, url: str) -> list[Any]:
    """Read rewards from a server at `url`: for each sample a number, or a `RewardError` with the reason.

    Raises:
        WireError: it is no answer to a question about so many samples.
    """
    answer = decode_object(content)
    rewards, failures = answer.get("rewards"), answer.get("failures", [])
    if not isinstance(rewards, list) or len(rewards) != num_samples:
        got = f"{len(rewards)} values" if isinstance(rewards, list) else repr(rewards)
        raise WireError(f"`rewards` must be a list of {num_samples} values, got {got}")
    try:
        reasons = {int(failure["row"]): str(failure["reason"]) for failure in failures}
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"`failures` must be a list of rows and reasons, got {failures!r}") from error
    return [
        RewardError(f"{url}: the reward there {reasons[row]}") if row in reasons else value
        for row, value in enumerate(rewards)
    ]


def decode_object(content: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        WireError: it is none.
    """
    try:
        value = json.loads(content)
    except ValueError as error:  # also of bytes that are no text
        raise WireError(f"an answer must be JSON, got {content[:40]!r}") from error
    if not isinstance(value, dict):
        raise WireError(f"an answer must be a JSON object, got {content[:40]!r}")
    return value


def served_name(reward: Reward) -> str:
    """Name a reward as `--reward` does: ours by the short name, others by the dotted path."""
    named: Any = reward if hasattr(reward, "__qualname__") else type(reward)
    own = named.__module__.startswith("digenrl.")
    return str(named.__qualname__) if own else f"{named.__module__}.{named.__qualname__}"


def _encode_npz(media: Tensor) -> dict[str, Any]:
    dtype = str(media.dtype)[6:]
    if dtype not in _DTYPES:
        raise ValueError(f"`media` must be floats to be scored by a server, got {media.dtype}.")
    stored = media.detach().cpu()
    if media.dtype == torch.bfloat16:  # numpy has none, and float32 holds all its values
        stored = stored.float()
    buffer = io.BytesIO()
    np.savez(buffer, media=stored.numpy())
    return {"encoding": "npz", "dtype": dtype, "data": base64.b64encode(buffer.getbuffer()).decode()}


def _encode_png(media: Tensor) -> dict[str, Any]:
    num_channels = media.shape[-3]
    pixels = to_uint8(media.reshape(-1, *media.shape[-3:]))[..., :num_channels]  # it makes three of one channel
    images = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image[..., 0] if num_channels == 1 else image).save(buffer, "PNG", compress_level=1)
        images.append(base64.b64encode(buffer.getbuffer()).decode())
    if media.ndim == 4:
        return {"encoding": "png", "images": images}
    num_frames = media.shape[1]
    return {
        "encoding": "png",
        "images": [images[start : start + num_frames] for start in range(0, len(images), num_frames)],
    }


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"media must be in base64: {error}") from error


def _decode_npz(data: bytes, max_bytes: int) -> Tensor:
    if data[:1] == b"\x80":  # how pickles begin
        raise WireError(_PICKLE, 415)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open(_MEMBER) as member:
            shape, is_fortran, dtype = _read_header(member)
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > max_bytes:
                raise WireError(f"media of {num_bytes} bytes are too large, at most {max_bytes} are taken", 413)
            content = member.read(num_bytes + 1)
    except WireError:
        raise
    except _NPZ_ERRORS as error:
        raise WireError(f"`data` must be an npz with an array `media`: {error}") from error
    if len(content) != num_bytes:
        raise WireError(f"the array `media` must have as many numbers as its shape {list(shape)} says")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), order="C"))


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, order and type of an array, and refuse arrays that are no media."""
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise WireError(f"an array's format must be of version 1.0 or 2.0, got {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(member)
    if dtype.hasobject:
        raise WireError(_PICKLE, 415)
    if dtype.kind != "f" or dtype.itemsize not in (2, 4, 8):
        raise WireError(f"media must be floats of 16, 32 or 64 bits, got {dtype}")
    if len(shape) not in (4, 5) or min(shape) < 1:
        raise WireError(f"media must be [B, (F), C, H, W], got shape {list(shape)}")
    return shape, is_fortran, dtype


def _decode_png(images: Sequence[str] | Sequence[Sequence[str]], max_bytes: int) -> Tensor:
    videos = [[entry] if isinstance(entry, str) else entry for entry in images]
    num_frames = len(videos[0]) if videos else 0
    is_video = bool(images) and not isinstance(images[0], str)
    if num_frames == 0 or any(len(video) != num_frames for video in videos):
        raise WireError("samples must have equally many frames, at least one")
    if any(isinstance(entry, str) is is_video for entry in images):
        raise WireError("samples must be all images or all videos")
    flat = [image for video in videos for image in video]
    first = _open_png(flat[0])
    num_bytes = 4 * len(flat) * len(first.getbands()) * first.width * first.height
    if num_bytes > max_bytes:
        raise WireError(f"media of {num_bytes} bytes are too large, at most {max_bytes} are taken", 413)
    pixels = torch.stack([_read_png(image, first) for image in flat])
    media = pixels.permute(0, 3, 1, 2).float() / 255
    return media.unflatten(0, (len(videos), num_frames)) if is_video else media


def _open_png(text: str) -> Image.Image:
    data = _from_base64(text)
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG"])
    except _PNG_ERRORS as error:
        raise WireError("an image must be a PNG file in base64") from error
    if image.mode not in ("L", "RGB"):
        raise WireError(f"an image must be 8 bits of gray or of RGB, got mode {image.mode}")
    return image


def _read_png(text: str, first: Image.Image) -> Tensor:
    """Read the pixels of one image, [H, W, C], which must be as the first one."""
    image = _open_png(text)
    if (image.size, image.mode) != (first.size, first.mode):
        raise WireError(f"images must be alike, got {image.size} {image.mode} beside {first.size} {first.mode}")
    try:
        pixels = np.array(image)
    except _PNG_ERRORS as error:
        raise WireError(f"an image is damaged: {error}") from error
    return torch.from_numpy(pixels.reshape(image.height, image.width, -1))
