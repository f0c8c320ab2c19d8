"""Our own rewards, and what they say of themselves; needs torch, but nothing that only one of them needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement

_PACKAGE = "digenrl"


@dataclass(frozen=True)
class RewardInfo:
    """An entry of `digenrl rewards list`."""

    name: str
    modalities: tuple[str, ...]
    """What it judges: `image`, `video`."""
    needs: str
    """What a user must have for it, in a few words; empty if nothing."""
    extra: str | None
    """The extra that installs what it imports."""
    is_installed: bool | None
    """Whether all of that is there; None if there is no extra, or this package's own list of extras is not there."""
    summary: str

    @classmethod
    def of(cls, name: str, reward: type) -> RewardInfo:
        """Read what a class says of itself."""
        from digenrl.rewards import JoinedReward

        extra = getattr(reward, "extra", None)
        return cls(
            name=name,
            modalities=tuple(getattr(reward, "modalities", ("image", "video"))),
            needs=getattr(reward, "needs", "what its rewards need" if issubclass(reward, JoinedReward) else ""),
            extra=extra,
            is_installed=None if extra is None else is_extra_installed(extra),
            summary=(inspect.getdoc(reward) or "").partition("\n")[0].removesuffix("."),
        )


def reward_classes() -> dict[str, type]:
    """Give our own rewards by their short names."""
    module = importlib.import_module("digenrl.rewards")
    members = {name: getattr(module, name) for name in sorted(module.__all__)}
    classes = {name: member for name, member in members.items() if inspect.isclass(member) and has_call(member)}
    return {name: cls for name, cls in classes.items() if not inspect.isabstract(cls)}


def has_call(cls: type) -> bool:
    """Tell whether a class's objects can be called; the class itself always can."""
    return any("__call__" in vars(base) for base in cls.__mro__)


def is_extra_installed(extra: str) -> bool | None:
    """Tell whether what an extra of this package needs is installed; None where the extra is not known."""
    try:
        known = [Requirement(text) for text in importlib.metadata.requires(_PACKAGE) or ()]
    except importlib.metadata.PackageNotFoundError:
        return None
    needed = [required for required in known if required.marker and required.marker.evaluate({"extra": extra})]
    return all(map(_is_installed, needed)) if needed else None


def _is_installed(required: Requirement) -> bool:
    try:
        version = importlib.metadata.version(required.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return required.specifier.contains(version, prereleases=True)


def as_dict(info: RewardInfo) -> dict[str, Any]:
    """Give an entry as JSON has it."""
    return {
        "name": info.name,
        "modalities": list(info.modalities),
        "needs": info.needs,
        "extra": info.extra,
        "installed": info.is_installed,
        "summary": info.summary,
    }
