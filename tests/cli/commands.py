"""A configuration of the toy, and what a command gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

TOY = """\
model:
  class_path: FlowGRPO
  init_args:
    policy: tests.toy.ToyPolicy
    reward: tests.toy.level_reward
    group_size: 4
    num_steps: 3
    lr: 1e-4
data:
  prompts: [low, middle, high, top]
  prompts_per_step: 2
trainer:
  strategy:
    class_path: DisaggregatedStrategy
    init_args:
      engine: inline
  max_steps: 2
  enable_progress_bar: false
  enable_model_summary: false
"""


@dataclass
class Result:
    code: int
    out: str
    err: list[str]
    """Lines of standard error."""
    workers: list[str] = field(default_factory=list)
    """Workers that were started."""

    @property
    def error(self) -> str:
        """The one line that a refused input is worth."""
        assert self.code == 2, self.err
        assert len(self.err) == 1, self.err
        assert self.out == ""
        assert self.workers == []
        assert self.err[0].startswith("error: ")
        return self.err[0]


Digenrl = Callable[..., Result]
