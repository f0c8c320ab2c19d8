"""Types of settings: which values they take, and how a message names them."""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    set: "a list",
    dict: "a mapping",
    collections.abc.Callable: "a function or a class whose objects can be called",
}
_PLACEHOLDERS = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT", list: "LIST", dict: "MAPPING"}
_PLAIN_MODULES = ("builtins", "pathlib", "datetime", "os")


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """What a setting may be, taken apart."""

    members: tuple[Any, ...]

    @classmethod
    def of(cls, annotation: Any) -> Alternatives:
        """Take a union apart."""
        return cls(tuple(_flatten(annotation)))

    @property
    def classes(self) -> tuple[type, ...]:
        """The members whose values are written as a `class_path`."""
        return tuple(member for member in self.members if _is_class_like(member))

    @property
    def takes_callable(self) -> bool:
        """Whether a function may be given."""
        return any(typing.get_origin(member) is collections.abc.Callable for member in self.members)

    @property
    def takes_text(self) -> bool:
        """Whether a text may stand for itself."""
        return str in self.members

    @property
    def takes_anything(self) -> bool:
        """Whether nothing can be wrong."""
        return Any in self.members

    @property
    def takes_only_classes(self) -> bool:
        """Whether a mapping can only be meant as a class and its settings."""
        return bool(self.classes) and not any((typing.get_origin(member) or member) is dict for member in self.members)

    def items(self, container: type) -> Any:
        """Give the type of what a list holds, or of a mapping's values; None if it may not be one."""
        for member in self.members:
            if _container_of(member) is container and typing.get_args(member):
                return typing.get_args(member)[-1]
        return None

    def placeholder(self) -> str:
        """Give what stands for the value in a list of options."""
        return "|".join(dict.fromkeys(_short_name_of(member) for member in self.members if member is not type(None)))

    def describe(self) -> str:
        """Name the type in words."""
        literals = [value for member in self.members if _is_literal(member) for value in typing.get_args(member)]
        names = [f"`{value}`" for value in dict.fromkeys(map(str, literals))]
        choice = f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)
        others = [_name_of(member) for member in self.members if not _is_literal(member)]
        return " or ".join(dict.fromkeys(filter(None, (choice, *others))))


def accepts(annotation: Any, value: Any) -> bool:
    """Tell whether a value, as a configuration or an option gives it, is of a type."""
    if value is None:  # the parser takes it for a setting that is not given
        return type(None) in Alternatives.of(annotation).members
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=annotation)
    except ValueError:  # a type that cannot be checked
        return True
    try:
        parser.parse_object({"value": value})
    except argparse.ArgumentError:
        return False
    return True


def _flatten(annotation: Any) -> typing.Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _flatten(member)
    elif origin is typing.Annotated:
        yield from _flatten(typing.get_args(annotation)[0])
    else:
        yield annotation


def _is_class_like(annotation: Any) -> bool:
    return (
        inspect.isclass(annotation)
        and typing.get_origin(annotation) is None
        and annotation.__module__ not in _PLAIN_MODULES
        and not issubclass(annotation, enum.Enum)
        and not dataclasses.is_dataclass(annotation)
        and not typing.is_typeddict(annotation)
    )


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


def _container_of(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    return list if origin is collections.abc.Sequence else origin


def _name_of(annotation: Any) -> str:
    origin = _container_of(annotation)
    if origin is list and typing.get_args(annotation):
        return f"a list, each item {Alternatives.of(typing.get_args(annotation)[0]).describe()}"
    name = getattr(annotation, "__name__", str(annotation))
    return _NAMES.get(origin or annotation, f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}")


def _short_name_of(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if _is_literal(annotation):
        return "|".join(str(value) for value in typing.get_args(annotation))
    if origin is collections.abc.Callable:
        return "FUNCTION|CLASS"
    if _is_class_like(annotation):
        return "CLASS"
    return _PLACEHOLDERS.get(origin or annotation, getattr(annotation, "__name__", "VALUE").upper())
