"""Prompts from files to steps: nothing dropped in silence, and the same order after a resume."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl import Prompt, PromptData
from digenrl.data import PromptLoader, read_prompts

TRICKY = [
    "a cat", "a cat ", " a cat", "猫が走る", "ünï", "🦊🚀", "x" * 10_000, 'with "quotes" and \\ backslash', "a\tb",
    "a cat", "line\u2028separator", "form\x0cfeed", "next\x85line", "file\x1cseparator",
]  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


# ---- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_every_line_of_a_text_file_is_a_prompt_as_it_stands(tmp_path: Path, start: str, end: str) -> None:
    path = write(tmp_path / "prompts.txt", start + end.join(TRICKY) + end)
    assert read_prompts(path) == [Prompt(text, uid) for uid, text in enumerate(TRICKY)]


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_every_line_of_a_json_file_is_a_prompt_with_its_other_columns(tmp_path: Path, ensure_ascii: bool) -> None:
    rows = [{"id": row, "prompt": text, "tags": ["x"]} for row, text in enumerate(TRICKY)]
    lines = [json.dumps(row, ensure_ascii=ensure_ascii) for row in rows]
    prompts = read_prompts(write(tmp_path / "prompts.jsonl", "\ufeff" + "\r\n".join(lines)))
    assert texts(prompts) == TRICKY
    assert [prompt.uid for prompt in prompts] == list(range(len(TRICKY)))
    assert [prompt.metadata for prompt in prompts] == [{"id": row["id"], "tags": ["x"]} for row in rows]


def test_empty_lines_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "prompts.txt", "\n\na\n  \nb\n\t\n")
    with caplog.at_level(logging.INFO, logger="digenrl"):
        prompts = read_prompts(path)
    assert prompts == [Prompt("a", 0), Prompt("b", 1)]
    assert [record.getMessage() for record in caplog.records] == [f"skipped 4 empty lines of {path}"]


def test_a_last_line_without_an_end_counts_and_a_last_end_is_no_empty_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="digenrl"):
        assert texts(read_prompts(write(tmp_path / "open.txt", "a\nb"))) == ["a", "b"]
        assert texts(read_prompts(write(tmp_path / "closed.txt", "a\nb\n"))) == ["a", "b"]
    assert caplog.records == []


def test_repeated_prompts_are_kept_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="digenrl"):
        prompts = read_prompts(["a", "b", "a", "a", "a "])
    assert [(prompt.text, prompt.uid) for prompt in prompts] == [("a", 0), ("b", 1), ("a", 2), ("a", 3), ("a ", 4)]
    assert "2 prompts of the list repeat earlier ones" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not JSON"),
        ('["a"]', "string under"),
        ('{"text": "a"}', "string under"),
        ('{"prompt": 3}', "string under"),
        ('{"prompt": null}', "string under"),
        ('"a"', "string under"),
    ],
)
def test_a_bad_json_line_is_an_error_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "prompts.jsonl", '{"prompt": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("content", ["", "\n", "\ufeff", " \n\t\n"])
def test_a_file_without_prompts_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "prompts.txt", content)
    with pytest.raises(ValueError, match="`validation_prompts` must hold at least one") as caught:
        read_prompts(path, name="validation_prompts")
    assert str(path) in str(caught.value)


def test_a_file_in_another_encoding_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("café\n".encode("latin-1"))
    with pytest.raises(ValueError, match="UTF-8") as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("bad", [None, 3, b"a"])
def test_a_prompt_in_a_list_that_is_no_string_is_an_error_with_its_row(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"`prompts`.*{type(bad).__name__}.*row 1"):
        read_prompts(["a", bad])


def test_a_missing_file_is_an_error_that_proposes_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "prompts.txt", "a")
    write(tmp_path / "other.txt", "a")
    with pytest.raises(FileNotFoundError, match="`prompts`: there is no file") as caught:
        read_prompts(tmp_path / "promts.txt")
    assert f"did you mean `{tmp_path / 'prompts.txt'}`?" in str(caught.value)


def test_a_missing_file_without_a_like_name_says_what_paths_are_relative_to(tmp_path: Path) -> None:
    for path in (tmp_path / "zebra.txt", tmp_path / "no_such_folder" / "prompts.txt"):
        with pytest.raises(FileNotFoundError, match="paths are relative to") as caught:
            read_prompts(path)
        assert str(Path.cwd()) in str(caught.value)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_prompts(tmp_path / "prompts.txt")


@pytest.mark.parametrize("name", ["prompts.csv", "prompts", "prompts.json"])
def test_another_kind_of_file_is_an_error_that_names_those_that_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.txt or \.jsonl") as caught:
        read_prompts(write(tmp_path / name, "a"))
    assert str(tmp_path / name) in str(caught.value)


# ---- the data module -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts_per_step": 0}, "`prompts_per_step`.*at least 1, got 0"),
        ({"prompts_per_step": 1, "validation_samples_per_prompt": 0}, "`validation_samples_per_prompt`.*got 0"),
        ({"prompts_per_step": 1, "validation_batch_size": -1}, "`validation_batch_size`.*got -1"),
        ({"prompts_per_step": 4}, "`prompts_per_step` is 4, but `prompts` holds 3"),
        ({"prompts_per_step": 1, "validation_prompts": []}, "`validation_prompts` must hold at least one"),
    ],
)
def test_a_bad_count_is_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptData(["a", "b", "c"], **settings)


def test_validation_asks_for_every_prompt_as_often_as_told_and_the_same_every_time() -> None:
    data = PromptData(
        ["a"], prompts_per_step=1, validation_prompts=["x", "y", "x"], validation_samples_per_prompt=2,
        validation_batch_size=4,
    )  # fmt: skip
    batches = [batch for loader in data.val_dataloader() for batch in loader]
    assert [len(batch) for batch in batches] == [4, 2]
    rows = [(prompt.text, prompt.uid, prompt.sample_index) for batch in batches for prompt in batch]
    assert rows == [("x", 0, 0), ("x", 0, 1), ("y", 1, 0), ("y", 1, 1), ("x", 2, 0), ("x", 2, 1)]
    assert batches == [batch for loader in data.val_dataloader() for batch in loader]


def test_without_validation_prompts_there_is_no_validation() -> None:
    assert PromptData(["a"], prompts_per_step=1).val_dataloader() == []


def test_the_seed_is_the_given_one_then_the_global_one_then_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert PromptData(["a"], prompts_per_step=1).seed == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert PromptData(["a"], prompts_per_step=1).seed == 5
    assert PromptData(["a"], prompts_per_step=1, seed=7).seed == 7


def test_a_resumed_run_continues_with_the_checkpoints_order() -> None:
    words = [str(number) for number in range(20)]
    first, second = (PromptData(words, prompts_per_step=3, seed=seed) for seed in (1, 2))
    second.load_state_dict(first.state_dict())
    assert list(second.train_dataloader()) == list(first.train_dataloader())


# ---- the order -----------------------------------------------------------------------------------------------

SIZES = st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


def loader_of(size: int, per_step: int, *, seed: int = 0, shuffle: bool = True, **ranks: int) -> PromptLoader:
    prompts = [Prompt(f"{row // 2}", row) for row in range(size)]  # texts repeat, rows do not
    return PromptLoader(prompts, per_step, seed, shuffle=shuffle, **ranks)


def uids(batches: Any) -> list[list[int]]:
    return [[prompt.uid for prompt in batch] for batch in batches]


@given(SIZES, st.integers(0, 2**31), st.booleans())
def test_every_prompt_comes_equally_often_over_whole_passes(sizes: tuple[int, int], seed: int, shuffle: bool) -> None:
    size, per_step = sizes
    loader = loader_of(size, per_step, seed=seed, shuffle=shuffle)
    stream = [uid for _ in range(2 * size) for batch in uids(loader) for uid in batch]
    assert len(stream) >= 2 * size
    for start in range(0, len(stream) - size + 1, size):
        assert sorted(stream[start : start + size]) == list(range(size))
    counts = Counter(stream)
    assert max(counts.values()) - min(counts[uid] for uid in range(size)) <= 1


@given(SIZES)
def test_an_epoch_is_the_fewest_steps_that_cover_all_prompts(sizes: tuple[int, int]) -> None:
    size, per_step = sizes
    batches = uids(loader_of(size, per_step))
    assert len(batches) == len(loader_of(size, per_step))
    assert len(batches) * per_step >= size > (len(batches) - 1) * per_step
    assert {len(batch) for batch in batches} == {per_step}
    assert {uid for batch in batches for uid in batch} == set(range(size))


def test_each_pass_and_each_seed_has_an_order_of_its_own() -> None:
    loader, other = loader_of(30, 30), loader_of(30, 30, seed=1)
    orders = [uids(loader)[0], uids(loader)[0], uids(other)[0], uids(other)[0]]
    assert len({tuple(order) for order in orders}) == 4
    assert uids(loader_of(4, 2, shuffle=False)) == [[0, 1], [2, 3]]


@given(SIZES, st.integers(0, 100), st.integers(0, 20))
def test_a_resume_at_any_position_gives_the_rest_of_the_uninterrupted_run(
    sizes: tuple[int, int], seed: int, position: int
) -> None:
    def stream(loader: PromptLoader, length: int) -> list[list[int]]:
        batches: list[list[int]] = []
        while len(batches) < length:
            for batch in loader:
                batches.append([prompt.uid for prompt in batch])
                if len(batches) == length:
                    break
        return batches

    first, second = loader_of(*sizes, seed=seed), loader_of(*sizes, seed=seed)
    whole = stream(loader_of(*sizes, seed=seed), position + 15)
    assert stream(first, position) == whole[:position]
    second.load_state_dict(first.state_dict())
    assert stream(second, 15) == whole[position:]


def test_batches_of_an_epoch_can_be_looked_at_without_moving_on() -> None:
    loader, untouched = loader_of(7, 2), loader_of(7, 2)
    iterator, reference = iter(loader), iter(untouched)
    assert next(iterator) == next(reference)
    assert len(list(loader.batches(3, start=2))) == 2
    assert loader.state_dict() == untouched.state_dict()
    assert list(iterator) == list(reference)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(0, 50))
def test_ranks_share_the_steps_of_one_process(num_ranks: int, share: int, extra: int, seed: int) -> None:
    size, per_step = num_ranks * share + extra, num_ranks * share
    ranks = [loader_of(size, per_step, seed=seed, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    alone = loader_of(size, per_step, seed=seed)
    for _ in range(3):
        shares = [uids(loader) for loader in ranks]
        assert [sum(parts, []) for parts in zip(*shares, strict=True)] == uids(alone)
