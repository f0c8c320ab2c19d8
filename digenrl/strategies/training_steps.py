"""The steps of a fit, from a batch of prompts to the weights that it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

from digenrl.scheduling import Scheduler
from digenrl.scheduling.profile import Profile
from digenrl.strategies.driver import StepDriver
from digenrl.strategies.measured_profile import measured_profile
from digenrl.strategies.optimizers import hyper_parameters
from digenrl.strategies.parity import NUM_SAMPLES
from digenrl.strategies.snapshots import StepCall
from digenrl.strategies.span import Span
from digenrl.strategies.step_book import StepPlan, WorkerSpan
from digenrl.strategies.step_log import StepLog
from digenrl.strategies.step_planner import StepPlanner
from digenrl.strategies.step_window import StepWindow
from digenrl.strategies.training_data import TrainingData
from digenrl.strategies.workers import StepReport

if TYPE_CHECKING:
    from digenrl.strategies.disaggregated import DisaggregatedStrategy


class TrainingSteps:
    """Runs the steps of one fit on the workers of a strategy.

    Lifecycle: `train` with each batch, `finish` with each optimizer step; `begin_anew` where weights were replaced.
    """

    def __init__(self, strategy: DisaggregatedStrategy, data: TrainingData) -> None:
        """Prepare the steps; the workers are connected and have an optimizer.

        Args:
            strategy: whose options and workers are used, and whose `policy_version` rises with the steps.
            data: of the fit.
        """
        self.metrics: dict[str, float] = {}
        """What is known of the newest optimizer step once it is over."""
        self._strategy = strategy
        self._module = strategy.module
        self._pool = strategy.pool
        self._data = data
        self._planner = StepPlanner(
            strategy.module,
            strategy.pool,
            num_generators=strategy.generators,
            generation_batch_size=strategy.generation_batch_size,
            micro_batch_groups=strategy.micro_batch_groups,
        )
        self.driver = StepDriver(
            strategy.pool,
            self._make_scheduler(),
            strategy.module,
            timestep_batch_size=None if strategy.timestep_batch_size == "all" else strategy.timestep_batch_size,
            poll=self._poll,
        )
        self._log = StepLog()
        self._window = StepWindow()
        self._scales = (1.0, 1.0)  # of the policy's gradient, and of all of it
        self._is_parity_due = strategy.parity_check != "off"

    def train(self, batch: Any) -> float:
        """Run a step up to the accumulated gradient; returns its loss, as one of all batches of a window."""
        driver, module = self.driver, self._module
        self._check_parity(batch)
        self._window.begin()
        step = module.next_step
        if not driver.has_step(step):
            driver.add_step(self._plan(batch, step))
        # Workers begin before the next step's work is prepared; after the first step they have begun already.
        prompts = driver.start_step(step)
        self._look_ahead()
        if prompts != module.prompt_batch(batch, step=step):
            raise RuntimeError(
                f"the batch of step {step} is not the one that the data loader gave: change batches in the loader or "
                "in `on_before_batch_transfer`, not in other hooks, and leave no epoch in `on_train_batch_start`."
            )
        result = driver.finish_step(step)
        self._log.note(result)
        self._scales = result.gradient_scale, result.row_scale
        module.note_dropped_groups(result.num_dropped_groups, len(result.prompts) // module.group_size)
        if self._num_accumulated > 1:
            self._log.write(module, self._num_accumulated)
        module.next_step += 1
        self._window.add(len(prompts))
        return result.loss * self._num_accumulated

    def finish(self, optimizer: Optimizer) -> tuple[WorkerSpan, ...]:
        """Step the trainers' optimizers as the driver's is set, and publish the weights.

        Returns:
            What each worker did since the first batch of the window, and when.
        """
        driver, strategy = self.driver, self._strategy
        settings = hyper_parameters(optimizer)
        call = StepCall(settings, *strategy.precision_plugin.take_clipping(), *self._scales)
        reports = self._pool.end_window(call, strategy.policy_version + 1)
        strategy.policy_version += 1
        norm = next(iter(reports.values())).gradient_norm if reports else 0.0
        must_change = norm > 0 and any(group["lr"] > 0 for group in settings)
        writes = self._pool.publish(strategy.policy_version, must_change=must_change)
        driver.durations.observe("publish", max(span.seconds for span in writes.values()))
        if reports:
            driver.durations.observe("optimizer", max(report.span.seconds for report in reports.values()))
        driver.announce_weights(strategy.policy_version)
        self._data.commit(self._window.num_batches)
        if driver.has_step(self._module.next_step):
            # Workers do not wait until this process has logged and Lightning has gone round its loop.
            driver.start_step(self._module.next_step)
        self._log.write(self._module, self._num_accumulated)
        return self._close_window(reports, norm, writes)

    def begin_anew(self) -> None:
        """Go on with weights that were replaced, on idle workers."""
        self._planner.begin_anew()
        self.driver.begin_anew(self._make_scheduler())

    def profile(self) -> Profile | None:
        """Give the durations that were measured; None before the first step is over."""
        strategy = self._strategy
        return measured_profile(
            self.driver.durations.as_dict(),
            num_groups=self._planner.num_groups,
            group_size=self._module.group_size,
            generators=strategy.generators,
            trainers=strategy.trainers,
            timestep_batch_size=self._log.fitting_timesteps
            if strategy.timestep_batch_size == "auto"
            else strategy.timestep_batch_size,
        )

    @property
    def _num_accumulated(self) -> int:
        return self._module.trainer.accumulate_grad_batches

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            self._pool.generators,
            reward_workers=self._pool.reward_workers,
            policy=self._strategy.scheduling_policy,
            policy_version=self._strategy.policy_version,
        )

    def _poll(self) -> None:
        # Lightning looks for SIGTERM between batches only, and a step may take minutes.
        if self._module.trainer.received_sigterm:
            raise SIGTERMException

    def _check_parity(self, batch: Any) -> None:
        """Before the first step, see that generators and trainers compute the same, with its first samples."""
        if not self._is_parity_due:
            return
        self._is_parity_due = False
        prompts = self._module.prompt_batch(batch, step=self._module.next_step)
        report = self.driver.check_parity(prompts.select(slice(NUM_SAMPLES)))
        report.settle(self._strategy.parity_check, getattr(self._module, "clip_range", None))
        self._log.note_parity(report.metrics)

    def _plan(self, batch: Any, step: int) -> StepPlan:
        version = self._strategy.policy_version
        return self._planner.plan(batch, step, policy_version=version, num_accumulated=self._num_accumulated)

    def _look_ahead(self) -> None:
        """Make the next step's work known: it can begin as soon as its weights exist, or before, where it may."""
        next_step = self._module.next_step + 1
        obstacle = self._data.obstacle()
        if obstacle is not None and self._strategy.scheduling_policy.staleness > 0:
            raise ValueError(f"`staleness` must be 0 with {obstacle}: the next step's prompts cannot be known ahead.")
        if obstacle is not None or self._num_accumulated > 1:
            return
        for batch in self._data.next_batches(self._module.trainer):
            if not self.driver.has_step(next_step):
                self.driver.add_step(self._plan(batch, next_step))

    def _close_window(
        self, reports: Mapping[str, StepReport], gradient_norm: float, writes: Mapping[str, Span]
    ) -> tuple[WorkerSpan, ...]:
        """Sum up what the workers did since the window's first batch."""
        strategy = self._strategy
        detail = f"version {strategy.policy_version}"
        for worker, report in reports.items():
            self.driver.note_span(worker, "optimizer", detail, report.span)
        for worker, span in writes.items():
            self.driver.note_span(worker, "sync", detail, span)
        spans = self.driver.take_spans()
        self.metrics = {
            "grad_norm": gradient_norm,
            "policy_version": float(strategy.policy_version),
            "time/sync_s": max(span.seconds for span in writes.values()),
            **({"restarts": float(self._pool.recovery.num_restarts)} if strategy.max_restarts else {}),
            **self._window.metrics(
                spans,
                num_generators=strategy.generators,
                num_trainers=strategy.trainers,
                num_workers=strategy.num_workers,
            ),
        }
        self._window = StepWindow()
        return spans
