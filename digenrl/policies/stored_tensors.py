"""Where tensors lie in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: str
    key: str
    """Its name there."""


def stored_tensors(
    source: str | Path, *, prefix: str = "", rename: Callable[[str], str | None] | Mapping[str, str] | None = None
) -> dict[str, StoredTensor]:
    """Map the names of a policy's tensors to safetensors files, without reading a tensor.

    Args:
        source: a safetensors file, an index of several (`*.safetensors.index.json`), or a folder with either.
        prefix: put before each name: the path of the module in the policy that the files are of.
        rename: from a file's name to the module's; a function gives None for what the module does not have. Names that
            a mapping lacks stay.

    Raises:
        FileNotFoundError: no such file, or a folder with none.
        ValueError: a folder with several indices.
    """
    names: dict[str, StoredTensor] = {}
    for key, path in _paths_by_key(Path(source)).items():
        name = key if rename is None else rename(key) if callable(rename) else rename.get(key, key)
        if name is not None:
            names[prefix + name] = StoredTensor(str(path), key)
    return names


def _paths_by_key(source: Path) -> dict[str, Path]:
    if source.is_dir():
        indices = sorted(source.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            found = ", ".join(index.name for index in indices)
            raise ValueError(f"`{source}` has several indices of weights, name one: {found}.")
        files = indices or sorted(source.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"`{source}` has no safetensors file.")
        return {key: path for file in files for key, path in _paths_by_key(file).items()}
    if not source.is_file():
        raise FileNotFoundError(f"there is no file `{source}` with weights.")
    if source.suffix == ".json":
        weight_map = json.loads(source.read_text(encoding="utf-8"))["weight_map"]
        return {key: source.parent / file for key, file in weight_map.items()}
    from safetensors import safe_open

    with safe_open(source, framework="pt") as file:
        return dict.fromkeys(file.keys(), source)
