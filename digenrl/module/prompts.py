"""What a module accepts as a batch of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.types import Prompt


def as_prompts(batch: Sequence[Prompt | str], *, first_uid: int = 0) -> list[Prompt]:
    """Accept what a data loader yields: prompts, or plain strings, which are numbered from `first_uid`.

    Raises:
        TypeError: anything else.
    """
    if isinstance(batch, (str, bytes)) or not isinstance(batch, Sequence):
        raise TypeError(f"a training batch must be a list of prompts, got {type(batch).__name__}.")
    prompts = []
    for row, prompt in enumerate(batch):
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt, uid=first_uid + row)
        if not isinstance(prompt, Prompt):
            raise TypeError(f"a batch must hold `Prompt`s or strings, got {type(prompt).__name__} in row {row}.")
        prompts.append(prompt)
    if not prompts:
        raise TypeError("a training batch holds no prompts.")
    return prompts
