"""`digenrl fit` and `digenrl validate`, from the arguments to the exit code."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from digenrl.cli.arguments import Arguments
from digenrl.cli.check import check
from digenrl.cli.classes import accepted_names
from digenrl.cli.errors import Keys, SettingError, UsageError, one_line
from digenrl.cli.lightning_cli import CLI, ConstructorError
from digenrl.cli.merge import merge
from digenrl.cli.progress import INTERRUPTED, TERMINATED, Progress
from digenrl.cli.resume import find_checkpoint
from digenrl.cli.sources import Source, explain, locate
from digenrl.engines import WorkerError
from digenrl.rewards import RewardError
from digenrl.strategies.weight_planes import WeightSyncError
from digenrl.strategies.workers import NonFiniteGradientError

_INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError, MisconfigurationException)
"""What constructors, and the checks before workers start, raise for wrong input."""

_SAYS_ALL = (ValueError, FileNotFoundError, MisconfigurationException)
"""Those of them whose message is meant for users; others need the line that raised them."""

_RUN_ERRORS = (WorkerError, RewardError, WeightSyncError, NonFiniteGradientError)
"""What stops a run and says in its message what has happened."""

_RUNS = "runs"  # the Trainer's default for `default_root_dir`


def run(subcommand: str, arguments: Arguments) -> int:
    """Check the configuration, then do what the subcommand says; returns the exit code.

    Raises:
        UsageError: wrong input, found before a worker has started.
    """
    sources = arguments.sources
    progress = Progress()
    config: dict[str, Any] = {}
    try:
        config = _configure(subcommand, sources)
        CLI(subcommand, config, progress=progress, print_config=arguments.print_config)
    except SettingError as error:
        raise UsageError(explain(error, sources)) from error
    except ConstructorError as error:
        if not isinstance(error.error, _INPUT_ERRORS):
            raise error.error from None
        raise UsageError(_say(error.error, config, sources, name=error.name)) from error
    except SIGTERMException:
        return TERMINATED
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning makes exit code 1 of it
            return INTERRUPTED
        if error.code not in (None, 0):
            raise
        return 0
    except _RUN_ERRORS as error:
        print(f"error: {one_line(error)}{progress.save_traceback(error)}", file=sys.stderr)
        return 1
    except _INPUT_ERRORS as error:
        if progress.trainer is not None:
            raise
        raise UsageError(_say(error, config, sources)) from error
    return TERMINATED if progress.received_sigterm else 0


def _configure(subcommand: str, sources: Sequence[Source]) -> dict[str, Any]:
    config = check(merge(sources, accepted_names), subcommand)
    root = config["trainer"].get("default_root_dir") or _RUNS
    return {**config, "ckpt_path": find_checkpoint(config.get("ckpt_path"), root)}


def _say(error: Exception, config: Mapping[str, Any], sources: Sequence[Source], *, name: str = "") -> str:
    """Put ahead where the setting that a message names was given, or else the class that raised it."""
    message = one_line(error)
    if not isinstance(error, _SAYS_ALL):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {message} ({frame.filename}:{frame.lineno})"
    settings = list(_settings_in(config, ()))
    for named in re.findall(r"`(\w+)\b[^`]*`", message):
        found = [keys for keys in settings if keys[-1] == named]
        if len(found) == 1:
            return f"{locate(found[0], sources)}{message}"
    return f"{name}: {message}" if name else message


def _settings_in(node: Mapping[str, Any], keys: Keys) -> Iterator[Keys]:
    """Give all settings, those of classes without their `init_args`."""
    for key, value in node.items():
        inner = keys if key in ("init_args", "dict_kwargs") else (*keys, key)
        if inner is not keys:
            yield inner
        if isinstance(value, dict):
            yield from _settings_in(value, inner)
