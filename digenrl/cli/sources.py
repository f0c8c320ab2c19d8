"""Configuration files and options: what they say, and where they say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader

from digenrl.cli.errors import Keys, SettingError, UsageError, nearest, one_line, show

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
"""How a class and its settings are written."""

_HIDDEN_KEYS = ("init_args", "dict_kwargs")


class Source(Protocol):
    """Something that gives settings."""

    @property
    def values(self) -> dict[str, Any]:
        """The settings, nested."""
        ...

    def place(self, keys: Keys) -> str | None:
        """Say where the setting is given; None if it is not given here."""
        ...

    def blame(self, keys: Keys, problem: str) -> str:
        """Say what is wrong with a setting that is given here."""
        ...


@dataclass(frozen=True)
class ConfigFile:
    """A YAML or JSON file."""

    path: str
    values: dict[str, Any]
    root: yaml.Node | None

    def place(self, keys: Keys) -> str | None:
        """Give `file:line`."""
        node, line = self.root, None
        for key in keys:
            found = _child(node, key)
            if found is None:
                return None
            line, node = found
        return None if line is None else f"{self.path}:{line + 1}"

    def blame(self, keys: Keys, problem: str) -> str:
        """Put the line ahead."""
        return f"{self.place(keys)}: `{'.'.join(keys)}` {problem}"


@dataclass(frozen=True)
class Option:
    """`--model.clip_range 1e-4`."""

    name: str
    value: Any
    is_appended: bool = False

    @classmethod
    def parse(cls, name: str, text: str) -> Option:
        """Read the value; lists and mappings are YAML, all else is text until its type is known.

        Raises:
            UsageError: a list or mapping that is not YAML, or a name with an empty part.
        """
        stripped = name.removesuffix("+")
        if not all(stripped[2:].split(".")):
            raise UsageError(f"`{name}` is not an option; settings are `--key value`, nested ones `--key.key value`.")
        value: Any = text
        if text.startswith(("[", "{")):
            try:
                value = get_loader("yaml")(text)
            except yaml.YAMLError as error:
                raise UsageError(f"the value of `{name}` is not valid YAML: {_problem_of(error)}.") from error
        return cls(stripped, value, is_appended=name.endswith("+"))

    @property
    def keys(self) -> Keys:
        """The name's parts."""
        return tuple(self.name[2:].split("."))

    @property
    def values(self) -> dict[str, Any]:
        """The one setting, nested."""
        value = Appended(self.value) if self.is_appended else self.value
        for key in reversed(self.keys):
            value = Within({key: value})
        assert isinstance(value, Within)
        return value

    def place(self, keys: Keys) -> str | None:
        """Give the option's name."""
        rest = keys[len(self._place) :]
        is_given = keys[: len(self._place)] == self._place and (rest == ("class_path",) or _holds(self.value, rest))
        return self.name if is_given else None

    def blame(self, keys: Keys, problem: str) -> str:
        """Name the option, which says where by itself, or what in its value."""
        is_whole = keys in (self._place, (*self._place, "class_path"))
        return f"`{self.name}` {problem}" if is_whole else f"{self.name}: `{'.'.join(keys)}` {problem}"

    @property
    def _place(self) -> Keys:
        return tuple(key for key in self.keys if key not in _HIDDEN_KEYS)


class Within(dict[str, Any]):
    """The way that an option's name leads to its value; a mapping that is the value is a plain one."""


@dataclass(frozen=True)
class Appended:
    """A value that goes to the end of a list."""

    value: Any


def read_config(path: str) -> ConfigFile:
    """Read a configuration file.

    Raises:
        UsageError: there is no such file, or it does not hold a mapping in YAML with each key once.
    """
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"`--config` must be a file, `{path}` is a folder.")
    if not file.is_file():
        siblings = [str(entry) for entry in file.parent.glob("*")]
        close = nearest(path, siblings)
        hint = f"did you mean `{close}`?" if close is not None else f"paths are relative to {Path.cwd()}."
        raise UsageError(f"`--config`: there is no file `{path}`; {hint}")
    try:
        text = file.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_keys_once(root, path)
        values = get_loader("yaml")(text)
    except UnicodeDecodeError as error:
        raise UsageError(f"`{path}` is not a text file: {one_line(error)}.") from error
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}{_line_of(error)}: not valid YAML: {_problem_of(error)}.") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UsageError(f"{path}: a configuration must be a mapping with model, data and trainer, got {show(values)}.")
    return ConfigFile(path, values, root)


def explain(error: SettingError, sources: Sequence[Source]) -> str:
    """Say where the setting of an error was given, or else the part of the configuration that it belongs to."""
    for source in reversed(sources):
        if source.place(error.keys) is not None:
            return source.blame(error.keys, error.problem)
    return f"{locate(error.keys, sources)}{error}"


def locate(keys: Keys, sources: Sequence[Source]) -> str:
    """Give `file:line: ` or `--option: ` of the setting, or of the nearest part around it; empty if none is known."""
    for length in range(len(keys), 0, -1):
        for source in reversed(sources):
            place = source.place(keys[:length])
            if place is not None:
                return f"{place}: "
    return ""


def _child(node: yaml.Node | None, key: str) -> tuple[int, yaml.Node] | None:
    """Give the line of a key and what stands under it."""
    if isinstance(node, yaml.SequenceNode):
        if key.isdigit() and int(key) < len(node.value):
            item = node.value[int(key)]
            return item.start_mark.line, item
        # A list that was given for a single thing, as for one callback.
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    entries = {name.value: (name.start_mark.line, value) for name, value in node.value}
    if key in entries:
        return entries[key]
    for hidden in _HIDDEN_KEYS:
        if hidden in entries and (found := _child(entries[hidden][1], key)) is not None:
            return found
    return None


def _holds(value: Any, keys: Keys) -> bool:
    """Tell whether there is something at the end of the keys."""
    if not keys:
        return True
    if isinstance(value, list):
        return keys[0].isdigit() and int(keys[0]) < len(value) and _holds(value[int(keys[0])], keys[1:])
    if not isinstance(value, dict):
        return False
    inside = [value[hidden] for hidden in _HIDDEN_KEYS if hidden in value]
    return (keys[0] in value and _holds(value[keys[0]], keys[1:])) or any(_holds(inner, keys) for inner in inside)


def _check_keys_once(node: yaml.Node | None, path: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if name.value in seen and name.value != "<<":
                raise UsageError(f"{path}:{line}: `{name.value}` is given twice, first in line {seen[name.value]}.")
            seen[name.value] = line
            _check_keys_once(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys_once(item, path)


def _line_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f":{mark.line + 1}"


def _problem_of(error: yaml.YAMLError) -> str:
    return one_line(getattr(error, "problem", None) or error).rstrip(".")
