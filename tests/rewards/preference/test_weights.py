"""Where weights come from, and what is said where they do not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.rewards import RewardError
from digenrl.rewards.preference.weights import check_file, check_folder, load_folder, load_state


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("source", ["openai/clip-vit-large-patch14", "bert-base-uncased", "HERE"])
def test_a_folder_or_a_hub_id_is_accepted(source: str, tmp_path: Path) -> None:
    check_folder("model", source.replace("HERE", str(tmp_path)))


@pytest.mark.parametrize("source", ["", "/no/such", "./clip", "~/no_such_clip", "a/b/c", "-x", "a b"])
def test_what_is_neither_folder_nor_hub_id_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"`model` must be a folder or the id .*, got {source!r}"):
        check_folder("model", source)


@pytest.mark.parametrize("source", ["xswu/HPSv2/HPS_v2.1_compressed.pt", "a/b/c/d.pth", "HERE"])
def test_a_file_or_a_file_of_the_hub_is_accepted(source: str, tmp_path: Path) -> None:
    (tmp_path / "head.pth").touch()
    check_file("predictor", source.replace("HERE", str(tmp_path / "head.pth")))


@pytest.mark.parametrize("source", ["head.pth", "weights/head.pth", "/no/such/head.pth", "./a/b/head.pth", ""])
def test_what_is_neither_file_nor_file_of_the_hub_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"`predictor` must be a file, .*, got {source!r}"):
        check_file("predictor", source)


def test_a_folder_that_does_not_load_is_named_in_one_line(tmp_path: Path) -> None:
    def load(folder: str) -> None:
        raise OSError(f"no config in {folder}\nor it is a list:\n - config.json")

    with pytest.raises(RewardError, match=f"`model` {tmp_path} cannot be loaded: .*`save_pretrained`") as info:
        load_folder("model", str(tmp_path), load)
    assert str(info.value).endswith(f"(OSError: no config in {tmp_path}).")


def test_a_folder_that_is_empty_is_told_in_one_sentence_of_what_lacks(tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor

    with pytest.raises(RewardError) as info:
        load_folder("base", str(tmp_path), CLIPImageProcessor.from_pretrained)
    assert str(info.value).endswith(f"(OSError: Can't load image processor for '{tmp_path}').")


def test_what_another_library_says_is_bounded(tmp_path: Path) -> None:
    def load(folder: str) -> None:
        raise ValueError("no weight " + ", ".join(f"layer.{index}" for index in range(10_000)))

    with pytest.raises(RewardError, match="ValueError: no weight layer.0, layer.1, ") as info:
        load_folder("model", str(tmp_path), load)
    assert len(str(info.value)) < 500


def test_the_hub_s_client_does_not_say_each_time_that_it_tries_again(tmp_path: Path) -> None:
    hub, were_said = logging.getLogger("huggingface_hub.utils._http"), []

    def load(folder: str) -> None:
        were_said.append(hub.isEnabledFor(logging.WARNING))
        raise OSError("no network")

    assert hub.isEnabledFor(logging.WARNING)
    with pytest.raises(RewardError, match=r"\(OSError: no network\)"):
        load_folder("model", "owner/name", load)
    assert were_said == [False]
    assert hub.isEnabledFor(logging.WARNING)


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    torch.save({"layers.0.weight": Trap(tmp_path / "sprung")}, tmp_path / "head.pth")
    with pytest.raises(RewardError, match="`predictor` .*head.pth cannot be read: .* holds nothing but tensors"):
        load_state("predictor", str(tmp_path / "head.pth"))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["head.pth", "head.safetensors"])
def test_a_file_of_something_else_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("<html>not found</html>")
    with pytest.raises(RewardError, match=f"`predictor` .*{name} cannot be read"):
        load_state("predictor", str(tmp_path / name))
    torch.save(torch.zeros(2), tmp_path / "tensor.pth")
    with pytest.raises(RewardError, match=r"tensor.pth must hold a dict of tensors, got Tensor"):
        load_state("predictor", str(tmp_path / "tensor.pth"))
