"""The base class of all algorithms: what a user overrides, and the colocated step built from the same pieces."""

from digenrl.module.advantages import AdvantageSettings
from digenrl.module.base import DiffusionRLModule, RemoteModule, as_prompts, total_loss
from digenrl.module.rollouts import Solver, check_guidance
from digenrl.module.scoring import advantages_of_kept, sum_kept

__all__ = [
    "AdvantageSettings",
    "DiffusionRLModule",
    "RemoteModule",
    "Solver",
    "advantages_of_kept",
    "as_prompts",
    "check_guidance",
    "sum_kept",
    "total_loss",
]
