"""`--device NAME` of commands that compute in this process."""

from __future__ import annotations

import torch

from digenrl.cli.errors import UsageError, one_line


def read_device(name: str) -> torch.device:
    """Find a device of this machine.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without that kind
        reason = one_line(error).partition(". ")[0].rstrip(".")
        raise UsageError(f"`--device` must be a device of this machine, as cpu, got `{name}`: {reason}.") from error
    return device
