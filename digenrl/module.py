"""The base class of all algorithms: what a user overrides, and the colocated step built from the same pieces."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from digenrl.diffusion.kernels import Kernel
from digenrl.diffusion.sampling import sample_ode, sample_sde
from digenrl.functional import group_advantages, zero_std_groups
from digenrl.metrics import MetricAccumulator, MetricValue, Reduction
from digenrl.policies import DiffusionPolicy
from digenrl.rewards import Reward, compute_rewards, reward_name
from digenrl.types import Prompt, PromptBatch, ScoredBatch, TimestepBatch, Trajectory

_CHECKPOINT_KEY = "digenrl"


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
    compares it with its group, `select_timesteps` says what of it is trained, `timestep_loss` gives one loss per
    row. Under `DisaggregatedStrategy` they run on workers, in whatever batches keep the devices busy; under any
    other Lightning strategy `training_step` calls the same hooks in this process. Both give the same gradient,
    because losses are unreduced and divided once by the number of rows of the whole step.

    A module never sees a device, a queue or a policy version.

    Example:
        >>> class Reinforce(DiffusionRLModule):
        ...     def rollout(self, prompts):
        ...         return self.sample_trajectory(prompts, FlowSDE(0.7))
        ...     def timestep_loss(self, batch):
        ...         return -batch.advantages * self.log_probs(batch)
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: Reward,
        *,
        group_size: int,
        num_steps: int,
        timestep_fraction: float = 1.0,
        validation_steps: int | None = None,
        lr: float = 1e-4,
        weight_decay: float = 1e-4,
        seed: int | None = None,
    ) -> None:
        """Check the settings; no weights are touched.

        Args:
            policy: the model to train.
            reward: what a sample is worth, `(media, prompts) -> [B]`.
            group_size: samples per prompt and step; their rewards are compared with each other.
            num_steps: denoising steps of a rollout.
            timestep_fraction: share of the denoising steps that is trained, the noisiest first, in (0, 1].
            validation_steps: denoising steps of validation samples; None takes `num_steps`.
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
        # Submodules and callables are not hyper-parameters: loggers would print them, checkpoints pickle them.
        self.save_hyperparameters(ignore=["policy", "reward", "kernel"])
        self.policy = policy
        self._reward = (reward,)  # in a tuple, so that a reward's own network is not taken for a part of the module
        self.group_size = group_size
        self.num_steps = num_steps
        self.num_trained_timesteps = math.floor(num_steps * timestep_fraction + 1e-9)
        self.validation_steps = validation_steps or num_steps
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

    @property
    def reward(self) -> Reward:
        """What a sample is worth."""
        return self._reward[0]

    # ---- the two methods of an algorithm -------------------------------------------------------------------

    @abstractmethod
    def rollout(self, prompts: PromptBatch) -> Trajectory:
        """Make one sample per row of `prompts`. Called under `torch.no_grad`."""

    @abstractmethod
    def timestep_loss(self, batch: TimestepBatch) -> Tensor:
        """Give one loss per row, [N], unreduced; the sum over all rows of a step is divided once by their number."""

    # ---- hooks with a default ------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the policy, once per process, from the same random state everywhere."""
        if self._is_built:
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.policy.build()
        self._is_built = True

    def score(self, trajectory: Trajectory) -> Tensor:
        """Decode the samples and ask the reward, [B] float32. Called under `torch.no_grad`."""
        return compute_rewards(self.reward, self.policy.decode(trajectory.final_latents), trajectory.prompts)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Compare each reward with its group: rewards [B] and group ids [B] of whole groups to advantages [B]."""
        return group_advantages(rewards, group_ids)

    def select_timesteps(self, prompts: PromptBatch) -> Tensor:
        """Choose which recorded timesteps of each sample are trained, [B, k] indices into the schedule.

        Must depend on `prompts` and the settings only, never on a global random state: every worker and the
        driver ask for themselves. By default the first `num_trained_timesteps`, for all samples alike.
        """
        return torch.arange(self.num_trained_timesteps).expand(len(prompts), -1)

    def configure_optimizers(self) -> Any:
        """AdamW over all parameters that require a gradient."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)

    # ---- helpers for subclasses ----------------------------------------------------------------------------

    def sample_trajectory(self, prompts: PromptBatch, kernel: Kernel) -> Trajectory:
        """Denoise with `kernel` at every step and record what `num_trained_timesteps` needs."""
        condition = self.policy.encode(prompts.texts)
        latents = self.policy.initial_latents(prompts.seeds).to(self.device)
        sigmas = self.policy.sigmas(self.num_steps).to(self.device)
        path = sample_sde(
            lambda x, sigma: self.policy(x, sigma, condition),
            latents,
            sigmas,
            kernel,
            seeds=prompts.seeds,
            num_recorded=self.num_trained_timesteps,
        )
        return Trajectory(
            prompts=prompts,
            condition=condition,
            latents=path.latents,
            final_latents=path.final_latents,
            sigmas=sigmas,
            timestep_indices=tuple(range(self.num_trained_timesteps)),
            old_log_probs=path.log_probs,
            kernel=kernel,
        )

    def log_probs(self, batch: TimestepBatch) -> Tensor:
        """Score the recorded steps under the current weights, [N], with gradient."""
        velocity = self.policy(batch.latents, batch.sigma, batch.condition)
        log_prob = batch.kernel.step(
            batch.latents,
            velocity,
            batch.sigma,
            batch.next_sigma,
            sigma_max=batch.sigma_max,
            next_latents=batch.next_latents,
        ).log_prob
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
        latents = self.policy.initial_latents(prompts.seeds).to(self.device)
        sigmas = self.policy.sigmas(self.validation_steps).to(self.device)
        final_latents = sample_ode(lambda x, sigma: self.policy(x, sigma, condition), latents, sigmas)
        return self.policy.decode(final_latents)

    # ---- Lightning -----------------------------------------------------------------------------------------

    def training_step(self, batch: Sequence[Prompt | str], batch_idx: int) -> Tensor:
        """Run one whole RL step in this process; `DisaggregatedStrategy` runs the same hooks on its workers."""
        prompts = self.prompt_batch(batch)
        with torch.no_grad():
            trajectory = self.rollout(prompts)
            rewards = self.score(trajectory)
        # Weights that autocast has cached under `no_grad` would be taken again below, without a gradient.
        torch.clear_autocast_cache()
        advantages = self.advantages(rewards, torch.tensor(prompts.group_ids))
        scored = ScoredBatch(trajectory, rewards, advantages)
        timesteps = self.select_timesteps(prompts)
        loss_sum = torch.stack(
            [self.timestep_loss(scored.timestep_batch(column)).sum() for column in timesteps.split(1, dim=1)]
        ).sum()
        loss = loss_sum / timesteps.numel()
        self.log_step(prompts, rewards, advantages, loss.item(), self.take_metrics())
        self.next_step += 1
        return loss

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
        mean = rewards.mean()
        self.log("reward/mean", mean, prog_bar=True, batch_size=num_prompts, sync_dist=sync_dist)
        self.log_dict(
            {
                f"reward/{reward_name(self.reward)}": mean,
                "reward/zero_std_group_frac": zero_std_groups(rewards, group_ids) / num_prompts,
                "advantage/abs_mean": advantages.abs().mean(),
                "loss": loss,
                **{name: metric.value for name, metric in tracked.items()},
            },
            batch_size=num_prompts,
            sync_dist=sync_dist,
        )

    def validation_step(self, batch: Sequence[Prompt | str], batch_idx: int) -> None:
        """Score deterministic samples whose noise is the same in every validation."""
        prompts = PromptBatch.for_validation(as_prompts(batch, first_uid=batch_idx << 32), seed=self.seed)
        rewards = compute_rewards(self.reward, self.sample(prompts), prompts)
        self.log(
            "val/reward/mean",
            rewards.mean(),
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
