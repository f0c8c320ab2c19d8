"""From the words of a command to where its settings come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from digenrl.cli.errors import UsageError, suggest
from digenrl.cli.sources import ConfigFile, Option, Source, read_config

_FLAGS = ("--config", "--print_config", "--help")
_DRY_RUN_FLAGS = ("--dry_run", "--dry_run_device", "--dry_run_profile")


@dataclass
class DryRunFlags:
    """What `--dry_run` and the two flags beside it say."""

    is_asked: bool = False
    device: str | None = None
    profile: str | None = None


@dataclass
class Arguments:
    """What stands behind the subcommand."""

    files: list[ConfigFile] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    print_config: bool = False
    show_help: bool = False
    dry_run: DryRunFlags = field(default_factory=DryRunFlags)

    @property
    def sources(self) -> list[Source]:
        """All that gives settings, the strongest last: options win over files wherever they stand."""
        return [*self.files, *self.options]


def read_arguments(words: Sequence[str], *, takes_dry_run: bool = False) -> Arguments:
    """Read `--config FILE`, `--key value`, `--key=value`, `--key+ value` and the flags.

    Args:
        words: the arguments.
        takes_dry_run: whether `--dry_run` and what belongs to it are flags of the command.

    Raises:
        UsageError: a word that is none of them, or a file that cannot be read.
    """
    arguments = Arguments()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            arguments.show_help = True
        elif word == "--print_config":
            arguments.print_config = True
        elif takes_dry_run and word == "--dry_run":
            arguments.dry_run.is_asked = True
        elif takes_dry_run and name in _DRY_RUN_FLAGS[1:]:
            text = value if equals else _value_of(name, "a value", rest)
            setattr(arguments.dry_run, name.removeprefix("--dry_run_"), text)
        elif name in ("-c", "--config"):
            arguments.files.append(read_config(value if equals else _value_of(name, "a file", rest)))
        elif name.startswith("--") and len(name) > 2:
            text = value if equals else _value_of(name, "a value", rest)
            arguments.options.append(Option.parse(name, text))
        else:
            known = (*_FLAGS, *_DRY_RUN_FLAGS[: 3 * takes_dry_run])
            hint = suggest(f"--{word.lstrip('-')}", known) if word.startswith("-") else "; settings are `--key value`."
            raise UsageError(f"`{word}` is not an option{hint}")
    for name in ("device", "profile"):
        if getattr(arguments.dry_run, name) is not None and not arguments.dry_run.is_asked:
            raise UsageError(f"`--dry_run_{name}` needs `--dry_run`.")
    return arguments


def read_flags(words: Sequence[str], known: Collection[str], command: str) -> dict[str, list[str]]:
    """Read a command's own options, each as often as it is given; values are text, whatever they look like.

    Raises:
        UsageError: a word that is none of them, or an option without a value.
    """
    flags: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.removeprefix("--") not in known or not name.startswith("--"):
            names = [f"--{flag}" for flag in known]
            raise UsageError(f"`{name}` is not an option of `{command}`{suggest(name, names)}")
        flags.setdefault(name[2:], []).append(value if equals else _value_of(name, "a value", rest))
    return flags


def _value_of(name: str, what: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"`{name}` needs {what}, got {'nothing' if not rest else f'`{rest[0]}`'}.")
    return rest.pop(0)
