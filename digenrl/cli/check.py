"""Checks a configuration against the classes that it names, before anything is made.

LightningCLI would find the same mistakes, but says them in many lines that name types and not settings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from digenrl.cli.annotations import Alternatives, accepts
from digenrl.cli.classes import (
    Setting,
    find,
    known_classes,
    method_settings,
    path_of,
    settings_of,
)
from digenrl.cli.errors import Keys, SettingError, listing, show, suggest
from digenrl.cli.reward_classes import has_call, reward_classes
from digenrl.cli.reward_weights import gather_weights
from digenrl.cli.sources import CLASS_KEYS
from digenrl.data import PromptData
from digenrl.module import DiffusionRLModule
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import JoinedReward, Reward
from digenrl.strategies import DisaggregatedStrategy
from digenrl.trainer import Trainer

_STRATEGY = ("trainer", "strategy")
_DEFAULT_CLASSES: dict[Keys, type] = {("data",): PromptData, _STRATEGY: DisaggregatedStrategy}
"""Where settings may stand without a `class_path`."""

_ALIASES = {DisaggregatedStrategy.strategy_name: DisaggregatedStrategy}
_CLASS_NAME = re.compile(r"(\w+\.)*[A-Z]\w*")


def check(config: Mapping[str, Any], subcommand: str) -> dict[str, Any]:
    """Give the configuration in LightningCLI's form: short names resolved, default classes filled in.

    Raises:
        SettingError: the first mistake that is found.
    """
    settings = run_settings(subcommand)
    _check_names(config, settings, (), f"a key of the configuration of `digenrl {subcommand}`")
    for key in ("model", "data"):
        if config.get(key) is None:
            raise SettingError((key,), f"is missing; give `--config FILE`, or `--{key} CLASS` and its settings.")
    trainer = {} if config.get("trainer") is None else config["trainer"]
    others = {key: value for key, value in config.items() if key != "trainer"}
    return {
        **{key: _check_value(value, settings[key].annotation, (key,)) for key, value in others.items()},
        "trainer": _check_settings(Trainer, trainer, ("trainer",)),
    }


def run_settings(subcommand: str) -> dict[str, Setting]:
    """Give the keys of a configuration."""
    return {
        "model": Setting(DiffusionRLModule, None),
        "data": Setting(LightningDataModule, None),
        "trainer": Setting(dict, None),
        "seed_everything": Setting(bool | int, 0),
        **method_settings(Trainer, subcommand, without=LightningCLI.subcommands()[subcommand]),
        "ckpt_path": Setting(Any, None),  # `find_checkpoint` checks it
    }


def check_reward(value: Any) -> Any:
    """Give a reward that stands by itself, under the key `reward`, in LightningCLI's form.

    Raises:
        SettingError: the first mistake that is found.
    """
    return _check_value(value, Reward, ("reward",))


def check_policy(value: Any) -> Any:
    """Give a run's policy without the run, under the keys `model.policy`, in LightningCLI's form.

    Raises:
        SettingError: the first mistake that is found.
    """
    return _check_value(value, DiffusionPolicy, ("model", "policy"))


def _check_settings(cls: type, given: Any, keys: Keys, *, others: Container[str] = ()) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SettingError(keys, f"must be a mapping of settings of {cls.__name__}, got {show(given)}.")
    settings = settings_of(cls)
    _check_names(given, settings, keys, f"a setting of {cls.__name__}")
    for name, setting in settings.items():
        if setting.is_required and name not in given and name not in others:
            kind = Alternatives.of(setting.annotation).describe()
            raise SettingError((*keys, name), f"is missing, {cls.__name__} needs it: {kind}.")
    return {name: _check_value(value, settings[name].annotation, (*keys, name)) for name, value in given.items()}


def _check_names(given: Mapping[str, Any], known: Mapping[str, Any], keys: Keys, what: str) -> None:
    for name in given:
        if name not in known:
            # A misspelt `init_args` looks like a setting, too.
            hint = suggest(str(name), known, otherwise=suggest(str(name), CLASS_KEYS, otherwise=listing(known)))
            raise SettingError((*keys, str(name)), f"is not {what}{hint}")


def _check_value(value: Any, annotation: Any, keys: Keys) -> Any:
    types = Alternatives.of(annotation)
    if types.takes_anything:
        return value
    if isinstance(value, str) and _is_class_name(value, types):
        return _check_class({"class_path": value}, types, keys, where=keys)
    if isinstance(value, dict) and ("class_path" in value or keys in _DEFAULT_CLASSES or types.takes_only_classes):
        return _check_class(value, types, keys, where=(*keys, "class_path"))
    if isinstance(value, list) and types.items(list) is not None:
        return [_check_value(item, types.items(list), (*keys, str(index))) for index, item in enumerate(value)]
    if isinstance(value, dict) and types.items(dict) is not None:
        return {key: _check_value(item, types.items(dict), (*keys, str(key))) for key, item in value.items()}
    if keys == _STRATEGY and isinstance(value, str) and value not in _strategy_names():
        names = [*_strategy_names(), *known_classes(Strategy)]
        raise SettingError(keys, f"names no strategy that is known, `{value}`{suggest(value, names)}")
    if not accepts(annotation, value):
        raise SettingError(keys, f"must be {types.describe()}, got {show(value)}.")
    return value


def _strategy_names() -> list[str]:
    return ["auto", *_ALIASES, *StrategyRegistry.available_strategies()]


def _is_class_name(value: str, types: Alternatives) -> bool:
    """Tell whether a text names a class or function; one that may stand for itself must look like it."""
    if types.takes_text:  # as a strategy, `DDPStrategy` or `ddp`
        return bool(types.classes) and (value in _ALIASES or _CLASS_NAME.fullmatch(value) is not None)
    return bool(types.classes) or types.takes_callable


def _check_class(spec: dict[str, Any], types: Alternatives, keys: Keys, *, where: Keys) -> Any:
    default = _DEFAULT_CLASSES.get(keys)
    if default is not None and not any(key in spec for key in CLASS_KEYS):
        spec = {"init_args": spec}
    known: dict[str, Any] = {name: cls for base in types.classes for name, cls in known_classes(base).items()}
    if types.takes_callable:
        known |= reward_classes()
    _check_spec(spec, keys, known, has_default=default is not None)
    name = spec.get("class_path", None if default is None else path_of(default))
    if not isinstance(name, str):
        raise SettingError(where, f"must be the name of a class, got {show(name)}.")
    found = find(name, known | {alias: cls for alias, cls in _ALIASES.items() if cls in known.values()}, where)
    if not inspect.isclass(found):
        return _check_function(found, name, spec, types, keys, where=where)
    if not issubclass(found, types.classes) and not (types.takes_callable and has_call(found)):
        raise SettingError(where, f"must be {types.describe()}, got the class {name}.")
    if inspect.isabstract(found):
        missing = ", ".join(f"`{method}`" for method in sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise SettingError(where, f"is {name}, which is abstract: a subclass must define {missing}.")
    extra = spec.get("dict_kwargs") or {}
    given = {} if spec.get("init_args") is None else spec["init_args"]
    if issubclass(found, JoinedReward) and isinstance(given, dict):
        given = gather_weights(given, keys)
    settings = _check_settings(found, given, keys, others=extra)
    return {"class_path": path_of(found), "init_args": settings, **({"dict_kwargs": extra} if extra else {})}


def _check_spec(spec: Mapping[str, Any], keys: Keys, known: Mapping[str, Any], *, has_default: bool) -> None:
    for key in spec:
        if key not in CLASS_KEYS and "class_path" in spec:
            raise SettingError((*keys, key), f"is not a key of a class{suggest(key, CLASS_KEYS)}")
    if "class_path" not in spec and not has_default:
        near = suggest(next(iter(spec), ""), CLASS_KEYS, otherwise=".")
        names = ", ".join(sorted(known)) or "a class"
        got = ", ".join(f"`{key}`" for key in spec)
        raise SettingError(keys, f"needs a `class_path`, {names} or a dotted path, got the keys {got}{near}")
    if not isinstance(spec.get("dict_kwargs") or {}, dict):
        raise SettingError((*keys, "dict_kwargs"), f"must be a mapping, got {show(spec['dict_kwargs'])}.")


def _check_function(
    found: Any, name: str, spec: Mapping[str, Any], types: Alternatives, keys: Keys, *, where: Keys
) -> str:
    if not types.takes_callable or not callable(found):
        raise SettingError(where, f"must be {types.describe()}, got `{name}`, a {type(found).__name__}.")
    if spec.get("init_args"):
        raise SettingError((*keys, "init_args"), f"must be left out: `{name}` is a function and takes no settings.")
    return name
