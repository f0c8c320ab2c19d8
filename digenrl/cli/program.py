"""`digenrl fit` and `digenrl validate`, from the arguments to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from digenrl.cli.arguments import Arguments
from digenrl.cli.check import check
from digenrl.cli.classes import accepted_names
from digenrl.cli.errors import SettingError, UsageError, one_line
from digenrl.cli.input_errors import INPUT_ERRORS, say_input_error
from digenrl.cli.lightning_cli import CLI, ConstructorError
from digenrl.cli.merge import merge
from digenrl.cli.progress import INTERRUPTED, TERMINATED, Progress
from digenrl.cli.resume import find_checkpoint
from digenrl.cli.sources import Source, explain
from digenrl.engines import WorkerError
from digenrl.module import NonFiniteGradientError
from digenrl.rewards import RewardError
from digenrl.strategies.parity import ParityError
from digenrl.strategies.weight_planes import WeightSyncError

_RUN_ERRORS = (WorkerError, RewardError, WeightSyncError, ParityError, NonFiniteGradientError)
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
        if arguments.dry_run.is_asked:
            return _run_dry(subcommand, config, progress, arguments)
        CLI(subcommand, config, progress=progress, print_config=arguments.print_config)
    except SettingError as error:
        raise UsageError(explain(error, sources)) from error
    except ConstructorError as error:
        if not isinstance(error.error, INPUT_ERRORS):
            raise error.error from None
        raise UsageError(say_input_error(error.error, config, sources, name=error.name)) from error
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
        return _signal_code(error) or 1
    except INPUT_ERRORS as error:
        if progress.trainer is not None:
            raise
        raise UsageError(say_input_error(error, config, sources)) from error
    return TERMINATED if progress.received_sigterm else 0


def _run_dry(subcommand: str, config: dict[str, Any], progress: Progress, arguments: Arguments) -> int:
    """Make the objects of a run, and describe it in place of running it."""
    from digenrl.cli.dry_run import DryRunOptions, run_dry, with_published_model

    options = DryRunOptions.of(arguments.dry_run)
    with with_published_model(config) as (changed, notes):
        cli = CLI(subcommand, changed, progress=progress, print_config=arguments.print_config, runs=False)
        run_dry(cli.trainer, cli.model, cli.datamodule, options, notes)
    return 0


def _signal_code(error: BaseException) -> int:
    """Give the exit code of the signal that the run was ending for when the error came; 0 if there was none."""
    before = error.__context__
    while before is not None:
        if isinstance(before, KeyboardInterrupt):
            return INTERRUPTED
        if isinstance(before, SIGTERMException):
            return TERMINATED
        before = before.__context__
    return 0


def _configure(subcommand: str, sources: Sequence[Source]) -> dict[str, Any]:
    config = check(merge(sources, accepted_names), subcommand)
    root = config["trainer"].get("default_root_dir") or _RUNS
    return {**config, "ckpt_path": find_checkpoint(config.get("ckpt_path"), root)}
