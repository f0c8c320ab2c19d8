"""Weights of published models: a local folder or file, or one of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from digenrl.rewards.reward import RewardError

LoadedT = TypeVar("LoadedT")

DType = Literal["float32", "bfloat16"]
"""In which a network computes."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_REASON_CHARS = 200
_NAME = r"[A-Za-z0-9_][\w.\-]*"
_HUB_ID = re.compile(rf"{_NAME}(/{_NAME})?")
_HUB_FILE = re.compile(rf"(?P<repo>{_NAME}/{_NAME})/(?P<file>[^/].*)")


def as_dtype(dtype: DType) -> torch.dtype:
    """Give the dtype of that name.

    Raises:
        ValueError: another name.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"`dtype` must be {' or '.join(_DTYPES)}, got {dtype!r}.")
    return _DTYPES[dtype]


def check_folder(argument: str, source: str) -> None:
    """Check that `source` is a folder here or can be the id of a model on the hub; nothing is fetched.

    Raises:
        ValueError: it is neither; the message names `argument`.
    """
    if source and (_local(source).is_dir() or _HUB_ID.fullmatch(source)):
        return
    raise ValueError(f"`{argument}` must be a folder or the id of a model on the hub, owner/name, got {source!r}.")


def check_file(argument: str, source: str) -> None:
    """Check that `source` is a file here or can be one of the hub, as owner/name/file; nothing is fetched.

    Raises:
        ValueError: it is neither; the message names `argument`.
    """
    if _local(source).is_file() or _HUB_FILE.fullmatch(source):
        return
    raise ValueError(f"`{argument}` must be a file, or one of the hub as owner/name/file, got {source!r}.")


def load_folder(argument: str, source: str, load: Callable[[str], LoadedT]) -> LoadedT:
    """Call `load`, a `from_pretrained`, with the folder or id that `source` is.

    Raises:
        RewardError: it cannot be loaded; the message names `argument`, `source` and the remedy.
    """
    is_here = _local(source).is_dir()
    try:
        with _quiet_hub():
            return load(str(_local(source)) if is_here else source)
    except (OSError, ValueError) as error:
        remedy = (
            "it must be a folder that `save_pretrained` or `hf download` has made"
            if is_here
            else "it is no folder here, and the hub does not give it; give a local folder, made where there is a "
            f"network by `hf download {source} --local-dir FOLDER`"
        )
        raise RewardError(f"`{argument}` {source} cannot be loaded: {remedy} ({_first_sentence(error)}).") from error


def load_model(argument: str, source: str, model_class: Any) -> Any:
    """Load a model of transformers in evaluation mode; weights that the folder lacks are an error, not random ones.

    Raises:
        RewardError: it cannot be loaded, or not all of it.
    """

    def load(folder: str) -> tuple[Any, dict[str, Any]]:
        loaded: tuple[Any, dict[str, Any]] = model_class.from_pretrained(folder, output_loading_info=True)
        return loaded

    model, info = load_folder(argument, source, load)
    _refuse_missing(argument, source, info)
    return model


def model_from_state(
    argument: str, source: str, model_class: Any, config: Any, state: Mapping[str, Tensor], **settings: Any
) -> Any:
    """Make a model of transformers in evaluation mode; `settings` go to its class.

    Raises:
        RewardError: the weights are not all those of such a model, and no others.
    """
    try:
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, **settings
        )
    except RuntimeError as error:  # shapes
        raise RewardError(f"`{argument}` {source} does not fit: {_first_sentence(error)}") from error
    _refuse_missing(argument, source, info)
    unknown = sorted(info["unexpected_keys"])
    if unknown:
        raise RewardError(f"`{argument}` {source} has {len(unknown)} weights too many, the first is `{unknown[0]}`.")
    return model


def load_state(argument: str, source: str) -> dict[str, Any]:
    """Read what a file of weights holds: safetensors, or tensors that `torch.save` wrote; no code in it is run.

    Raises:
        RewardError: it cannot be had or read; the message names `argument`, `source` and the remedy.
    """
    file = _file(argument, source)
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        read: Callable[[], dict[str, Any]] = lambda: load_file(file)  # noqa: E731
    else:
        read = lambda: torch.load(file, map_location="cpu", weights_only=True)  # noqa: E731
    try:
        state = read()
    except Exception as error:  # each format has its own kinds
        raise RewardError(
            f"`{argument}` {source} cannot be read: it must be a .safetensors file or one of `torch.save` that holds "
            f"nothing but tensors ({_first_sentence(error)})."
        ) from error
    if not isinstance(state, dict):
        raise RewardError(f"`{argument}` {source} must hold a dict of tensors, got {type(state).__name__}.")
    return state


def _file(argument: str, source: str) -> Path:
    """Find a file here, or fetch it from the hub."""
    match = _HUB_FILE.fullmatch(source)
    if _local(source).is_file() or match is None:
        return _local(source)
    from huggingface_hub import hf_hub_download

    try:
        with _quiet_hub():
            return Path(hf_hub_download(match["repo"], match["file"]))
    except (OSError, ValueError) as error:
        raise RewardError(
            f"`{argument}` {source} cannot be loaded: it is no file here, and the hub does not give it; give a local "
            f"file, fetched where there is a network by `hf download {match['repo']} {match['file']} --local-dir "
            f"FOLDER` ({_first_sentence(error)})."
        ) from error


def _refuse_missing(argument: str, source: str, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise RewardError(f"`{argument}` {source} lacks {len(missing)} weights, the first is `{missing[0]}`.")


def _local(source: str) -> Path:
    return Path(source).expanduser()


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Leave out what the hub's client says of each try; what it says at last is the error's text."""
    from huggingface_hub import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def bounded(text: str) -> str:
    """Cut what another library says, which may name each of a network's weights."""
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."


def _first_sentence(error: BaseException) -> str:
    """Name an error and begin what it says: other libraries' errors go on with advice that is not for ours."""
    line = next(iter(str(error).strip().splitlines()), "")
    sentence = bounded(line.partition(". ")[0].removesuffix("."))
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__
