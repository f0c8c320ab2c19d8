"""Text embeddings, computed once for each prompt."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from torch import Tensor

Embedding: TypeAlias = Mapping[str, Tensor]
"""The fields of a condition of one row, each [1, ...]."""

_MAX_BYTES = 2 << 30
_CHUNK_BYTES = 1 << 24


class EmbeddingCache:
    """Embeddings of prompts, in memory up to 2 GiB, and in a folder that runs and processes may share.

    A prompt is always encoded alone, so its embedding does not depend on the prompts that were asked for with it.
    In the folder, an embedding is a safetensors file whose name is a hash of the prompt and of all that it was made
    with; files appear whole.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._kept: OrderedDict[str, Embedding] = OrderedDict()
        self._num_bytes = 0

    def get(
        self,
        prompts: Sequence[str],
        encode: Callable[[Sequence[str]], Iterable[Embedding]],
        fingerprint: Callable[[], str],
    ) -> list[Embedding]:
        """Give the embeddings of prompts, on the CPU.

        Args:
            prompts: in any number, and as often as they like.
            encode: gives the embeddings of prompts that are nowhere yet, all different, each made alone.
            fingerprint: of all that embeddings depend on but the prompt; asked for where there is a folder.
        """
        found: dict[str, Embedding] = {}
        missing = []
        for prompt in dict.fromkeys(prompts):
            embedding = self._kept.get(prompt) or self._read(prompt, fingerprint)
            if embedding is None:
                missing.append(prompt)
            else:
                found[prompt] = self._keep(prompt, embedding)
        if missing:
            for prompt, made in zip(missing, encode(missing), strict=True):
                embedding = {name: value.detach().to("cpu").contiguous() for name, value in made.items()}
                self._write(prompt, embedding, fingerprint)
                found[prompt] = self._keep(prompt, embedding)
        return [found[prompt] for prompt in prompts]

    def _keep(self, prompt: str, embedding: Embedding) -> Embedding:
        if prompt not in self._kept:
            self._kept[prompt] = embedding
            self._num_bytes += _num_bytes(embedding)
        self._kept.move_to_end(prompt)
        while self._num_bytes > _MAX_BYTES and len(self._kept) > 1:
            self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return embedding

    def _path(self, folder: Path, prompt: str, fingerprint: Callable[[], str]) -> Path:
        key = blake2b(f"{fingerprint()}\x1f{prompt}".encode(), digest_size=20).hexdigest()
        return folder / f"{key}.safetensors"

    def _read(self, prompt: str, fingerprint: Callable[[], str]) -> Embedding | None:
        if self._folder is None:
            return None
        from safetensors.torch import load_file

        path = self._path(self._folder, prompt, fingerprint)
        return load_file(path) if path.is_file() else None

    def _write(self, prompt: str, embedding: Embedding, fingerprint: Callable[[], str]) -> None:
        if self._folder is None:
            return
        from safetensors.torch import save_file

        path = self._path(self._folder, prompt, fingerprint)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{uuid4().hex}")
        save_file(dict(embedding), partial, metadata={"prompt": prompt, "made_with": fingerprint()})
        partial.replace(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": OrderedDict(), "_num_bytes": 0}


def fingerprint_files(files: Iterable[Path], settings: Mapping[str, Any], *, memo: Path) -> str:
    """Hash the content of files and settings.

    Args:
        files: in any order.
        settings: that JSON can hold.
        memo: folder in which the hashes of large files are noted, with size and time of change, and not computed again.
    """
    whole = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=20)
    for path in sorted(files):
        whole.update(f"\x1f{path.parent.name}/{path.name}\x1f".encode())
        whole.update(_file_hash(path, memo).encode())
    return whole.hexdigest()


def _file_hash(path: Path, memo: Path) -> str:
    status = path.stat()
    if status.st_size <= _CHUNK_BYTES:
        return blake2b(path.read_bytes(), digest_size=20).hexdigest()
    name = blake2b(f"{path.resolve()}\x1f{status.st_size}\x1f{status.st_mtime_ns}".encode(), digest_size=20).hexdigest()
    note = memo / f"{name}.hash"
    if note.is_file():
        return note.read_text(encoding="utf-8")
    content = blake2b(digest_size=20)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            content.update(chunk)
    memo.mkdir(parents=True, exist_ok=True)
    partial = note.with_suffix(f".{os.getpid()}-{uuid4().hex}")
    partial.write_text(content.hexdigest(), encoding="utf-8")
    partial.replace(note)
    return content.hexdigest()


def _num_bytes(embedding: Embedding) -> int:
    return sum(value.numel() * value.element_size() for value in embedding.values())
