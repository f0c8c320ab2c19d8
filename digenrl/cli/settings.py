"""Settings of the commands that need no torch: dataclasses from files and options, and mistakes on one line."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from digenrl.cli.annotations import Alternatives, accepts
from digenrl.cli.arguments import Arguments
from digenrl.cli.errors import Keys, SettingError, UsageError, show, suggest
from digenrl.cli.sources import Source, explain, locate

Settings = TypeVar("Settings")


def take_flags(arguments: Arguments, known: Collection[str], command: str) -> dict[str, str]:
    """Take a command's own options, such as `--format`, out of the arguments; dashes stand for underscores.

    Raises:
        UsageError: an option that is none of the command's.
    """
    if arguments.print_config:
        raise UsageError(f"`--print_config` is not an option of `digenrl {command}`{suggest('print_config', known)}")
    flags: dict[str, str] = {}
    others = []
    for option in arguments.options:
        name = option.name[2:].replace("-", "_")
        if name in known:
            flags[name] = option.value
        else:
            others.append(option)
    arguments.options[:] = others
    return flags


def check_names(given: Mapping[str, Any], known: Collection[str], keys: Keys, what: str) -> None:
    """Refuse names that are not known.

    Raises:
        SettingError: with the nearest name.
    """
    for name in given:
        if str(name) not in known:
            raise SettingError((*keys, str(name)), f"is not {what}{suggest(str(name), known)}")


def build(cls: type[Settings], given: Any, keys: Keys, sources: Sequence[Source]) -> Settings:
    """Make a dataclass of settings that a user gave.

    Raises:
        UsageError: a wrong name, type or value; the message says where it stands.
    """
    if not isinstance(given, dict):
        raise SettingError(keys, f"must be a mapping of settings of {cls.__name__}, got {show(given)}.")
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_names(given, fields, keys, f"a setting of {cls.__name__}")
    kinds = typing.get_type_hints(cls)
    for name, entry in fields.items():
        if entry.default is dataclasses.MISSING and name not in given:
            raise SettingError((*keys, name), f"is missing: {Alternatives.of(kinds[name]).describe()}.")
    values = {name: convert(value, kinds[name], (*keys, name)) for name, value in given.items()}
    try:
        return cls(**values)
    except ValueError as error:
        named = re.match(r"`(\w+)", str(error))
        place = (*keys, named[1]) if named else keys
        raise UsageError(f"{locate(place, sources)}{error}") from error


def convert(value: Any, annotation: Any, keys: Keys) -> Any:
    """Give a value its type; options are text until here.

    Raises:
        SettingError: it is of another type.
    """
    kind = Alternatives.of(annotation)
    if isinstance(value, str) and not kind.takes_text:
        value = _read(value)
    is_misread = isinstance(value, bool) and kind.takes_text  # YAML reads a bare off as false: the class says so
    if not is_misread and not accepts(annotation, value):
        raise SettingError(keys, f"must be {kind.describe()}, got {show(value)}.")
    return _frozen(value)


def explained(error: SettingError, sources: Sequence[Source]) -> UsageError:
    """Say where the setting of an error stands."""
    return UsageError(explain(error, sources))


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
