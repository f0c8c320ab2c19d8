"""Several rewards in a configuration: each entry may have its `weight` beside its class."""

from __future__ import annotations

from typing import Any

from digenrl.cli.annotations import accepts
from digenrl.cli.errors import Keys, SettingError, show, suggest
from digenrl.cli.sources import CLASS_KEYS

_ENTRY_KEYS = (*CLASS_KEYS, "weight")


def gather_weights(settings: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """Make `weights` of the entries' own `weight`, in the settings of `SeveralRewards`; 1 where an entry has none.

    Args:
        settings: as a configuration gives them; they are left as they are.
        keys: where they stand.

    Raises:
        SettingError: a weight that is not a number, weights in both places, or an entry with other keys.
    """
    entries = settings.get("rewards")
    if not isinstance(entries, list):
        return settings
    weights: dict[int, Any] = {}
    for index, entry in enumerate(entries):
        for key in entry if isinstance(entry, dict) else ():
            if key not in _ENTRY_KEYS:
                place = (*keys, "rewards", str(index), str(key))
                raise SettingError(place, f"is not a key of a reward in a list{suggest(str(key), _ENTRY_KEYS)}")
        if isinstance(entry, dict) and "weight" in entry:
            weights[index] = entry["weight"]
    if not weights:
        return settings
    for index, weight in weights.items():
        place = (*keys, "rewards", str(index), "weight")
        if settings.get("weights") is not None:
            raise SettingError(place, f"must be left out where `weights` are given, {show(settings['weights'])}.")
        if not accepts(float, weight):
            raise SettingError(place, f"must be a number, got {show(weight)}.")
    return {
        **settings,
        "rewards": [_without_weight(entry) for entry in entries],
        "weights": [float(weights.get(index, 1.0)) for index in range(len(entries))],
    }


def _without_weight(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != "weight"} if isinstance(entry, dict) else entry
