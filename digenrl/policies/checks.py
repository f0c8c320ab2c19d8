"""Checks of settings that policies of pipelines have in common, by the names that the user knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from digenrl.policies.pipeline_files import may_be_on_the_hub


def check_multiple(name: str, value: int, factor: int) -> None:
    """Check a size in pixels.

    Raises:
        ValueError: it is not a multiple of what the VAE and the patches of the transformer make of one.
    """
    if value % factor:
        below = value // factor * factor
        nearest = f"{below} and {below + factor}" if below else str(factor)
        raise ValueError(f"`{name}` must be a multiple of {factor} for this model, got {value}; near are {nearest}.")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Check a setting that is one of a few names.

    Raises:
        ValueError: it is none of them.
    """
    if value not in known:
        raise ValueError(f"`{name}` must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}.")


def check_adapter_settings(
    *,
    rank: int | None,
    alpha: float | None,
    targets: Sequence[str] | str | None,
    init: str,
    default_init: str,
    adapter: str | None,
) -> None:
    """Check that what is said of an adapter has one to be about.

    Raises:
        ValueError: a setting would have no effect.
    """
    if rank is None and adapter is None and (alpha is not None or targets is not None):
        raise ValueError("`lora_alpha` and `lora_targets` need a `lora_rank`: without one, all weights are trained.")
    if init != default_init and (rank is None or adapter is not None):
        raise ValueError(
            f"`lora_init` must be left out without a `lora_rank`, and with an `adapter`, whose weights are the start, "
            f"got {init!r}."
        )


def check_is_there(name: str, adapter: str | None) -> None:
    """Check that an adapter's file or folder is there, as far as that is known without the network.

    Raises:
        FileNotFoundError: it is not.
    """
    if adapter is not None and not Path(adapter).exists() and not may_be_on_the_hub(adapter):
        raise FileNotFoundError(f"`{name}` {adapter!r} is not there: give the file or folder of a LoRA, or a hub id.")


def check_embedded_guidance(guidance: float | None, is_told: bool, *, default: float) -> float | None:
    """Give the guidance that a transformer is told, None if it is told none.

    Raises:
        ValueError: `guidance` is given and the model has no place for it, or is out of bounds.
    """
    if guidance is not None and not is_told:
        raise ValueError(
            f"`guidance` is for models that are told it, which this one is not: leave it out, got {guidance}."
        )
    if guidance is not None and not 0 <= guidance < float("inf"):
        raise ValueError(f"`guidance` must be at least 0, got {guidance}.")
    if not is_told:
        return None
    return default if guidance is None else guidance
