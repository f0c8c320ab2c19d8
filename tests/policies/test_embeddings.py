from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.policies import FluxPolicy, embeddings
from digenrl.policies.embeddings import EmbeddingCache, fingerprint_files
from digenrl.policies.stored_weights import load_stored_weights
from tests.policies.test_pipeline import changed_copy
from tests.policies.tiny_pipelines import PROMPTS, save_tiny_pipeline


class Encoder:
    """Encodes a prompt to its length, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, prompts: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        for prompt in prompts:
            self.asked.append(prompt)
            yield {"length": torch.full((1, 4), float(len(prompt)))}


def get(cache: EmbeddingCache, prompts: Sequence[str], encoder: Encoder, fingerprint: str = "a") -> list[float]:
    return [entry["length"][0, 0].item() for entry in cache.get(prompts, encoder, lambda: fingerprint)]


def test_a_prompt_is_encoded_once() -> None:
    cache, encoder = EmbeddingCache(), Encoder()
    assert get(cache, ["one", "three", "one"], encoder) == [3, 5, 3]
    assert get(cache, ["three", "seven", ""], encoder) == [5, 5, 0]
    assert encoder.asked == ["one", "three", "seven", ""]


def test_embeddings_on_disk_are_found_by_another_process_with_the_same_encoders(tmp_path: Path) -> None:
    encoder = Encoder()
    get(EmbeddingCache(tmp_path / "new"), ["one", "two"], encoder)
    assert get(EmbeddingCache(tmp_path / "new"), ["two", "one"], encoder) == [3, 3]
    assert encoder.asked == ["one", "two"]
    get(EmbeddingCache(tmp_path / "new"), ["one"], encoder, fingerprint="b")
    assert encoder.asked == ["one", "two", "one"]
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".safetensors"] * 3


def test_memory_is_bounded_and_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_MAX_BYTES", 2 * 16)
    cache, encoder = EmbeddingCache(), Encoder()
    for prompts in (["a"], ["b"], ["a"], ["c"], ["a"], ["b"]):
        get(cache, prompts, encoder)
    assert encoder.asked == ["a", "b", "c", "b"]
    assert get(cache, ["a", "b", "c", "d"], encoder) == [1, 1, 1, 1], "more than fit are still given"


def test_a_fingerprint_changes_with_settings_and_with_a_byte_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_CHUNK_BYTES", 8)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(range(100)))
    config.write_text("{}")

    def fingerprint(**settings: Any) -> str:
        return fingerprint_files([weights, config], settings, memo=tmp_path / "memo")

    first = fingerprint(length=16)
    assert fingerprint(length=16) == first
    assert fingerprint(length=32) != first
    changed = bytearray(range(100))
    changed[57] += 1
    weights.write_bytes(changed)
    assert fingerprint(length=16) != first
    weights.write_bytes(bytes(range(100)))
    assert fingerprint(length=16) == first
    config.write_text("{ }")
    assert fingerprint(length=16) != first


def test_a_policy_reads_embeddings_without_its_encoders_unless_they_have_changed(
    tiny_pipeline: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"height": 8, "width": 8, "dtype": "float32", "embedding_cache": str(tmp_path / "cache")}

    def encode(path: str, **changes: Any) -> Tensor:
        policy = FluxPolicy(path, **{**settings, "max_sequence_length": 16, **changes})
        policy.build()
        load_stored_weights(policy)
        return policy.encode(PROMPTS[:2]).embeddings

    first = encode(tiny_pipeline("flux"))
    with monkeypatch.context() as patch:
        patch.setattr("digenrl.policies.components.TextEncoding._load", None)
        assert torch.equal(encode(tiny_pipeline("flux")), first)
    other = encode(str(save_tiny_pipeline("flux", tmp_path / "other", seed=1)))
    assert not torch.equal(other, first)
    assert encode(tiny_pipeline("flux"), max_sequence_length=8).shape == (2, 8, 32)


def test_embeddings_depend_on_all_parts_that_encode_texts(tiny_pipeline: Callable[[str], str], tmp_path: Path) -> None:
    """Whatever they are called; what a schedule or a VAE is has no part in it."""
    path = tmp_path / "pipeline"
    changed_copy(tiny_pipeline("flux"), path, "", language_model=["transformers", "LlamaModel"])
    weights = path / "language_model/model.safetensors"
    weights.parent.mkdir()

    def fingerprint() -> str:
        policy = FluxPolicy(str(path), height=8, width=8, embedding_cache=str(tmp_path / "cache"))
        policy.register_parameter("a", torch.nn.Parameter(torch.zeros(1)))  # for its device
        return policy._fingerprint()

    weights.write_bytes(b"a")
    first = fingerprint()
    for other in ("vae", "scheduler", "transformer"):
        (path / other / "more.json").write_text("{}")
    assert fingerprint() == first
    weights.write_bytes(b"b")
    assert fingerprint() != first
