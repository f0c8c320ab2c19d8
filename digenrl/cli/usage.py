"""`digenrl fit --help`: the settings of our own classes, and of those that the configuration names."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import docstring_parser

from digenrl.cli.annotations import Alternatives
from digenrl.cli.classes import accepted_names, all_known_classes, constructors, find, known_classes, settings_of
from digenrl.cli.errors import SettingError, UsageError, show
from digenrl.cli.merge import merge
from digenrl.cli.sources import Source, explain
from digenrl.data import PromptData
from digenrl.module import DiffusionRLModule
from digenrl.strategies import DisaggregatedStrategy
from digenrl.trainer import Trainer

_TRAINER_SETTINGS = (
    "max_steps", "max_epochs", "max_time", "precision", "accelerator", "devices", "gradient_clip_val",
    "accumulate_grad_batches", "val_check_interval", "limit_val_batches", "callbacks", "logger", "default_root_dir",
    "log_every_n_steps", "enable_progress_bar", "enable_checkpointing", "profiler",
)  # fmt: skip
"""Those of Lightning's that an RL run has a use for; all others are taken as well."""

_GENERAL = {
    "-c, --config FILE": "settings in YAML; of several the later wins, options win over all",
    "--print_config": "print all settings and run nothing; the output is a configuration",
    "--ckpt_path PATH": "continue from a checkpoint; `last` is the newest of the run folders",
    "--seed_everything N": "seed of all that has no seed of its own (default: 0)",
}
_DRY_RUN = {
    "--dry_run": "print sizes and times, run nothing",
    "--dry_run_device NAME": "devices to count with (default: h100)",
    "--dry_run_profile FILE": "take times from a run's `profile.json`",
}
_COLUMN = 32  # of the text behind options that are short
_INDENT = 8
_MAX_KIND_CHARS = 24


def print_usage(subcommand: str, sources: Sequence[Source]) -> None:
    """Print the options of a subcommand.

    Raises:
        UsageError: a class that the configuration names is not found.
    """
    try:
        lines = list(_lines(subcommand, merge(sources, accepted_names)))
    except SettingError as error:
        raise UsageError(explain(error, sources)) from error
    print("\n".join(lines))


def _lines(subcommand: str, config: Mapping[str, Any]) -> Iterator[str]:
    yield f"usage: digenrl {subcommand} [--config FILE] [--key value | --key=value]..."
    yield ""
    yield "Nested settings are joined by dots, lists and mappings are written as YAML, `--key+ value` adds to a list."
    yield "A class goes by its short name if it is one of ours or Lightning's, by its dotted path otherwise."
    yield "`--model NAME --help` shows the settings of another class."
    yield from _section("general")
    for option, summary in (_GENERAL | _DRY_RUN if subcommand == "fit" else _GENERAL).items():
        yield from _entry(option, summary)
    given = _class_in(config.get("model"), ("model",))
    if given is None:
        yield from _algorithms()
    else:
        yield from _settings("model", given)
        yield from _inner_sections("model", given, config["model"])
    yield from _settings("data", _class_in(config.get("data"), ("data",)) or PromptData)
    strategy = (config.get("trainer") or {}).get("strategy")
    named = _class_in(strategy, ("trainer", "strategy")) if isinstance(strategy, dict) else None
    yield from _settings("trainer.strategy", named or DisaggregatedStrategy)
    others = set(settings_of(Trainer)) - set(_TRAINER_SETTINGS)
    yield from _settings("trainer", Trainer, leave_out=others)
    names = ", ".join(sorted(others - {"strategy"}))
    yield from textwrap.wrap(f"and as in Lightning: {names}", _width(), initial_indent="  ", subsequent_indent="  ")


def describe_reward(node: Any) -> Iterator[str]:
    """Give the options of a reward that stands by itself, as `reward`; none of a function.

    Raises:
        SettingError: a class that is not found.
    """
    given = _class_in(node, ("reward",))
    if given is not None:
        yield from _settings("reward", given)
        yield from _inner_sections("reward", given, node)


def _algorithms() -> Iterator[str]:
    algorithms, shared = known_classes(DiffusionRLModule), settings_of(DiffusionRLModule)
    title = f"one of {', '.join(sorted(algorithms))}, each with defaults of its own"
    yield from _settings("model", DiffusionRLModule, title=title, with_defaults=False)
    yield from _section("--model: what each of them has, too, described by `--model NAME --help`")
    for name, algorithm in sorted(algorithms.items()):
        own = ", ".join(setting for setting in settings_of(algorithm) if setting not in shared)
        yield from textwrap.wrap(f"{name}: {own}", _width(), initial_indent="  ", subsequent_indent="    ")


def _class_in(node: Any, keys: tuple[str, ...]) -> type | None:
    """Give the class that a part of the configuration names."""
    name = node.get("class_path") if isinstance(node, dict) else node
    if not isinstance(name, str):
        return None
    found = find(name, all_known_classes(), keys)
    return found if inspect.isclass(found) else None


def _inner_sections(key: str, cls: type, node: Any) -> Iterator[str]:
    """Describe the classes that a class's settings name, as a model's policy and reward."""
    given = (node.get("init_args") or {}) if isinstance(node, dict) else {}
    for name, value in given.items():
        if name not in settings_of(cls):
            continue
        annotation, place = settings_of(cls)[name].annotation, f"{key}.{name}"
        if not isinstance(value, list):
            yield from _inner_section(place, annotation, value)
            continue
        for index, item in enumerate(value):
            yield from _inner_section(f"{place}.{index}", Alternatives.of(annotation).items(list), item)


def _inner_section(key: str, annotation: Any, node: Any) -> Iterator[str]:
    types = Alternatives.of(annotation)
    if types.takes_text or not (types.classes or types.takes_callable):
        return
    inner = _class_in(node, tuple(key.split(".")))
    if inner is not None:
        yield from _settings(key, inner)
        yield from _inner_sections(key, inner, node)


def _settings(
    key: str, cls: type, *, title: str | None = None, leave_out: Container[str] = (), with_defaults: bool = True
) -> Iterator[str]:
    settings = {name: setting for name, setting in settings_of(cls).items() if name not in leave_out}
    if settings:
        yield from _section(f"--{key}: {title or cls.__name__}")
    for name, setting in settings.items():
        kind = Alternatives.of(setting.annotation).placeholder()
        kind = kind if len(kind) <= _MAX_KIND_CHARS else "VALUE"
        summary = _summary(cls, name)
        if with_defaults and setting.is_required:
            summary += " (required)"
        elif with_defaults and setting.default is not None:
            summary += f" (default: {_written(setting.default)})"
        yield from _entry(f"--{key}.{name} {kind}", summary)


def _written(default: Any) -> str:
    return default if isinstance(default, str) else show(default)


def _section(title: str) -> Iterator[str]:
    yield ""
    yield title


def _entry(option: str, text: str) -> Iterator[str]:
    """Write an option as a paragraph: columns of their own would leave long names half of a terminal for the text."""
    paragraph = f"{f'  {option}':<{_COLUMN - 2}}  {text}"
    yield from textwrap.wrap(paragraph, _width(), subsequent_indent=" " * _INDENT, break_on_hyphens=False)


def _width() -> int:
    return max(72, min(shutil.get_terminal_size().columns, 120))


def _summary(cls: type, name: str) -> str:
    """Give the first sentence that a constructor says about a setting, or else its base classes'."""
    texts = [
        *(function.__doc__ for function in constructors(cls)),
        *(vars(base).get("__doc__") for base in cls.__mro__),
    ]
    for text in texts:
        for parameter in docstring_parser.parse(text or "").params:
            described = " ".join((parameter.description or "").split())
            if parameter.arg_name == name and not described.startswith("see "):
                return described.partition(". ")[0].removesuffix(".")
    return ""
