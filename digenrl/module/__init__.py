"""The base class of all algorithms: what a user overrides, and the colocated step built from the same pieces."""

from digenrl.module.advantages import AdvantageSettings
from digenrl.module.base import DiffusionRLModule, NonFiniteGradientError, RemoteModule
from digenrl.module.checks import accumulated_batches, check_data, check_dropping
from digenrl.module.prompts import as_prompts
from digenrl.module.rollouts import Solver, check_guidance
from digenrl.module.scoring import advantages_of_kept
from digenrl.module.validation import VALIDATION_MEAN

__all__ = [
    "VALIDATION_MEAN",
    "AdvantageSettings",
    "DiffusionRLModule",
    "NonFiniteGradientError",
    "RemoteModule",
    "Solver",
    "accumulated_batches",
    "advantages_of_kept",
    "as_prompts",
    "check_data",
    "check_dropping",
    "check_guidance",
]
