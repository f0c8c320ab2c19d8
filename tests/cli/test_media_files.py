from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from digenrl.cli.errors import UsageError
from digenrl.cli.media_files import read_image, read_video

HALF_RED_ON_WHITE = (1.0, 127 / 255, 127 / 255)


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGB", (51, 102, 255), (0.2, 0.4, 1.0)),
        ("L", 51, (0.2, 0.2, 0.2)),
        ("1", 1, (1.0, 1.0, 1.0)),
        ("LA", (0, 0), (1.0, 1.0, 1.0)),  # nothing but transparency
        ("RGBA", (255, 0, 0, 128), HALF_RED_ON_WHITE),
        ("CMYK", (0, 0, 0, 0), (1.0, 1.0, 1.0)),
    ],
)
def test_every_mode_becomes_three_channels(tmp_path: Path, mode: str, color: Any, expected: tuple[float, ...]) -> None:
    path = tmp_path / ("x.tiff" if mode == "CMYK" else "x.png")
    Image.new(mode, (5, 3), color).save(path)
    image = read_image(str(path))
    assert image.shape == (3, 3, 5)
    torch.testing.assert_close(image, torch.tensor(expected).reshape(3, 1, 1).expand(3, 3, 5))


def test_sixteen_bits_are_kept(tmp_path: Path) -> None:
    levels = np.array([[0, 30000, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "x.png")
    expected = torch.tensor([[0.0, 30000 / 65535, 1.0]]).expand(3, 1, 3)
    torch.testing.assert_close(read_image(str(tmp_path / "x.png")), expected)


def test_photograph_is_turned_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1), (0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rows of the file are columns, from the right
    image.save(tmp_path / "x.png", exif=exif)
    assert read_image(str(tmp_path / "x.png"))[0].tolist() == [[1.0], [0.0]]


def test_frames_of_an_animation_are_a_video(tmp_path: Path) -> None:
    first, *others = [Image.new("L", (4, 2), level) for level in (0, 255, 0)]
    first.save(tmp_path / "x.gif", save_all=True, append_images=others, duration=100)
    video = read_video(str(tmp_path / "x.gif"))
    assert video.shape == (3, 3, 2, 4)
    assert video[:, 0, 0, 0].tolist() == [0.0, 1.0, 0.0]


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="a folder without images"):
        read_video(str(tmp_path))


def test_frames_of_two_sizes_are_refused(tmp_path: Path) -> None:
    Image.new("L", (4, 2)).save(tmp_path / "1.png")
    Image.new("L", (4, 3)).save(tmp_path / "2.png")
    with pytest.raises(UsageError, match="of one size, got 4 x 2 and 4 x 3"):
        read_video(str(tmp_path))


@pytest.mark.parametrize("kind", ["cut", "floats", "empty"])
def test_what_has_no_pixels_to_judge_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.tiff" if kind == "floats" else "x.png")
    if kind == "floats":
        Image.fromarray(np.ones((2, 2), np.float32)).save(path)
    else:
        Image.effect_noise((64, 64), 50).save(path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if kind == "cut" else b"")
    with pytest.raises(UsageError, match=f"`{path}`") as caught:
        read_image(str(path))
    assert "\n" not in str(caught.value)
