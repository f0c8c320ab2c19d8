"""Classes by name, and what their constructors take."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from digenrl.cli.errors import Keys, SettingError, one_line, suggest
from digenrl.cli.reward_classes import reward_classes
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy

_OUR_PACKAGES = tuple(
    f"digenrl.{name}" for name in ("algorithms", "data", "policies", "rewards", "strategies", "callbacks", "loggers")
)


@dataclass(frozen=True)
class Setting:
    """An argument of a constructor."""

    annotation: Any
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is inspect.Parameter.empty


@cache
def settings_of(cls: type[Any]) -> dict[str, Setting]:
    """Give what a constructor takes, also what it passes on to its base classes as keywords."""
    with lent_annotations(cls):
        # The parser finds the names behind `**kwargs`, in the source code of the classes.
        names = ArgumentParser().add_class_arguments(cls, "at", fail_untyped=False, sub_configs=True)
        return _settings((name.removeprefix("at.") for name in names), constructors(cls))


def method_settings(cls: type, method: str, *, without: set[str]) -> dict[str, Setting]:
    """Give what a method takes, also what it passes on to the same method of its base classes."""
    names = ArgumentParser().add_method_arguments(cls, method, fail_untyped=False, skip=set(without))
    return _settings(names, _along_bases(cls, method))


@contextmanager
def lent_annotations(cls: Callable[..., Any]) -> Iterator[None]:
    """Lend arguments of constructors that have no type that of the nearest base class that gives one."""
    functions = [function for function in map(inspect.unwrap, constructors(cls)) if inspect.isfunction(function)]
    known: dict[str, Any] = {}
    lent: list[tuple[dict[str, Any], str]] = []
    for function in reversed(functions):
        hints = _type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.annotation is not inspect.Parameter.empty:
                known[name] = hints.get(name, Any)
            elif name in known:
                function.__annotations__[name] = known[name] if parameter.default is not None else known[name] | None
                lent.append((function.__annotations__, name))
    try:
        yield
    finally:
        for annotations, name in lent:
            del annotations[name]


def _settings(names: Iterable[str], functions: Iterable[Callable[..., Any]]) -> dict[str, Setting]:
    declared: dict[str, Setting] = {}
    for function in functions:
        hints = _type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            declared.setdefault(name, Setting(hints.get(name, Any), parameter.default))
    return {name: declared.get(name, Setting(Any, None)) for name in names}


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    with suppress(NameError, AttributeError, TypeError):  # names that exist for type checkers only
        return typing.get_type_hints(function)
    return {}


def accepted_names(name: str) -> Collection[str] | None:
    """Give the settings of a class by its name, none of a function's; None if there is neither."""
    try:
        found = find(name, all_known_classes(), ())
    except SettingError:
        return None
    if not isinstance(found, type):
        return () if callable(found) else None
    return settings_of(found)


def constructors(cls: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Give the `__init__` methods along the base classes, the class's own first."""
    return _along_bases(cls, "__init__")


def _along_bases(cls: Callable[..., Any], method: str) -> Iterator[Callable[..., Any]]:
    for base in inspect.getmro(cls) if inspect.isclass(cls) else ():
        if base is not object and method in vars(base):
            yield vars(base)[method]


def known_classes(base: type) -> dict[str, type]:
    """Give the subclasses of `base` by their short names, as far as they are imported, and all of our own."""
    for package in _OUR_PACKAGES:
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
    found: dict[str, type] = {}
    for cls in sorted(_subclasses(base), key=_distance):
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            found.setdefault(cls.__name__, cls)
    return found


def all_known_classes() -> dict[str, type]:
    """Give every class that has a short name somewhere in a configuration."""
    bases = (Profiler, Logger, Callback, Strategy, DiffusionPolicy, LightningDataModule, DiffusionRLModule)
    return {**reward_classes(), **{name: cls for base in bases for name, cls in known_classes(base).items()}}


def find(name: str, known: dict[str, Any], keys: Keys) -> Any:
    """Give what a short name among `known` or a dotted path names.

    Raises:
        SettingError: nothing of that name, or its module cannot be imported.
    """
    if name in known:
        return known[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        own = "your own go by their dotted path, `package.module.Name`."
        otherwise = f"; known: {', '.join(sorted(known))}; {own}" if known else f"; {own}"
        raise SettingError(keys, f"names no class that is known, `{name}`{suggest(name, known, otherwise=otherwise)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise SettingError(keys, f"is `{name}`, but importing it failed: {error}{_raised_at(error)}.") from error
        parent = missing.rpartition(".")[0]
        otherwise = f"; modules are looked for in {Path.cwd()} and among the installed ones."
        siblings = [f"{parent}.{module}".lstrip(".") for module in _modules_in(parent)]
        hint = suggest(missing, siblings, otherwise=otherwise)
        raise SettingError(keys, f"is `{name}`, but there is no module `{missing}`{hint}") from error
    except Exception as error:  # a module of the user's may raise anything
        problem = f"{type(error).__name__}: {one_line(error)}{_raised_at(error)}"
        raise SettingError(keys, f"is `{name}`, but importing it failed: {problem}.") from error
    if not hasattr(module, attribute):
        public = [member for member in dir(module) if not member.startswith("_")]
        hint = suggest(attribute, public)
        raise SettingError(keys, f"is `{name}`, but module `{module_name}` has no `{attribute}`{hint}")
    return getattr(module, attribute)


def path_of(found: Any) -> str:
    """Give the dotted path of a class or function."""
    return f"{found.__module__}.{found.__qualname__}"


def _subclasses(base: type) -> Iterator[type]:
    yield base
    subclasses: list[type] = base.__subclasses__()
    for cls in subclasses:
        yield from _subclasses(cls)


def _distance(cls: type) -> int:
    """Order classes of the same name: ours, then Lightning's, then others."""
    root = cls.__module__.partition(".")[0]
    return {"digenrl": 0, "lightning": 1}.get(root, 2)


def _modules_in(package: str) -> list[str]:
    paths = [str(Path.cwd())] if not package else list(getattr(sys.modules.get(package), "__path__", []))
    folders = [entry.name for path in paths if Path(path).is_dir() for entry in Path(path).iterdir() if entry.is_dir()]
    return [module.name for module in pkgutil.iter_modules(paths)] + [name for name in folders if name.isidentifier()]


def _raised_at(error: BaseException) -> str:
    """Give the line of the user's code that raised, the innermost outside the import machinery."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return ""  # its message has the line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
