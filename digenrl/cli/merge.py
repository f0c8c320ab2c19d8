"""Several sources of settings to one configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any

from digenrl.cli.errors import Keys, SettingError, show
from digenrl.cli.sources import CLASS_KEYS, Appended, Source, Within

log = logging.getLogger(__name__)

AcceptedNames = Callable[[str], Collection[str] | None]
"""The settings that a class takes, by its name; None for a class that is not known."""


def merge(sources: Sequence[Source], accepted: AcceptedNames) -> dict[str, Any]:
    """Lay the sources over each other, the last on top.

    A mapping is merged key by key, all else is replaced. Another class takes over the settings of the one before
    that it knows, too; others are left out, which is logged.

    Raises:
        SettingError: `init_args` that are not a mapping, and settings to go into them.
    """
    merger = _Merger(accepted)
    config: dict[str, Any] = {}
    for source in sources:
        merger.lay(config, source.values, ())
    return config


def _way(value: Any) -> Keys:
    """Give the names that lead to what an option sets."""
    if not isinstance(value, Within):
        return ()
    name, inner = next(iter(value.items()))
    return (() if name in ("init_args", "dict_kwargs") else (name,)) + _way(inner)


class _Merger:
    def __init__(self, accepted: AcceptedNames) -> None:
        self._accepted = accepted

    def lay(self, below: dict[str, Any], above: dict[str, Any], keys: Keys) -> None:
        if "class_path" in above:
            if below and not any(key in below for key in CLASS_KEYS):
                settings = dict(below)  # those of the default class
                below.clear()
                below["init_args"] = settings
            self._set_class(below, above["class_path"], keys)
        for key, value in above.items():
            if key == "class_path":
                continue
            target = below
            # `--model.lr` is short for `--model.init_args.lr`; an entry of a list may have a `weight` beside them.
            if "class_path" in below and key not in CLASS_KEYS and key not in below:
                if below.get("init_args") is None:
                    below["init_args"] = {}
                target = below["init_args"]
                if not isinstance(target, dict):
                    raise SettingError((*keys, "init_args"), f"must be a mapping, got {show(target)}.")
            inner = keys if key in ("init_args", "dict_kwargs") else (*keys, str(key))
            self._put(target, key, value, inner)

    def _put(self, target: dict[str, Any], key: str, value: Any, keys: Keys) -> None:
        old = target.get(key)
        if isinstance(value, Appended):
            target[key] = [*(old if isinstance(old, list) else [] if old is None else [old]), deepcopy(value.value)]
        elif isinstance(value, Within) and isinstance(old, str):
            # `--trainer.logger TensorBoardLogger --trainer.logger.name x`: the text names a class.
            target[key] = {"class_path": old}
            self.lay(target[key], value, keys)
        elif isinstance(value, Within) and isinstance(old, list) and old:
            target[key] = self._within_list(old, value, keys)
        elif isinstance(value, dict) and isinstance(old, dict):
            self.lay(old, value, keys)
        elif isinstance(value, dict):
            target[key] = {}
            self.lay(target[key], value, keys)
        elif isinstance(value, str) and isinstance(old, dict) and self._is_class(old, value):
            self._set_class(old, value, keys)
        else:
            target[key] = deepcopy(value)

    def _within_list(self, items: list[Any], value: Within, keys: Keys) -> list[Any]:
        """Change one item: `--trainer.callbacks.0.x 1` says which, `--trainer.callbacks.x 1` means the last one."""
        name, inner = next(iter(value.items()))
        index = len(items) - 1
        if name.isdigit():
            if int(name) >= len(items):
                problem = f"means item {name} of a list of {len(items)}, which are counted from 0."
                raise SettingError((*keys, *_way(value)), problem)
            index, value, keys = int(name), inner, (*keys, name)
        changed = {"item": items[index]}
        self._put(changed, "item", value, keys)
        return [*items[:index], changed["item"], *items[index + 1 :]]

    def _is_class(self, old: dict[str, Any], value: str) -> bool:
        """Tell whether a text that takes the place of a class names another one; `auto` is a strategy, too."""
        return "class_path" in old and self._accepted(value) is not None

    def _set_class(self, node: dict[str, Any], name: Any, keys: Keys) -> None:
        old = node.get("class_path")
        node["class_path"] = name
        settings = node.get("init_args")
        if old is None or old == name or not isinstance(settings, dict) or not isinstance(name, str):
            return
        names = self._accepted(name)
        dropped = [] if names is None else [setting for setting in settings if setting not in names]
        for setting in dropped:
            del settings[setting]
        if dropped:
            left_out = ", ".join(f"`{key}`" for key in dropped)
            log.info("`%s` is now %s, which has no %s: left out", ".".join(keys), name, left_out)
