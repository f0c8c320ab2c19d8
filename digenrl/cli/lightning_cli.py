"""LightningCLI where it makes the objects of a run, without what it does behind one's back."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, NoReturn

from jsonargparse.typing import register_type
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor

import digenrl
from digenrl.cli.classes import lent_annotations
from digenrl.cli.errors import UsageError, one_line
from digenrl.cli.progress import Progress, SecondInterrupt
from digenrl.cli.resume import check_resume
from digenrl.module import DiffusionRLModule


class ConstructorError(BaseException):
    """A constructor has raised, the cause of this; `Exception`s are swallowed where a setting has a choice of types."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name, error)
        self.name = name
        self.error = error


class CLI(LightningCLI):
    """Runs a configuration that has been checked.

    What the configuration says wins over a checkpoint, `--print_config` prints without running, optimizers are the
    module's own, and errors are raised as they are.
    """

    def __init__(
        self,
        subcommand: str,
        config: dict[str, Any],
        *,
        progress: Progress,
        print_config: bool,
        runs: bool = True,
    ) -> None:
        self._print_config = print_config
        self._runs = runs
        self._progress = progress
        _register_types()
        super().__init__(
            DiffusionRLModule,
            LightningDataModule,
            trainer_class=digenrl.Trainer,
            trainer_defaults={"callbacks": [progress]},
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=_Parser,
            parser_kwargs={name: {"dump_header": [f"digenrl=={digenrl.__version__}"]} for name in self.subcommands()},
            subclass_mode_model=True,
            subclass_mode_data=True,
            # There are no parameters yet: the policy is built later, and by other processes.
            auto_configure_optimizers=False,
            args={"subcommand": subcommand, subcommand: config},
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Give the Trainer's methods that are commands, and their arguments that are not options."""
        return {name: given for name, given in LightningCLI.subcommands().items() if name in ("fit", "validate")}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the configuration; with `--print_config`, print it and end."""
        self.config = parser.parse_object(args)
        parser.add_instantiator(_instantiate, object)
        if self._print_config:
            subcommand = self.config["subcommand"]
            sys.stdout.write(self._parser(subcommand).dump(self.config[subcommand], skip_none=False))
            raise SystemExit(0)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it, unless the objects alone were asked for."""
        if self._runs:
            super()._run_subcommand(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone; Lightning's would let the checkpoint's settings win over it."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Put a callback before those of the configuration, too."""
        given = self._get(self.config_init, "trainer")["callbacks"]
        callbacks = given if isinstance(given, list) else [] if given is None else [given]
        return super().instantiate_trainer(callbacks=[SecondInterrupt(), *callbacks], **kwargs)

    def after_instantiate_classes(self) -> None:
        """Compare a checkpoint with the configuration."""
        self._progress.notes = check_resume(self._get(self.config_init, "ckpt_path"), self.model)


class _Parser(LightningArgumentParser):
    """A parser that raises its errors, where jsonargparse prints them below the usage of all options.

    An argument that a class passes on to its base class needs no type of its own.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the error."""
        raise UsageError(one_line(message)) from ex

    def add_class_arguments(self, class_type: type, *args: Any, **kwargs: Any) -> list[str]:
        """Add a class's settings with the types that `settings_of` gives them."""
        with lent_annotations(class_type):
            names: list[str] = super().add_class_arguments(class_type, *args, **kwargs)
        return names

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add it so that its errors come through."""

        @functools.wraps(instantiator)
        def instantiate(cls: type, *cls_args: Any, **cls_kwargs: Any) -> Any:
            try:
                return instantiator(cls, *cls_args, **cls_kwargs)
            except Exception as error:
                raise ConstructorError(cls.__name__, error) from error

        # Lightning's come later and are for modules; those must be asked before the one for all classes.
        super().add_instantiator(instantiate, *args, prepend=args[0] is not object, **kwargs)


def instantiate(annotation: Any, value: Any) -> Any:
    """Make one thing that a configuration describes, as a run makes its own.

    Raises:
        ConstructorError: a constructor has raised.
        UsageError: a value that cannot be of the type.
    """
    _register_types()
    parser = _Parser()
    parser.add_argument("--value", type=annotation)
    with warnings.catch_warnings():
        # These two have other names since jsonargparse 4.49, which are missing in the oldest that we take.
        warnings.simplefilter("ignore", DeprecationWarning)
        parser.add_instantiator(_instantiate, object)
        return parser.instantiate_classes(parser.parse_object({"value": value})).value


def _instantiate(cls: type, *args: Any, **kwargs: Any) -> Any:
    return cls(*args, **kwargs)


def _register_types() -> None:
    """Correct how jsonargparse takes two types."""
    # It writes whatever a setting `str | Path | list[str]` holds as text, a list, too.
    register_type(Path, serializer=_path_text)
    # It takes `Callable[..., Tensor]` for a maker of tensors, and so refuses classes whose objects can be called.
    register_type(Tensor, serializer=_refuse_tensor, deserializer=_refuse_tensor)


def _path_text(path: object) -> str:
    if not isinstance(path, PurePath):
        raise ValueError(f"must be a path, got {path!r}.")
    return str(path)


def _refuse_tensor(value: object) -> NoReturn:
    raise ValueError("a tensor cannot be written in a configuration.")
