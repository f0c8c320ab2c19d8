"""The base class of all algorithms."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from digenrl.functional import weighted_sum
from digenrl.metrics import MetricValue
from digenrl.module.advantages import AdvantageSettings
from digenrl.module.checks import check_data, check_dropping
from digenrl.module.optimizers import OptimizerName, check_optimizer, make_optimizer
from digenrl.module.prompts import as_prompts
from digenrl.module.rollouts import Solver, check_guidance
from digenrl.module.scoring import advantages_of_kept
from digenrl.module.validation import Validation
from digenrl.policies import DiffusionPolicy
from digenrl.policies.stored_weights import load_stored_weights
from digenrl.rewards import ErrorPolicy, OnRewardError, Reward
from digenrl.types import Prompt, PromptBatch, RowLosses, ScoredBatch, TimestepBatch, Trajectory

_CHECKPOINT_KEY = "digenrl"


class NonFiniteGradientError(RuntimeError):
    """A gradient is NaN or infinite; the optimizer was not stepped."""


class RemoteModule(Protocol):
    """Where the module's weights are when they are not in this process."""

    def fetch_state_dict(self) -> dict[str, Tensor]:
        """Fetch the whole state."""
        ...

    def push_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Replace the whole state."""
        ...

    def sample(self, prompts: PromptBatch) -> Tensor:
        """Run `DiffusionRLModule.sample` where the weights are."""
        ...

    def step_metrics(self) -> dict[str, float]:
        """Give what is known only after the optimizer step: gradient norm, times, utilization."""
        ...

    def serve(self) -> None:
        """Answer workers that wait for this process, which is at something long."""
        ...


class DiffusionRLModule(Validation, ABC):
    """A diffusion RL algorithm. A subclass is two methods: `rollout` and `timestep_loss`.

    Hooks, in the order one sample meets them: `rollout` makes a trajectory, `score` judges it, `advantages`
    compares it with its group, `select_samples` and `select_timesteps` say what is trained, `timestep_loss` gives
    one loss per row. Under `DisaggregatedStrategy` they run on workers, in whatever batches keep the devices busy;
    under any other Lightning strategy `training_step` calls the same hooks in this process. Both give the same
    gradient, because losses are unreduced and divided once by the number of rows of the whole step.

    A module never sees a device, a queue or a policy version.

    Example:
        >>> class Reinforce(DiffusionRLModule):
        ...     def rollout(self, prompts):
        ...         return self.sample_trajectory(prompts, FlowSDE(0.7))
        ...     def timestep_loss(self, batch):
        ...         return -batch.advantages * self.log_probs(batch)
    """

    advantages_scale_gradient: ClassVar[bool] = False
    """Whether twice the advantages give twice the policy's gradient; true of PPO's surrogate."""

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int,
        num_steps: int,
        timestep_fraction: float = 1.0,
        guidance_scale: float = 1.0,
        guidance_rescale: Literal["none", "norm"] = "none",
        guidance_batching: Literal["joint", "separate"] = "joint",
        advantage_scope: Literal["group", "batch"] = "group",
        advantage_ddof: int = 0,
        advantage_eps: float = 1e-4,
        advantage_clip: float = 5.0,
        normalize_by_std: bool = True,
        updates_per_rollout: int = 1,
        ema_decay: float | None = None,
        ema_interval: int = 8,
        validation_steps: int | None = None,
        validation_solver: Solver = "euler",
        on_reward_error: OnRewardError = "retry",
        reward_retries: int = 2,
        optimizer: OptimizerName = "adamw",
        lr: float = 1e-4,
        weight_decay: float = 1e-4,
        seed: int | None = None,
    ) -> None:
        """Check the settings; no weights are touched.

        Args:
            policy: the model to train.
            reward: what a sample is worth, `(media, prompts) -> [B]`; `SeveralRewards` joins several.
            group_size: samples per prompt and step; their rewards are compared with each other.
            num_steps: denoising steps of a rollout.
            timestep_fraction: share of the denoising steps that is trained, the noisiest first, in (0, 1].
            guidance_scale: of classifier-free guidance in rollouts and validation; 1 is without.
            guidance_rescale: `"norm"` gives the guided velocity the norm of the conditional one, over the last axis, as
                Qwen-Image does.
            guidance_batching: whether guidance asks the policy about both conditions in one batch, `"joint"`, or one
                after the other, `"separate"`, which takes less memory.
            advantage_scope: whose rewards the advantages' std is taken over: the `"group"`, or the step's `"batch"`.
            advantage_ddof: the std divides by (number of rewards - this), 0 or 1.
            advantage_eps: added to the std.
            advantage_clip: advantages are clamped to plus or minus this; inf leaves them alone.
            normalize_by_std: divide by the std; False only subtracts the group's mean.
            updates_per_rollout: optimizer steps that train on samples of the same weights: a step's samples are made
                with the weights that the first step of its round began with.
            ema_decay: largest decay of an average of the weights that makes the validation samples, as in Flow-GRPO's
                code (`WarmupDecay`); None validates the weights themselves.
            ema_interval: optimizer steps from one update of that average to the next.
            validation_steps: denoising steps of validation samples; None takes `num_steps`.
            validation_solver: of the ODE for validation samples: `"euler"`, or `"dpm"` for DPM-Solver++ 2M.
            on_reward_error: what is done about samples whose reward raises or is not finite: `"raise"` ends the run,
                `"retry"` asks again first, `"drop_group"` asks again and then leaves the sample's whole group out of
                the step; losses are then divided by the rows that are left. Before that, it is asked about samples one
                by one, even with no retries.
            reward_retries: how often a reward that failed is asked again, at most 1000; it waits 0.5 s, then twice as
                long each time, up to 30 s.
            optimizer: `"adamw"`, `"fused_adamw"`, which steps in one pass over the weights, or `"adamw_8bit"` of
                torchao, which keeps its state in a quarter of the memory; `configure_optimizers` makes any other.
            lr: its learning rate.
            weight_decay: its weight decay.
            seed: fixes all noise; None takes the seed given to `seed_everything`, or 0. Saved in checkpoints.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(reward)
        for name, value in {
            "group_size": group_size,
            "num_steps": num_steps,
            "validation_steps": validation_steps,
            "updates_per_rollout": updates_per_rollout,
            "ema_interval": ema_interval,
        }.items():
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is a count and must be at least 1, got {value}.")
        if group_size < 2:
            raise ValueError(
                "`group_size` must be at least 2, got 1: a sample is compared with the others of its group."
            )
        if not 0 < timestep_fraction <= 1 or math.floor(num_steps * timestep_fraction + 1e-9) < 1:
            raise ValueError(
                f"`timestep_fraction` is the trained share of {num_steps} steps and must be in [{1 / num_steps:g}, 1], "
                f"got {timestep_fraction}."
            )
        if not isinstance(policy, DiffusionPolicy):
            raise ValueError(f"`policy` must be a `DiffusionPolicy`, got {policy!r}.")
        if guidance_rescale not in ("none", "norm"):
            raise ValueError(f"`guidance_rescale` must be none or norm, got {guidance_rescale!r}.")
        if guidance_batching not in ("joint", "separate"):
            raise ValueError(f"`guidance_batching` must be joint or separate, got {guidance_batching!r}.")
        if validation_solver not in ("euler", "dpm"):
            raise ValueError(f"`validation_solver` must be euler or dpm, got {validation_solver!r}.")
        check_guidance("guidance_scale", guidance_scale, policy)
        check_optimizer(optimizer)
        if not 0 <= lr < math.inf:
            raise ValueError(f"`lr` is the learning rate and must be in [0, inf), got {lr}.")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"`weight_decay` must be in [0, inf), got {weight_decay}.")
        # Submodules and callables are not hyper-parameters: loggers would print them, checkpoints pickle them.
        self.save_hyperparameters(ignore=["policy", "reward"])
        self.policy = policy
        self.reward_errors = ErrorPolicy(on_error=on_reward_error, num_retries=reward_retries)
        self.group_size = group_size
        self.num_steps = num_steps
        self.num_trained_timesteps = math.floor(num_steps * timestep_fraction + 1e-9)
        self.guidance_scale = guidance_scale
        self.guidance_rescale: Literal["none", "norm"] = guidance_rescale
        self.guidance_batching: Literal["joint", "separate"] = guidance_batching
        self.advantage_settings = AdvantageSettings(
            scope=advantage_scope,
            ddof=advantage_ddof,
            eps=advantage_eps,
            clip=advantage_clip,
            normalize_by_std=normalize_by_std,
        )
        self.validation_steps = validation_steps or num_steps
        self.validation_solver: Solver = validation_solver
        self.optimizer: OptimizerName = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self._seed_given = seed is not None
        self.seed = seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.next_step = 0
        """Index of the next batch; it seeds the noise, so a resumed run continues with the noise it would have used."""
        self._applied_step = 0
        self._logged_names = {"reward/mean": None}
        self._is_built = False
        self._place_policy: Callable[[DiffusionPolicy], None] = load_stored_weights
        """What is done with the policy between `build` and the first use of its weights; workers may shard it."""
        self._remote: RemoteModule | None = None
        self._add_usual_copies(updates_per_rollout=updates_per_rollout, ema_decay=ema_decay, ema_interval=ema_interval)

    # ---- the two methods of an algorithm -------------------------------------------------------------------

    @abstractmethod
    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Make one sample per row of `prompts`. Called under `torch.no_grad`."""

    @abstractmethod
    def timestep_loss(self, batch: TimestepBatch) -> Tensor | RowLosses:
        """Give one loss per row, [N], unreduced; the sum over all rows of a step is divided once by their number."""

    # ---- hooks with a default ------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the policy, once per process, from the same random state everywhere."""
        if self._is_built:
            return
        if self._trainer is not None:
            check_data(self, self._trainer.datamodule)  # type: ignore[attr-defined]
            check_dropping(self.reward_errors, self._trainer)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.policy.build()
        self.policy.eval()  # modules begin in training mode
        self._place_policy(self.policy)
        self._build_weight_copies()
        self._is_built = True

    def score(self, trajectory: Trajectory) -> Tensor:
        """Decode the samples and ask the reward, [B] float32, or [B, R] of R rewards; see `ask_reward`.

        Called under `torch.no_grad`.
        """
        return self.ask_reward(self.policy.decode(trajectory.final_latents), trajectory.prompts)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Compare each reward with its group: rewards [B] and group ids [B] of whole groups to advantages [B].

        Of several rewards, [B, R], each is compared with its own kind, see `join_advantages`, or their sum is.
        """
        rewards = self.compared_rewards(rewards)
        advantages = self.advantage_settings.compare(rewards, group_ids)
        return self.advantage_settings.clamp(advantages if rewards.ndim == 1 else self.join_advantages(advantages))

    def join_advantages(self, advantages: Tensor) -> Tensor:
        """Add up the advantages of several rewards, [B, R], by their weights: [B]; or keep them apart: [B, R]."""
        return weighted_sum(advantages, self.reward_weights)

    def select_samples(self, rewards: Tensor, advantages: Tensor, group_ids: Tensor) -> Sequence[int] | None:
        """Choose which samples of whole groups are trained, as rows in ascending order; None is all of them.

        An algorithm that chooses keeps `num_trained_samples` of each group, which it overrides, too.
        """
        return None

    @property
    def num_trained_samples(self) -> int:
        """Samples of a group that `select_samples` keeps; the divisor of losses counts these."""
        return self.group_size

    def recorded_steps(self, step: int) -> range:
        """Say which denoising steps the rollouts of a training step record: the first `num_trained_timesteps`.

        Must depend on `step`, the seed and the settings only, as `select_timesteps` must.
        """
        return range(self.num_trained_timesteps)

    def select_timesteps(self, prompts: PromptBatch) -> Tensor:
        """Choose which recorded timesteps of each sample are trained, [B, k] indices into the schedule.

        Must depend on `prompts` and the settings only, never on a global random state: every worker and the
        driver ask for themselves. By default all that are recorded, for all samples alike.
        """
        recorded = self.recorded_steps(prompts.step)
        return torch.arange(recorded.start, recorded.stop).expand(len(prompts), -1)

    def configure_optimizers(self) -> Any:
        """AdamW, of the kind that was chosen, over all parameters that require a gradient."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return make_optimizer(self.optimizer, parameters, lr=self.lr, weight_decay=self.weight_decay)

    @torch.no_grad()
    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make one deterministic sample per row with the ODE: media [B, (F), C, H, W] in [0, 1]."""
        if self._remote is not None:
            return self._remote.sample(prompts)
        condition = self.policy.encode_batch(prompts)
        sigmas = self.policy.sigmas(self.validation_steps).to(self.device)
        noise = self.policy.initial_latents(prompts.seeds)
        latents = self._solve(self.validation_policy, noise, condition, sigmas, self.validation_solver)
        return self.policy.decode(latents)

    # ---- Lightning -----------------------------------------------------------------------------------------

    def training_step(self, batch: Sequence[Prompt | str], batch_idx: int) -> Tensor | None:
        """Run one whole RL step in this process; `DisaggregatedStrategy` runs the same hooks on its workers.

        None, by which Lightning leaves the weights alone, where the reward has failed for all groups.
        """
        prompts = self.prompt_batch(batch)
        with torch.no_grad():
            trajectory = self.rollout(prompts)
            rewards = self.score(trajectory)
        # Weights that autocast has cached under `no_grad` would be taken again below, without a gradient.
        torch.clear_autocast_cache()
        group_ids = torch.tensor(prompts.group_ids)
        is_kept = self.kept_rows(rewards, group_ids)
        advantages = self._advantages_over_ranks(rewards, is_kept, group_ids)
        num_groups, num_kept = len(prompts) // self.group_size, len(group_ids[is_kept].unique())
        self.note_dropped_groups(num_groups - num_kept, num_groups)
        if num_kept == 0:
            self.log_step(prompts, rewards, advantages, 0.0, self.take_metrics())
            self.next_step += 1
            return None
        scored = self.trained_samples(ScoredBatch.of_groups(trajectory, rewards, advantages, is_kept))
        timesteps = self.select_timesteps(scored.trajectory.prompts)
        rows = (
            scored.timestep_batch(timesteps[:, [column]], first_column=column) for column in range(timesteps.shape[1])
        )
        losses = [torch.stack(self.checked_losses(batch)).sum() for batch in rows]
        loss = torch.stack(losses).sum() / self.num_rows(prompts) * (num_groups / num_kept)
        self.log_step(prompts, rewards, advantages, loss.item(), self.take_metrics())
        self.next_step += 1
        return loss

    def _advantages_over_ranks(self, rewards: Tensor, is_kept: Tensor, group_ids: Tensor) -> Tensor:
        """Compare the rewards; where the std is the whole step's, with those of the other data-parallel ranks."""
        if not self.advantage_settings.need_batch_std or self.trainer.world_size == 1:
            return advantages_of_kept(rewards, is_kept, group_ids, self.advantages)

        def gather(values: Tensor) -> Tensor:
            gathered = self.all_gather(values.to(self.device))
            assert isinstance(gathered, Tensor), "of one tensor"
            return gathered.flatten(0, 1).cpu()

        first = self.global_rank * len(rewards)
        return self.advantages(gather(rewards), gather(group_ids))[first : first + len(rewards)]

    def trained_samples(self, scored: ScoredBatch) -> ScoredBatch:
        """Keep the samples that `select_samples` chooses."""
        group_ids = torch.tensor(scored.trajectory.prompts.group_ids)
        rows = self.select_samples(scored.rewards, scored.advantages, group_ids)
        if rows is None:
            return scored
        planned = scored.num_groups * self.num_trained_samples
        assert len(rows) == planned, f"`select_samples` must keep {planned} samples, kept {len(rows)}"
        return scored.select(rows)

    def num_rows(self, prompts: PromptBatch) -> int:
        """Give the divisor of a step's losses: its planned (sample, timestep) rows, also where fewer are trained."""
        num_groups = len(prompts) // self.group_size
        return num_groups * self.num_trained_samples * self.select_timesteps(prompts.select(slice(1))).shape[1]

    def prompt_batch(self, batch: Sequence[Prompt | str], *, step: int | None = None) -> PromptBatch:
        """Expand a step's prompts to groups, with the seeds of that step; None is `next_step`.

        Under data-parallel strategies a rank's groups are numbered after those of the ranks before it.
        """
        prompts = as_prompts(batch)
        self.check_prompts(prompts)
        return PromptBatch.for_step(
            prompts,
            step=self.next_step if step is None else step,
            group_size=self.group_size,
            seed=self.seed,
            first_group=self.global_rank * len(prompts),
        )

    def log_step(
        self,
        prompts: PromptBatch,
        rewards: Tensor,
        advantages: Tensor,
        loss: float,
        tracked: Mapping[str, MetricValue],
    ) -> None:
        """Log the metrics every algorithm has, and those of `track`; groups that were dropped are only counted.

        A metric that had no row in this step, since all groups were dropped, is NaN: Lightning would log an old one.

        Args:
            prompts: of B samples.
            rewards: [B] or [B, R].
            advantages: [B] or [B, R].
            loss: mean over the step's rows.
            tracked: metrics over rows.
        """
        group_ids = torch.tensor(prompts.group_ids)
        is_kept = self.kept_rows(rewards, group_ids)
        num_prompts = len(group_ids[is_kept].unique())
        values: dict[str, Tensor | float] = {name: metric.value for name, metric in tracked.items()}
        if num_prompts > 0:
            values |= {
                "reward/mean": self.total_rewards(rewards[is_kept]).mean(),
                **self.reward_metrics(rewards[is_kept], group_ids[is_kept]),
                "advantage/abs_mean": advantages[is_kept].abs().mean(),
                "loss": loss,
            }
        if self.reward_errors.on_error == "drop_group":
            num_groups = len(prompts) // self.group_size
            self.log("reward/dropped_groups", float(num_groups - num_prompts), batch_size=num_groups)
            self._logged_names |= dict.fromkeys(values)
            values = {**dict.fromkeys(self._logged_names, math.nan), **values}
        # Ranks of a data-parallel strategy hold different prompts.
        options: dict[str, Any] = {"batch_size": max(num_prompts, 1), "sync_dist": self.trainer.world_size > 1}
        self.log("reward/mean", values.pop("reward/mean"), prog_bar=True, **options)
        self.log_dict(values, **options)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does; workers that are done meanwhile get their next task between two values."""
        if self._remote is not None:
            self._remote.serve()
        super().log(*args, **kwargs)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave prompts as they are: they are text, and Lightning would take a frozen dataclass for one to fill."""
        return batch

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Note which batches the weights have seen, once they have: an interrupted step is run again on resume."""
        super().optimizer_step(*args, **kwargs)
        self._applied_step = self.next_step
        if self._remote is not None:
            self.log_dict(self._remote.step_metrics())
        else:
            self.update_weight_copies()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of the gradient before clipping; a strategy with remote weights reports its own."""
        if self._remote is None:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            # A gradient scaler skips such a step by itself, and looks for a smaller scale.
            if not norm.isfinite() and getattr(self.trainer.precision_plugin, "scaler", None) is None:
                raise NonFiniteGradientError(
                    f"the gradient of step {self._applied_step} is {norm.item()}; the weights are unchanged."
                )
            self.log("grad_norm", norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the seed and the step it has reached."""
        checkpoint[_CHECKPOINT_KEY] = {"step": self._applied_step, "seed": self.seed}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the seed and step of the checkpoint; a seed given to the constructor must agree."""
        if _CHECKPOINT_KEY not in checkpoint:
            return
        saved = checkpoint[_CHECKPOINT_KEY]
        if self._seed_given and saved["seed"] != self.seed:
            raise ValueError(
                f"`seed` is {self.seed}, but the checkpoint was made with {saved['seed']}: "
                "leave `seed` out to continue that run, or start a new one without the checkpoint."
            )
        self.seed = saved["seed"]
        self.next_step = self._applied_step = saved["step"]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Give the weights, fetched from the workers where they are."""
        if self._remote is not None:
            return self._remote.fetch_state_dict()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Replace the weights, on the workers where they are."""
        if self._remote is not None:
            return self._remote.push_state_dict(state_dict, strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)
