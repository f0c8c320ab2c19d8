"""The base class of all algorithms: what a user overrides, and the colocated step built from the same pieces."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from digenrl.averaging import ConstantDecay, DecaySchedule, EveryNth, WarmupDecay
from digenrl.diffusion.guidance import classifier_free_guidance
from digenrl.diffusion.kernels import Euler, Kernel, KernelStep
from digenrl.diffusion.noise import sample_noise
from digenrl.diffusion.sampling import sample_dpm_solver, sample_ode, sample_sde
from digenrl.functional import (
    batch_std,
    exceeds_advantage_clip,
    group_advantages,
    per_reward_advantages,
    sum_per_group,
    weighted_sum,
    zero_std_groups,
)
from digenrl.metrics import MetricAccumulator, MetricValue, Reduction
from digenrl.policies import DiffusionPolicy, VelocityField, WeightCopy
from digenrl.rewards import JoinedReward, Reward, compute_rewards, reward_name
from digenrl.types import (
    Condition,
    Prompt,
    PromptBatch,
    RowLosses,
    ScoredBatch,
    TimestepBatch,
    Trajectory,
    derive_seed,
)

_CHECKPOINT_KEY = "digenrl"
_ROLLOUT_COPY, _EMA_COPY = "rollout", "ema"

Solver = Literal["euler", "dpm"]
"""How the ODE is solved: Euler's method, or DPM-Solver++ 2M."""


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


class DiffusionRLModule(LightningModule, ABC):
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
            lr: learning rate of the default optimizer, AdamW.
            weight_decay: its weight decay.
            seed: fixes all noise; None takes the seed given to `seed_everything`, or 0. Saved in checkpoints.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__()
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
        if not callable(reward):
            raise ValueError(f"`reward` must be callable as reward(media, prompts), got {reward!r}.")
        if advantage_scope not in ("group", "batch"):
            raise ValueError(
                f"`advantage_scope` is whose std divides and must be group or batch, got {advantage_scope!r}."
            )
        if advantage_ddof not in (0, 1):
            raise ValueError(f"`advantage_ddof` must be 0 or 1, got {advantage_ddof}.")
        if not 0 <= advantage_eps < math.inf:
            raise ValueError(f"`advantage_eps` is added to the std and must be in [0, inf), got {advantage_eps}.")
        if not advantage_clip > 0:
            raise ValueError(f"`advantage_clip` must be above 0, got {advantage_clip}; use inf for no bound.")
        if not isinstance(policy, DiffusionPolicy):
            raise ValueError(f"`policy` must be a `DiffusionPolicy`, got {policy!r}.")
        if guidance_rescale not in ("none", "norm"):
            raise ValueError(f"`guidance_rescale` must be none or norm, got {guidance_rescale!r}.")
        if validation_solver not in ("euler", "dpm"):
            raise ValueError(f"`validation_solver` must be euler or dpm, got {validation_solver!r}.")
        check_guidance("guidance_scale", guidance_scale, policy)
        # Submodules and callables are not hyper-parameters: loggers would print them, checkpoints pickle them.
        self.save_hyperparameters(ignore=["policy", "reward", "kernel"])
        self.policy = policy
        self._reward = (reward,)  # in a tuple, so that a reward's own network is not taken for a part of the module
        self.group_size = group_size
        self.num_steps = num_steps
        self.num_trained_timesteps = math.floor(num_steps * timestep_fraction + 1e-9)
        self.guidance_scale = guidance_scale
        self.guidance_rescale: Literal["none", "norm"] = guidance_rescale
        self.advantage_scope = advantage_scope
        self.advantage_ddof = advantage_ddof
        self.advantage_eps = advantage_eps
        self.advantage_clip = advantage_clip
        self.normalize_by_std = normalize_by_std
        self.updates_per_rollout = updates_per_rollout
        self.validation_steps = validation_steps or num_steps
        self.validation_solver: Solver = validation_solver
        self.lr = lr
        self.weight_decay = weight_decay
        self._seed_given = seed is not None
        self.seed = seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.next_step = 0
        """Index of the next batch; it seeds the noise, so a resumed run continues with the noise it would have used."""
        self._applied_step = 0
        self._metrics = MetricAccumulator()
        self._is_built = False
        self._remote: RemoteModule | None = None
        self.weight_copies = nn.ModuleDict()
        """Other weights of the policy by name, once it is built; see `add_weight_copy`."""
        self._copy_schedules: dict[str, DecaySchedule] = {}
        self._published_copies: list[str] = []
        self._row_group: dist.ProcessGroup | None = None
        if ema_decay is not None:
            if not 0 < ema_decay < 1:
                raise ValueError(
                    f"`ema_decay` is the largest decay of an average and must be in (0, 1), got {ema_decay}."
                )
            self.add_weight_copy(_EMA_COPY, WarmupDecay(ema_decay, ema_interval), for_rollout=True)
        if updates_per_rollout > 1:
            self.add_weight_copy(_ROLLOUT_COPY, EveryNth(ConstantDecay(0.0), updates_per_rollout), for_rollout=True)

    @property
    def reward(self) -> Reward:
        """What a sample is worth."""
        return self._reward[0]

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
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.policy.build()
        for name, schedule in self._copy_schedules.items():
            self.weight_copies[name] = WeightCopy(self.policy, schedule)
        self._is_built = True

    def score(self, trajectory: Trajectory) -> Tensor:
        """Decode the samples and ask the reward, [B] float32, or [B, R] of R rewards. Called under `torch.no_grad`."""
        return compute_rewards(self.reward, self.policy.decode(trajectory.final_latents), trajectory.prompts)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Compare each reward with its group: rewards [B] and group ids [B] of whole groups to advantages [B].

        Of several rewards, [B, R], each is compared with its own kind, and the advantages are added up by the rewards'
        weights. An algorithm that wants them apart returns [B, R].
        """
        settings = self._advantage_settings
        if rewards.ndim == 1:
            return self._clip(group_advantages(rewards, group_ids, **settings))
        return self._clip(weighted_sum(per_reward_advantages(rewards, group_ids, **settings), self.reward_weights))

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
        """AdamW over all parameters that require a gradient."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)

    # ---- helpers for subclasses ----------------------------------------------------------------------------

    def add_weight_copy(self, name: str, schedule: DecaySchedule, *, for_rollout: bool = False) -> None:
        """Keep other weights of the policy beside the trained ones; call it in the constructor.

        Args:
            name: by which `policy_copy` finds it: `"reference"`, `"old"`.
            schedule: how it follows the trained weights after each optimizer step.
            for_rollout: whether `rollout` or `sample` need it; generators then receive it with the weights.
        """
        self._copy_schedules[name] = schedule
        if for_rollout:
            self._published_copies.append(name)

    def policy_copy(self, name: str) -> WeightCopy:
        """Give the policy with other weights: called as the policy is, and without gradient."""
        copy = self.weight_copies[name]
        assert isinstance(copy, WeightCopy), "`configure_model` makes the copies"
        return copy

    @property
    def rollout_policy(self) -> VelocityField:
        """What makes the samples that are trained: the policy, or the one that the round of updates began with."""
        return self.policy_copy(_ROLLOUT_COPY) if self.updates_per_rollout > 1 else self.policy

    def guided(self, policy: VelocityField, *, scale: float | None = None, detach: bool = False) -> VelocityField:
        """Give a policy with classifier-free guidance; both conditions go through it as one batch.

        Args:
            policy: the policy, or a copy of it.
            scale: of the guidance; None is the module's own. 1 gives `policy` itself.
            detach: let no gradient through the unconditional half.
        """
        factor = self.guidance_scale if scale is None else scale
        if factor == 1:
            return policy

        def velocity(latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
            both = type(condition).cat([condition, self.policy.unconditional(condition)])
            halves = policy(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
            conditional, unconditional = halves.chunk(2)
            return classifier_free_guidance(
                conditional, unconditional, factor, rescale=self.guidance_rescale, detach_unconditional=detach
            )

        return velocity

    def sample_trajectory(
        self,
        prompts: PromptBatch,
        kernel: Kernel,
        *,
        sde_steps: range | None = None,
        tail_sigmas: Tensor | None = None,
        keep_means: bool = False,
        final: Literal["latents", "prediction"] = "latents",
    ) -> Trajectory:
        """Denoise with `kernel` and record `recorded_steps`; the options are those of `sample_sde`."""
        condition = self.policy.encode(prompts.texts)
        sigmas = self.policy.sigmas(self.num_steps).to(self.device)
        recorded = self.recorded_steps(prompts.step)
        policy = self.guided(self.rollout_policy)
        path = sample_sde(
            lambda x, sigma: policy(x, sigma, condition),
            self.initial_latents(prompts).to(self.device),
            sigmas,
            kernel,
            seeds=prompts.seeds,
            recorded=recorded,
            sde_steps=sde_steps,
            tail_sigmas=tail_sigmas,
            keep_means=keep_means,
            final=final,
        )
        return Trajectory(
            prompts=prompts,
            condition=condition,
            latents=path.latents,
            final_latents=path.final_latents,
            sigmas=sigmas,
            timestep_indices=tuple(recorded),
            old_log_probs=path.log_probs,
            kernel=kernel,
            old_means=path.means,
        )

    def sample_final_latents(self, prompts: PromptBatch, *, solver: Solver = "euler") -> Trajectory:
        """Denoise with the ODE and keep the final latents only, for losses on the forward process."""
        condition = self.policy.encode(prompts.texts)
        sigmas = self.policy.sigmas(self.num_steps).to(self.device)
        return Trajectory(
            prompts=prompts,
            condition=condition,
            latents=None,
            final_latents=self._solve(self.rollout_policy, prompts, condition, sigmas, solver),
            sigmas=sigmas,
            timestep_indices=(),
            old_log_probs=None,
            kernel=Euler(),
        )

    def initial_latents(self, prompts: PromptBatch) -> Tensor:
        """Draw the noise that samples start from, [B, ...] float32; by default each sample's own."""
        return self.policy.initial_latents(prompts.seeds)

    def training_noise(self, batch: TimestepBatch, *, shared: Literal["group", "sample"]) -> Tensor:
        """Draw noise for the forward process, [N, ...] float32: fresh for each step, timestep and sample, or group.

        It depends on the seeds and the place in the schedule, so batching, ranks and restarts do not change it.
        """
        prompts = batch.prompts
        if shared == "group":
            seeds = [derive_seed(self.seed, "group", prompts.step, group) for group in prompts.group_ids]
        else:
            seeds = list(prompts.seeds)
        shape = batch.final_latents.shape[1:]
        drawn: dict[tuple[int, int], Tensor] = {}
        for key in zip(seeds, batch.timestep_index.tolist(), strict=True):
            if key not in drawn:
                drawn[key] = sample_noise([key[0]], f"training noise {key[1]}", shape)[0]
        keys = zip(seeds, batch.timestep_index.tolist(), strict=True)
        return torch.stack([drawn[key] for key in keys]).to(batch.final_latents.device)

    def group_mean(self, values: Tensor, group_index: Tensor) -> Tensor:
        """Give each row [N] the mean over its whole group at its timestep, wherever the group's rows are.

        Without gradient, and to be called by all ranks alike: sums include the rows of the other ranks.
        """
        return self.group_sum(values, group_index) / self.group_sum(torch.ones_like(values), group_index)

    def group_sum(self, values: Tensor, group_index: Tensor) -> Tensor:
        """Give each row [N] the sum over its whole group; see `group_mean`."""
        values = values.detach()
        if self._row_group is None:
            return sum_per_group(values, group_index)
        num_groups = group_index.max() + 1 if len(group_index) else group_index.new_zeros(())
        dist.all_reduce(num_groups, dist.ReduceOp.MAX, group=self._row_group)
        sums = values.new_zeros(int(num_groups)).index_add(0, group_index, values)
        dist.all_reduce(sums, group=self._row_group)
        return sums[group_index]

    def score_step(self, batch: TimestepBatch, policy: VelocityField | None = None) -> KernelStep:
        """Score the recorded steps under the current weights, with gradient, or under another policy's."""
        assert batch.latents is not None, "the rollout must record the steps that are trained"
        velocity = self.guided(policy or self.policy)(batch.latents, batch.sigma, batch.condition)
        return batch.kernel.step(
            batch.latents,
            velocity,
            batch.sigma,
            batch.next_sigma,
            sigma_max=batch.sigma_max,
            next_latents=batch.next_latents,
        )

    def log_probs(self, batch: TimestepBatch) -> Tensor:
        """Give the recorded steps' log-probs under the current weights, [N], with gradient."""
        log_prob = self.score_step(batch).log_prob
        assert log_prob is not None, "a deterministic kernel has no log-probs; the constructor must refuse it"
        return log_prob

    def track(self, name: str, rows: Tensor, *, reduction: Reduction = "mean") -> None:
        """Report a metric's values [N] from inside `timestep_loss`; it is logged once per step over all rows."""
        self._metrics.add_rows(name, rows, reduction)

    def take_metrics(self) -> dict[str, MetricValue]:
        """Hand over what `track` has collected since the last call."""
        return self._metrics.take()

    @torch.no_grad()
    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make one deterministic sample per row with the ODE: media [B, (F), C, H, W] in [0, 1]."""
        if self._remote is not None:
            return self._remote.sample(prompts)
        condition = self.policy.encode(prompts.texts)
        sigmas = self.policy.sigmas(self.validation_steps).to(self.device)
        policy = self.policy_copy(_EMA_COPY) if _EMA_COPY in self._copy_schedules else self.policy
        latents = self._solve(policy, prompts, condition, sigmas, self.validation_solver)
        return self.policy.decode(latents)

    def _solve(
        self, policy: VelocityField, prompts: PromptBatch, condition: Condition, sigmas: Tensor, solver: Solver
    ) -> Tensor:
        guided = self.guided(policy)
        latents = self.policy.initial_latents(prompts.seeds).to(self.device)
        solve = {"euler": sample_ode, "dpm": sample_dpm_solver}[solver]
        return solve(lambda x, sigma: guided(x, sigma, condition), latents, sigmas)

    # ---- Lightning -----------------------------------------------------------------------------------------

    def training_step(self, batch: Sequence[Prompt | str], batch_idx: int) -> Tensor:
        """Run one whole RL step in this process; `DisaggregatedStrategy` runs the same hooks on its workers."""
        prompts = self.prompt_batch(batch)
        with torch.no_grad():
            trajectory = self.rollout(prompts)
            rewards = self.score(trajectory)
        # Weights that autocast has cached under `no_grad` would be taken again below, without a gradient.
        torch.clear_autocast_cache()
        group_ids = torch.tensor(prompts.group_ids)
        advantages = self.advantages(rewards, group_ids)
        scored = self.trained_samples(ScoredBatch.of_groups(trajectory, rewards, advantages))
        timesteps = self.select_timesteps(scored.trajectory.prompts)
        losses = [
            total_loss(self.timestep_loss(scored.timestep_batch(timesteps[:, [column]], first_column=column)))
            for column in range(timesteps.shape[1])
        ]
        loss = torch.stack(losses).sum() / self.num_rows(prompts)
        self.log_step(prompts, rewards, advantages, loss.item(), self.take_metrics())
        self.next_step += 1
        return loss

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
        """Log the metrics every algorithm has, and those of `track`."""
        group_ids = torch.tensor(prompts.group_ids)
        num_prompts = len(prompts) // self.group_size
        # Ranks of a data-parallel strategy hold different prompts.
        sync_dist = self.trainer.world_size > 1
        totals = self.total_rewards(rewards)
        mean = totals.mean()
        self.log("reward/mean", mean, prog_bar=True, batch_size=num_prompts, sync_dist=sync_dist)
        self.log_dict(
            {
                **{f"reward/{name}": column.mean() for name, column in self._named_rewards(rewards).items()},
                "reward/zero_std_group_frac": zero_std_groups(totals, group_ids) / num_prompts,
                "advantage/abs_mean": advantages.abs().mean(),
                "loss": loss,
                **{name: metric.value for name, metric in tracked.items()},
            },
            batch_size=num_prompts,
            sync_dist=sync_dist,
        )

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """The weights of several rewards."""
        return self.reward.weights if isinstance(self.reward, JoinedReward) else (1.0,)

    def total_rewards(self, rewards: Tensor) -> Tensor:
        """Add up several rewards [B, R] by their weights; one reward [B] is itself."""
        return rewards if rewards.ndim == 1 else weighted_sum(rewards, self.reward_weights)

    def _named_rewards(self, rewards: Tensor) -> dict[str, Tensor]:
        if isinstance(self.reward, JoinedReward):
            return dict(zip(self.reward.names, rewards.unbind(1), strict=True))
        return {reward_name(self.reward): rewards}

    def validation_step(self, batch: Sequence[Prompt | str], batch_idx: int) -> None:
        """Score deterministic samples whose noise is the same in every validation."""
        prompts = PromptBatch.for_validation(as_prompts(batch, first_uid=batch_idx << 32), seed=self.seed)
        rewards = compute_rewards(self.reward, self.sample(prompts), prompts)
        self.log(
            "val/reward/mean",
            self.total_rewards(rewards).mean(),
            prog_bar=True,
            batch_size=len(prompts),
            on_epoch=True,
            sync_dist=self._trainer is not None and self.trainer.world_size > 1,
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Note which batches the weights have seen, once they have: an interrupted step is run again on resume."""
        super().optimizer_step(*args, **kwargs)
        self._applied_step = self.next_step
        if self._remote is not None:
            self.log_dict(self._remote.step_metrics())
        else:
            self.update_weight_copies()

    def update_weight_copies(self) -> None:
        """Let the copies of the weights follow an optimizer step."""
        for name in self._copy_schedules:
            self.policy_copy(name).update()

    def published_weights(self) -> dict[str, Tensor]:
        """Give what generators receive after an optimizer step, by its name in the state: what rollouts need."""
        published: dict[str, Tensor] = {
            name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad
        }
        for name in self._published_copies:
            entries = self.weight_copies[name].state_dict(prefix=f"weight_copies.{name}.", keep_vars=True)
            published.update(entries)
        return published

    # ---- advantages over the whole step, while its groups arrive one by one -----------------------------------

    @property
    def needs_batch_std(self) -> bool:
        """Whether advantages depend on the rewards of all groups of the step."""
        return self.advantage_scope == "batch" and self.normalize_by_std

    def centered_rewards(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Give rewards less the mean of their groups, [B]: advantages whose std is not known yet."""
        return group_advantages(rewards, group_ids, normalize_by_std=False)

    def gradient_scale(self, rewards: Tensor, group_ids: Tensor) -> float | None:
        """Give what the gradient of `centered_rewards` must be multiplied by, once all rewards [B] are known.

        None: an advantage would be clipped, and then the gradient is not a multiple.
        """
        std = batch_std(rewards, ddof=self.advantage_ddof)
        centered = self.centered_rewards(rewards, group_ids)
        if exceeds_advantage_clip(centered, std, eps=self.advantage_eps, advantage_clip=self.advantage_clip):
            return None
        return 1 / (std + self.advantage_eps) if std > 0 else 0.0

    @property
    def _advantage_settings(self) -> dict[str, Any]:
        return {
            "scope": self.advantage_scope,
            "ddof": self.advantage_ddof,
            "eps": self.advantage_eps,
            "normalize_by_std": self.normalize_by_std,
        }

    def _clip(self, advantages: Tensor) -> Tensor:
        return advantages.clamp(-self.advantage_clip, self.advantage_clip)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of the gradient before clipping; a strategy with remote weights reports its own."""
        if self._remote is None:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.log("grad_norm", torch.nn.utils.get_total_norm(gradients))

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


def as_prompts(batch: Sequence[Prompt | str], *, first_uid: int = 0) -> list[Prompt]:
    """Accept what a data loader yields: prompts, or plain strings, which are numbered from `first_uid`.

    Raises:
        TypeError: anything else.
    """
    if isinstance(batch, (str, bytes)) or not isinstance(batch, Sequence):
        raise TypeError(f"a training batch must be a list of prompts, got {type(batch).__name__}.")
    prompts = []
    for row, prompt in enumerate(batch):
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt, uid=first_uid + row)
        if not isinstance(prompt, Prompt):
            raise TypeError(f"a batch must hold `Prompt`s or strings, got {type(prompt).__name__} in row {row}.")
        prompts.append(prompt)
    if not prompts:
        raise TypeError("a training batch holds no prompts.")
    return prompts


def check_guidance(name: str, scale: float, policy: DiffusionPolicy) -> None:
    """Check a guidance scale that is called `name`.

    Raises:
        ValueError: it is below 1, or the policy has no condition of an empty prompt to compare with.
    """
    if not 1 <= scale < math.inf:
        raise ValueError(f"`{name}` must be at least 1, which is no guidance, got {scale}.")
    if scale != 1 and not policy.has_unconditional:
        raise ValueError(
            f"`{name}` must be 1 with `{type(policy).__name__}`, got {scale}: that policy has no `unconditional`, "
            "the condition of an empty prompt that classifier-free guidance compares with."
        )


def total_loss(losses: Tensor | RowLosses) -> Tensor:
    """Add up the losses of all rows."""
    return losses.sum() if isinstance(losses, Tensor) else (losses.policy + losses.regularizer).sum()
