"""Columns of a prompt file that policies read: checked with their line, paths relative to the file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from digenrl.data import read_prompts


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a", **row}) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three files beside the prompts, in a folder."""
    (tmp_path / "media").mkdir()
    names = [f"media/{name}" for name in ("a.png", "b.png", "c.mp4")]
    for name in names:
        (tmp_path / name).touch()
    return names


def test_paths_are_relative_to_the_file_and_become_absolute(
    tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, video = files
    absolute = str(tmp_path / second)
    write(tmp_path, {"image": first, "tag": 1}, {"images": [first, absolute]}, {"video": video})
    monkeypatch.chdir(tmp_path / "media")
    assert [prompt.metadata for prompt in read_prompts("../prompts.jsonl")] == [
        {"image": str(tmp_path / "media" / ".." / first), "tag": 1},
        {"images": [str(tmp_path / "media" / ".." / first), absolute]},
        {"video": str(tmp_path / "media" / ".." / video)},
    ]


def test_lines_without_a_negative_prompt_have_the_policys_own_if_others_have_one(tmp_path: Path) -> None:
    path = write(tmp_path, {"negative_prompt": "dark"}, {"tag": 1}, {"negative_prompt": ""})
    found = [prompt.metadata for prompt in read_prompts(path)]
    assert found == [{"negative_prompt": "dark"}, {"negative_prompt": None, "tag": 1}, {"negative_prompt": ""}]
    assert read_prompts(write(tmp_path, {}, {"tag": 1}))[0].metadata == {}


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"image": "gone.png"}, FileNotFoundError, "`image`: there is no file `gone.png`; paths are relative to "),
        ({"images": ["media/a.png", "gone.png"]}, FileNotFoundError, "`images`: there is no file `gone.png`"),
        ({"video": "media"}, FileNotFoundError, "`video`: there is no file `media`"),
        ({"image": ""}, ValueError, "`image` must hold paths of files, got ''"),
        ({"image": None}, ValueError, "`image` must hold paths of files, got None"),
        ({"images": "media/a.png"}, ValueError, "`images` must be a list of at least one path, got 'media/a.png'"),
        ({"images": []}, ValueError, "`images` must be a list of at least one path, got []"),
        ({"images": [1]}, ValueError, "`images` must hold paths of files, got 1"),
        ({"image": "media/a.png", "images": ["media/b.png"]}, ValueError, "`image` and `images` are two ways"),
        ({"negative_prompt": None}, ValueError, "`negative_prompt` must be a text, got None"),
    ],
)
def test_a_bad_value_is_an_error_with_file_and_line(
    tmp_path: Path, files: list[str], row: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write(tmp_path, {}, row)
    with pytest.raises(error) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert "\n" not in str(caught.value)


def test_a_column_with_nearly_such_a_name_is_pointed_out_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"tag": 1}, {"imgae": "x"}, {"imgae": "y", "negative-prompts": "z"}, {"image_id": 1, "prompt_id": 2}]
    path = write(tmp_path, *rows)
    with caplog.at_level(logging.WARNING, logger="digenrl"):
        assert [prompt.metadata for prompt in read_prompts(path)] == rows
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}:2: only rewards see the column `imgae`; did you mean `image`, which policies read?",
        f"{path}:3: only rewards see the column `negative-prompts`; did you mean `negative_prompt`, which policies "
        "read?",
    ]
