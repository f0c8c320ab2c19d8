"""Texts with places for a prompt and its metadata."""

from __future__ import annotations

import string

from digenrl.rewards.reward import RewardError, shortened
from digenrl.types import Prompt


def template_columns(template: str, *, name: str) -> tuple[str, ...]:
    """Give the metadata columns that a template names: all placeholders but `{prompt}`.

    Args:
        template: text with placeholders such as `{prompt}` or `{caption}`; `{{` and `}}` stand for braces.
        name: of the setting, for messages.

    Raises:
        ValueError: it is no text, or a placeholder is more than a name.
    """
    if not isinstance(template, str):
        raise ValueError(f"`{name}` must be a text, got {template!r}.")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"`{name}` must have matching braces, got {shortened(template)}: {error}; write {{{{ for a brace."
        ) from error
    fields = [(field, spec, conversion) for _, field, spec, conversion in parts if field is not None]
    for field, spec, conversion in fields:
        if not field.isidentifier() or spec or conversion:
            written = "{" + field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise ValueError(
                f"`{name}` may name {{prompt}} and metadata columns such as {{caption}} only, got {written}; "
                "write {{ for a brace."
            )
        if field != "prompt" and field.lower() == "prompt":
            raise ValueError(f"`{name}` names {{{field}}}, but the prompt's text is {{prompt}}.")
    return tuple(dict.fromkeys(field for field, _, _ in fields if field != "prompt"))


def fill_in(template: str, prompt: Prompt) -> str:
    """Put a prompt's text and metadata in their places; braces in them stay as they are.

    Raises:
        RewardError: the prompt lacks a column.
    """
    try:
        return template.format_map({**prompt.metadata, "prompt": prompt.text})
    except KeyError as error:
        raise RewardError(
            f"needs the metadata column `{error.args[0]}`, which prompt {shortened(prompt.text)} lacks"
        ) from error
