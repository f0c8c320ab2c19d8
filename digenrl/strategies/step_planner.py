"""How a batch of prompts becomes the work of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from digenrl.module import DiffusionRLModule
from digenrl.rewards import RewardTraits
from digenrl.scheduling import cut_step
from digenrl.strategies.step_book import StepPlan

if TYPE_CHECKING:
    from digenrl.strategies.pool import WorkerPool


class StepPlanner:
    """Plans the steps of a fit, of which the next may be planned while one is trained."""

    def __init__(
        self,
        module: DiffusionRLModule,
        pool: WorkerPool,
        *,
        num_generators: int,
        generation_batch_size: int | None,
        micro_batch_groups: Callable[[int], int],
    ) -> None:
        """Plan for a module and its workers.

        Args:
            module: whose `next_step` is the step that is trained.
            pool: of its workers.
            num_generators: that the run was given.
            generation_batch_size: see `DisaggregatedStrategy`.
            micro_batch_groups: gives the groups of a micro-batch in a step of so many groups.
        """
        self.num_groups = 0
        """Of the newest plan."""
        self._module = module
        self._pool = pool
        self._num_generators = num_generators
        self._generation_batch_size = generation_batch_size
        self._micro_batch_groups = micro_batch_groups
        self._round_origin: int | None = None  # the step at which the sampler's count of steps was 0

    def plan(self, batch: Any, step: int, *, policy_version: int, num_accumulated: int) -> StepPlan:
        """Cut a batch of prompts to a step's work.

        Args:
            batch: prompts, or strings.
            step: that they belong to.
            policy_version: of the weights that train the module's `next_step`.
            num_accumulated: batches whose gradients are added up; Lightning divides the loss of each by them.
        """
        module = self._module
        prompts = module.prompt_batch(batch, step=step)
        self.num_groups = len(prompts) // module.group_size
        micro_batches = cut_step(
            step,
            num_groups=self.num_groups,
            group_size=module.group_size,
            groups_per_micro_batch=self._micro_batch_groups(self.num_groups),
            num_generators=self._num_generators,
            generation_batch_size=self._generation_batch_size,
            keeps_groups_whole=RewardTraits.of(module.reward).groupwise,
        )
        return StepPlan(
            prompts,
            micro_batches,
            policy_version=policy_version + step - module.next_step,
            num_rows=module.num_rows(prompts) * num_accumulated,
            shares_rollout=self._place_in_round(step) > 0,
        )

    def begin_anew(self) -> None:
        """Ask the trainers again where in its round a step is: their weights were replaced."""
        self._round_origin = None

    def _place_in_round(self, step: int) -> int:
        """Say which of the `updates_per_rollout` steps of its round a step is, from 0, by the count of the weights."""
        num_updates = self._module.updates_per_rollout
        if num_updates == 1:
            return 0
        if self._round_origin is None:
            self._round_origin = self._module.next_step - self._pool.sampler_steps()
        return (step - self._round_origin) % num_updates
