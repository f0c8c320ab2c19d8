"""From the words of a command to where its settings come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from digenrl.cli.errors import UsageError, suggest
from digenrl.cli.sources import ConfigFile, Option, Source, read_config

_FLAGS = ("--config", "--print_config", "--help")


@dataclass
class Arguments:
    """What stands behind the subcommand."""

    files: list[ConfigFile] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    print_config: bool = False
    show_help: bool = False

    @property
    def sources(self) -> list[Source]:
        """All that gives settings, the strongest last: options win over files wherever they stand."""
        return [*self.files, *self.options]


def read_arguments(words: Sequence[str]) -> Arguments:
    """Read `--config FILE`, `--key value`, `--key=value`, `--key+ value` and the flags.

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
        elif name in ("-c", "--config"):
            arguments.files.append(read_config(value if equals else _value_of(name, "a file", rest)))
        elif name.startswith("--") and len(name) > 2:
            text = value if equals else _value_of(name, "a value", rest)
            arguments.options.append(Option.parse(name, text))
        else:
            hint = suggest(f"--{word.lstrip('-')}", _FLAGS) if word.startswith("-") else "; settings are `--key value`."
            raise UsageError(f"`{word}` is not an option{hint}")
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
