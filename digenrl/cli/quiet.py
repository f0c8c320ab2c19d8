"""What the command line prints while it runs: our own log, and Lightning's without its advertisements."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from digenrl.cli.errors import one_line

_UNSAID_LOGS = (
    "Tip: ",
    "GPU available",
    "TPU available",
    "Seed set to",  # config.yaml has it
    "Restoring states from the checkpoint",  # we have named it before
)
_UNSAID_WARNINGS = (
    ".*treespec, LeafSpec.*",
    ".*does not have many workers",  # prompts are not data
    "Found .* module.s. in eval mode",  # a policy always is
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from",  # a resumed run has a folder of its own
    "Total length of `list` across ranks is zero",  # no validation prompts
    r"\s*By default only one JsonargparseDeprecationWarning",  # Lightning calls what jsonargparse will drop
    r"\s*(skip_none parameter|``instantiate_classes``|``ArgumentParser.add_instantiator``) was deprecated",
)


class _Output(logging.Handler):
    """Writes to the standard error of the moment; progress bars may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        print(f"{level}{record.getMessage()}", file=sys.stderr)


def _is_said(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(text in message for text in _UNSAID_LOGS)


@contextmanager
def own_log() -> Iterator[None]:
    """Print the log of `digenrl` from INFO on."""
    log = logging.getLogger("digenrl")
    handler, level, propagate = _Output(), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out what Lightning says about itself, and put warnings on one line each.

    Lightning must be imported before: it makes its loggers then, and sets its own form of warnings.
    """
    # The first one's prints, too, where another library has set up logging before Lightning.
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    handlers = [handler for log in loggers for handler in log.handlers]
    form = warnings.formatwarning
    for handler in handlers:
        handler.addFilter(_is_said)
    with warnings.catch_warnings():
        for pattern in _UNSAID_WARNINGS:
            warnings.filterwarnings("ignore", message=pattern)
        warnings.formatwarning = lambda message, *_, **__: f"warning: {one_line(message)}\n"
        try:
            yield
        finally:
            warnings.formatwarning = form
            for handler in handlers:
                handler.removeFilter(_is_said)
