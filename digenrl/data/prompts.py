"""Prompts from a file to the steps of a run."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from digenrl.data.fields import read_fields
from digenrl.types import Prompt, derive_seed

log = logging.getLogger(__name__)


class PromptData(LightningDataModule):
    """A step's prompts from a list or a file.

    A `.txt` file holds a prompt a line; a `.jsonl` file holds an object a line with the key `prompt`, whose other
    keys become `Prompt.metadata`. Empty lines are skipped and counted in the log; everything else is kept as it
    is, equal prompts as separate ones. Four keys are for the policy: `image`, `images` and `video` are paths of files,
    relative to the folder of the `.jsonl` file, and `negative_prompt` is what guidance leads away from.

    Training order: passes over all prompts, each in its own random order, laid end to end and cut into steps. No
    prompt is left out at the end of a pass; a step may reach into the next one. An epoch is the number of steps
    that covers all prompts. The order depends on `seed` and the position alone, so a run resumes anywhere.
    """

    def __init__(
        self,
        prompts: str | Path | list[str],
        *,
        prompts_per_step: int,
        shuffle: bool = True,
        validation_prompts: str | Path | list[str] | None = None,
        validation_samples_per_prompt: int = 1,
        validation_batch_size: int = 64,
        seed: int | None = None,
    ) -> None:
        """Read the prompts.

        Args:
            prompts: the prompts, or the path of a `.txt` or `.jsonl` file.
            prompts_per_step: prompts of a step, each of which becomes one group of samples.
            shuffle: whether each pass has an order of its own.
            validation_prompts: prompts to validate on; None turns validation off.
            validation_samples_per_prompt: how often each of them is sampled.
            validation_batch_size: samples of a validation batch.
            seed: fixes the order; None takes the seed given to `seed_everything`, or 0.

        Raises:
            FileNotFoundError: a path that does not exist, of a file or of an image or video in it.
            ValueError: a file that holds no prompts or a bad line, or a count out of its bounds.
        """
        super().__init__()
        counts = {
            "prompts_per_step": prompts_per_step,
            "validation_samples_per_prompt": validation_samples_per_prompt,
            "validation_batch_size": validation_batch_size,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"`{name}` is a count and must be at least 1, got {value}.")
        self.prompts = read_prompts(prompts, name="prompts")
        if prompts_per_step > len(self.prompts):
            raise ValueError(
                f"`prompts_per_step` is {prompts_per_step}, but `prompts` holds {len(self.prompts)}: "
                "take at most as many, a group needs a prompt of its own."
            )
        self.prompts_per_step = prompts_per_step
        self.shuffle = shuffle
        self.validation_prompts = (
            [] if validation_prompts is None else read_prompts(validation_prompts, name="validation_prompts")
        )
        self.validation_samples_per_prompt = validation_samples_per_prompt
        self.validation_batch_size = validation_batch_size
        self.seed = seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def train_dataloader(self) -> PromptLoader:
        """Give the steps' prompts; each rank of a data-parallel strategy gets its share."""
        num_ranks = self.trainer.world_size if self.trainer is not None else 1
        rank = self.trainer.global_rank if self.trainer is not None else 0
        if self.prompts_per_step % num_ranks != 0:
            raise ValueError(
                f"`prompts_per_step` must be divisible by the {num_ranks} ranks of the strategy, "
                f"got {self.prompts_per_step}."
            )
        return PromptLoader(
            self.prompts,
            self.prompts_per_step,
            self.seed,
            shuffle=self.shuffle,
            rank=rank,
            num_ranks=num_ranks,
            limit=self.trainer.limit_train_batches if self.trainer is not None else None,
        )

    def val_dataloader(self) -> list[DataLoader[Prompt]]:
        """Give validation batches, the same in every validation; an empty list turns validation off."""
        rows = [
            Prompt(prompt.text, prompt.uid, index, prompt.metadata)
            for prompt in self.validation_prompts
            for index in range(self.validation_samples_per_prompt)
        ]
        size = self.validation_batch_size
        return [DataLoader(_PromptRows(rows), batch_size=size, collate_fn=list)] if rows else []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave prompts as they are: they hold no tensors."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Save the seed, so that a resumed run continues in the same order."""
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the checkpoint's seed."""
        self.seed = state_dict["seed"]


class _PromptRows(Dataset[Prompt]):
    def __init__(self, rows: Sequence[Prompt]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._rows[index]


def epoch_length(loader: Any, limit: int | float | None) -> int | None:
    """Give the batches that Lightning takes of an epoch, None if it takes what there is of an unknown number.

    Args:
        loader: with or without a length.
        limit: Lightning's `limit_train_batches`: a count, a share, or None.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):  # as Lightning asks: a loader may have a `__len__` that cannot answer
        length = None
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    return length if length is None or limit is None else int(length * limit)


class PromptLoader:
    """Yields one list of prompts per step, computed from the position alone."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        prompts_per_step: int,
        seed: int,
        *,
        shuffle: bool,
        rank: int = 0,
        num_ranks: int = 1,
        limit: int | float | None = None,
    ) -> None:
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._num_ranks = num_ranks
        self._limit = limit
        self._epoch = -1
        self._num_yielded = 0
        self._start = 0
        self._cached_order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Steps of an epoch."""
        return -(-len(self._prompts) // self._prompts_per_step)

    def __iter__(self) -> Iterator[list[Prompt]]:
        self._epoch += 1
        start, self._start = self._start, 0
        for num_yielded, batch in enumerate(self.batches(self._epoch, start=start), start + 1):
            self._num_yielded = num_yielded
            yield batch

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[list[Prompt]]:
        """Give the batches of an epoch from the `start`-th on, without touching the loader's own position."""
        for step in range(epoch * len(self) + start, (epoch + 1) * len(self)):
            share = self._prompts_per_step // self._num_ranks
            first = step * self._prompts_per_step + self._rank * share
            yield [self._prompt_at(position) for position in range(first, first + share)]

    def state_dict(self) -> dict[str, int]:
        """Give the position, for resuming under a stock Lightning strategy."""
        return {"epoch": self._epoch, "num_yielded": self._num_yielded}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the last batch that was yielded."""
        self._epoch, self._num_yielded = state_dict["epoch"], state_dict["num_yielded"]
        self._start = 0
        num_batches = epoch_length(self, self._limit)
        assert num_batches is not None, "the loader has a length"
        if self._epoch >= 0 and self._num_yielded < num_batches:
            self._epoch, self._start = self._epoch - 1, self._num_yielded

    def _prompt_at(self, position: int) -> Prompt:
        number, index = divmod(position, len(self._prompts))
        return self._prompts[self._order(number)[index]]

    def _order(self, number: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        if self._cached_order[0] != number:
            rng = torch.Generator().manual_seed(derive_seed(self._seed, "prompts", number))
            self._cached_order = (number, torch.randperm(len(self._prompts), generator=rng).tolist())
        return self._cached_order[1]


def read_prompts(source: str | Path | list[str], *, name: str = "prompts") -> list[Prompt]:
    """Read prompts from a list, a `.txt` or a `.jsonl` file; `uid` is the row.

    Raises:
        FileNotFoundError: there is no such file, or none of an image or video that it names.
        ValueError: no prompts, another kind of file, or a line that is not what it should be.
    """
    if isinstance(source, list):
        for row, text in enumerate(source):
            if not isinstance(text, str):
                raise ValueError(f"`{name}` must hold strings, got {type(text).__name__} {text!r} in row {row}.")
        prompts = [Prompt(text, uid) for uid, text in enumerate(source)]
        where = "the list"
    else:
        path = Path(source)
        _check_file(path, name)
        where = f"`{path}`"
        lines = _read_lines(path, name)
        filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if len(filled) < len(lines):
            log.info("skipped %d empty lines of %s", len(lines) - len(filled), path)
        parse = _parse_json if path.suffix == ".jsonl" else _parse_text
        places = [f"{path}:{number}" for number, _ in filled]
        prompts = [parse(line, uid, places[uid]) for uid, (_, line) in enumerate(filled)]
        prompts = read_fields(prompts, places, path.parent)
    if not prompts:
        raise ValueError(f"`{name}` must hold at least one prompt, {where} holds none.")
    num_repeated = len(prompts) - len({prompt.text for prompt in prompts})
    if num_repeated:
        log.info("%d prompts of %s repeat earlier ones; each keeps a group of its own", num_repeated, where)
    return prompts


def _check_file(path: Path, name: str) -> None:
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"`{name}` must be a list of prompts or a .txt or .jsonl file, got `{path}`.")
    if path.is_file():
        return
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, neighbours, n=1)
    hint = f"did you mean `{path.parent / close[0]}`?" if close else f"paths are relative to {Path.cwd()}."
    raise FileNotFoundError(f"`{name}`: there is no file `{path}`; {hint}")


def _read_lines(path: Path, name: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{name}`: `{path}` must be UTF-8, byte {error.start} is not: {error.reason}.") from error
    # Not `splitlines`, for which a prompt may hold line ends of its own, such as U+2028.
    return text.removesuffix("\n").split("\n")


def _parse_text(line: str, uid: int, where: str) -> Prompt:
    return Prompt(line, uid)


def _parse_json(line: str, uid: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}.") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{where}: a line must be an object with a string under "prompt", got {line[:80]}.')
    return Prompt(row.pop("prompt"), uid, metadata=row)
