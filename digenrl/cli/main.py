"""The entry point: what can be said without torch is said without torch."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

import digenrl
from digenrl.cli.errors import UsageError, one_line, suggest

SUBCOMMANDS = {
    "fit": "train a policy with a reward",
    "validate": "score a policy on the validation prompts",
    "export": "write what a run has trained as others load it",
    "simulate": "compare the ways to run a workload on a cluster",
    "plan": "find the best strategy for a number of devices",
    "rewards": "list the rewards there are, or score files with one",
    "serve-reward": "serve a reward for HTTPReward, from an environment or machine of its own",
    "serve-judge": "serve a vision-language model for VLMJudge",
}
_OWN_PROGRAMS = ("export", "simulate", "plan", "rewards", "serve-reward", "serve-judge")
"""Commands whose module has `run(words)`; those that configure a run share `program.py`."""

_HELP = f"""usage: digenrl COMMAND [--config FILE] [--key value]...

Reinforcement learning for diffusion and flow models.

commands:
{chr(10).join(f"  {name:<12} {summary}" for name, summary in SUBCOMMANDS.items())}

  digenrl fit --config run.yaml                      run a configuration
  digenrl fit --config run.yaml --model.lr 1e-4      with another learning rate
  digenrl fit --config run.yaml --print_config       see all settings, run nothing
  digenrl fit --config run.yaml --dry_run            see sizes, memory and times, run nothing
  digenrl fit --config run.yaml --ckpt_path last     continue the newest run
  digenrl fit --help                                 all settings
  digenrl export --checkpoint last --output my-lora  write the adapter of the newest run
  digenrl simulate --config cluster.yaml             what each mechanism would gain
  digenrl plan --devices 32 --profile profile.json   what to set, from what a run has measured
  digenrl rewards try --reward OCRReward --image a.png --prompt '"42"'
                                                     what a reward gives for a file

options:
  -h, --help  show this
  --version   show the version

DIGENRL_TRACEBACK=1 adds the traceback to an error.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a failed run, 2 for wrong input, 130 and 143 for signals."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if words[0] == "--version":
        print(f"digenrl {digenrl.__version__}")
        return 0
    try:
        return _run(words[0], words[1:])
    except UsageError as error:
        if os.environ.get("DIGENRL_TRACEBACK"):
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(subcommand: str, words: Sequence[str]) -> int:
    if subcommand not in SUBCOMMANDS:
        if subcommand.startswith("-"):
            commands = " or ".join(SUBCOMMANDS)
            raise UsageError(f"`{subcommand}` must stand behind a command, {commands}: digenrl fit {subcommand}")
        raise UsageError(f"`{subcommand}` is not a command{suggest(subcommand, SUBCOMMANDS)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that a configuration can name local classes
    if subcommand in _OWN_PROGRAMS:
        return _run_own_program(importlib.import_module(f"digenrl.cli.{subcommand.replace('-', '_')}").run, words)
    from digenrl.cli.arguments import read_arguments

    arguments = read_arguments(words, takes_dry_run=subcommand == "fit")
    from digenrl.cli.quiet import own_log, quiet_lightning

    with own_log():
        import lightning.pytorch  # noqa: F401  (makes the loggers that are made quiet)

        with quiet_lightning():
            if arguments.show_help:
                from digenrl.cli.usage import print_usage

                print_usage(subcommand, arguments.sources)
                return 0
            from digenrl.cli.program import run

            return run(subcommand, arguments)


def _run_own_program(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    try:
        code = run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    return code
