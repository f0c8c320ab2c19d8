"""The command line, `digenrl fit` and `digenrl validate`."""

from digenrl.cli.main import main

__all__ = ["main"]
