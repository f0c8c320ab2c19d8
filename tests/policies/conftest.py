"""The tiny pipelines, each made once in a process of tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.policies.tiny_pipelines import save_tiny_pipeline


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Give the folder of a tiny pipeline: flux, sd3, qwen, wan or hunyuan."""
    saved: dict[str, Path] = {}

    def folder(name: str) -> str:
        if name not in saved:
            saved[name] = save_tiny_pipeline(name, tmp_path_factory.mktemp("pipelines") / name)
        return str(saved[name])

    return folder
