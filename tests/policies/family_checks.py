"""What every model family must do; each family's tests call all of `CHECKS` with its tiny pipeline.

@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_family(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(FAMILY, tiny_pipeline(FAMILY.pipeline))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import cloudpickle
import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy, PromptData
from digenrl.algorithms import DGPO, DanceGRPO, FlowGRPO
from digenrl.diffusion import FlowSDE
from digenrl.module import DiffusionRLModule
from digenrl.policies import PipelinePolicy
from digenrl.policies.stored_weights import load_stored_weights
from digenrl.types import Prompt, PromptBatch, ScoredBatch, Trajectory
from tests.integration.toy_runs import fit, relative_difference
from tests.policies.tiny_pipelines import PROMPTS

STEP_SIZE = 1e4  # so large that the moved weights are the gradient, to the precision of float32
Mode = Literal["float32", "bfloat16"]
"""All in float32; or frozen weights in bfloat16 and autocast, as `Trainer(precision="bf16-mixed")` has it."""

TOLERANCE: dict[Mode, float] = {"float32": 1e-6, "bfloat16": 5e-4}


@dataclass(frozen=True)
class Family:
    """A family's class, and how its tiny pipeline is used."""

    policy: type[PipelinePolicy]
    pipeline: str
    """Name of the tiny pipeline."""
    settings: Mapping[str, Any]
    """Of the policy."""
    media_shape: tuple[int, ...]
    """Of one sample."""
    call: Mapping[str, Any]
    """Arguments of the pipeline's `__call__` beside prompt, latents and steps, without classifier-free guidance."""
    guided_call: Mapping[str, Any] | None = None
    """With classifier-free guidance of scale 2 as well; None if the pipeline has none."""
    guidance_rescale: Literal["none", "norm"] = "none"
    timestep_scale: float = 1000.0
    """What the transformer's `timestep` is to sigma."""
    timestep_of: Callable[[Tensor], Tensor] | None = None
    """Instead of that, where it is more than a factor."""
    num_steps: int = 4
    to_pipeline: Callable[[PipelinePolicy, Tensor], Tensor] = field(default=lambda policy, latents: latents)
    """From the policy's initial latents to those that the pipeline takes."""
    from_pipeline: Callable[[PipelinePolicy, Tensor], Tensor] = field(default=lambda policy, latents: latents)
    """From the latents that the pipeline gives to the policy's."""
    euler_of: Callable[[Any, int], Any] = field(default=lambda scheduler, num_steps: scheduler)
    """From the pipeline's scheduler to one that makes Euler's steps on the same sigmas."""

    def make(self, path: str, mode: Mode = "float32", **settings: Any) -> PipelinePolicy:
        """Make a policy."""
        return self.policy(path, dtype=mode, **{**self.settings, **settings})

    def build(self, path: str, mode: Mode = "float32", *, seed: int = 0, **settings: Any) -> PipelinePolicy:
        """Make a policy with its weights, as a module does."""
        policy = self.make(path, mode, **settings)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            policy.build()
        load_stored_weights(policy)
        return policy


def autocast(mode: Mode) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if mode == "bfloat16" else nullcontext()


def by_index(media: Tensor, prompts: PromptBatch) -> Tensor:
    """Rewards that no rounding of media moves, so that gradients can be compared closely."""
    assert media.isfinite().all()
    return torch.tensor(prompts.sample_indices, dtype=torch.float32)


class Descent(FlowGRPO):
    """Plain gradient descent: the difference of the weights is the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=STEP_SIZE)


class DanceDescent(DanceGRPO):
    configure_optimizers = Descent.configure_optimizers


class DGPODescent(DGPO):
    configure_optimizers = Descent.configure_optimizers


# With less noise, the rounding of float32 is a larger part of a log-prob.
ALGORITHMS: dict[str, Callable[..., DiffusionRLModule]] = {
    "FlowGRPO": partial(Descent, clip_range=1e-2, timestep_fraction=0.5, noise_level=1.2),
    "DanceGRPO": partial(DanceDescent, clip_range=1e-2, noise_level=1.2),
    "DGPO": partial(DGPODescent, num_trained_timesteps=2),
}


def module_of(
    family: Family, path: str, mode: Mode = "float32", *, algorithm: str = "FlowGRPO", **settings: Any
) -> Any:
    """A module that trains a LoRA of the family, or, with `lora_rank=None`, all of it."""
    policy = family.make(path, mode, lora_rank=settings.pop("lora_rank", 2))
    defaults: dict[str, Any] = {"group_size": 2, "num_steps": family.num_steps, "seed": 0}
    if settings.get("guidance_scale", 1.0) != 1:
        defaults["guidance_rescale"] = family.guidance_rescale
    return ALGORITHMS[algorithm](policy, by_index, **{**defaults, **settings})


# ---- what is checked ----------------------------------------------------------------------------------------


def ode_equals_the_pipeline(family: Family, path: str) -> None:
    _compare_ode(family, path, family.call, scale=1.0)


def guided_ode_equals_the_pipeline(family: Family, path: str, scale: float = 2.0) -> None:
    if family.guided_call is not None:
        _compare_ode(family, path, {**family.call, **family.guided_call}, scale=scale)


def _compare_ode(family: Family, path: str, call: Mapping[str, Any], *, scale: float) -> None:
    from diffusers import DiffusionPipeline

    module = module_of(family, path, lora_rank=None, guidance_scale=scale)
    module.configure_model()
    policy, prompts = module.policy, PROMPTS[:2]
    noise = policy.initial_latents([1, 2])
    with torch.no_grad():
        sigmas = policy.sigmas(family.num_steps)
        ours = module._solve(policy, noise, policy.encode(prompts), sigmas, "euler")
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = family.euler_of(pipeline.scheduler, family.num_steps)
    theirs = pipeline(
        prompt=prompts,
        latents=family.to_pipeline(policy, noise),
        num_inference_steps=family.num_steps,
        output_type="latent",
        **call,
    )[0]
    assert ours.shape == (2, *policy.latent_shape)
    assert (ours - family.from_pipeline(policy, theirs)).abs().max() <= 1e-5
    assert (ours - noise).abs().max() > 0.1, "the velocity must have moved them"


def _rollout(module: Any, mode: Mode) -> Trajectory:
    prompts = PromptBatch.for_step(
        [Prompt(text, uid) for uid, text in enumerate(PROMPTS[:2])], step=0, group_size=2, seed=0
    )
    with torch.no_grad(), autocast(mode):
        trajectory: Trajectory = module.sample_trajectory(prompts, FlowSDE(0.7))
    return trajectory


def _rows(trajectory: Trajectory, samples: slice, timesteps: Sequence[int]) -> Any:
    part = trajectory.select(samples)
    zeros = torch.zeros(len(part))
    scored = ScoredBatch(part, zeros, zeros, zeros.long(), 1)
    return scored.timestep_batch(torch.tensor(timesteps).expand(len(part), -1))


def recomputed_ratio_is_one(family: Family, path: str, mode: Mode, lora_rank: int | None, scale: float = 1.0) -> None:
    if scale != 1 and family.guided_call is None:
        return
    module = module_of(family, path, mode, lora_rank=lora_rank, timestep_fraction=1.0, guidance_scale=scale)
    module.configure_model()
    trajectory = _rollout(module, mode)
    steps = list(range(family.num_steps))

    def deviation(samples: slice, timesteps: Sequence[int]) -> float:
        rows = _rows(trajectory, samples, timesteps)
        with autocast(mode):
            return (torch.exp(module.log_probs(rows) - rows.old_log_probs) - 1).abs().max().item()

    assert max(deviation(slice(None), [step]) for step in steps) == 0.0
    assert deviation(slice(None), steps) <= TOLERANCE[mode]
    assert max(deviation(slice(row, row + 1), steps) for row in range(len(trajectory))) <= TOLERANCE[mode]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02)
    assert deviation(slice(None), steps) > TOLERANCE[mode], "other weights must be seen"


def timesteps_are_those_that_were_stored(family: Family, path: str, mode: Mode) -> None:
    module = module_of(family, path, mode, timestep_fraction=1.0)
    module.configure_model()
    received: list[Tensor] = []
    part = module.policy.transformers[0]
    transformer = module.policy.get_submodule(part)
    transformer.register_forward_pre_hook(
        lambda _, args, kwargs: received.append(kwargs["timestep"].clone()), with_kwargs=True
    )
    trajectory = _rollout(module, mode)
    timestep_of = family.timestep_of or (lambda sigma: sigma * family.timestep_scale)
    stored = timestep_of(trajectory.sigmas[:-1])
    assert len(received) == family.num_steps
    for fed, expected in zip(received, stored, strict=True):
        assert fed.dtype == torch.float32
        assert torch.equal(fed, expected.expand_as(fed))
    received.clear()
    with torch.no_grad(), autocast(mode):
        module.log_probs(_rows(trajectory, slice(None), range(family.num_steps)))
    assert torch.equal(torch.cat(received), stored.repeat_interleave(len(trajectory)))


def decoded_media_are_in_range(family: Family, path: str) -> None:
    policy = family.build(path)
    latents = policy.initial_latents([1, 2, 3])
    media = policy.decode(latents)
    assert media.shape == (3, *family.media_shape)
    assert media.dtype == torch.float32
    assert media.min() >= 0
    assert media.max() <= 1
    assert media.std() > 0
    assert torch.equal(policy.decode(latents[1:2]), media[1:2])
    assert not any(name.startswith("vae") for name, _ in policy.named_parameters())


def conditions_do_not_depend_on_batching(family: Family, path: str) -> None:
    together = family.build(path).encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    alone = family.build(path)
    rows = type(together).cat([alone.encode([PROMPTS[0]]), alone.encode([PROMPTS[1]]), alone.encode([PROMPTS[0]])])
    for (name, value), (_, other) in zip(together._tensors(), rows._tensors(), strict=True):
        assert torch.equal(value, other), name
    names = [name for name, value in together._tensors() if not torch.equal(value[0], value[1])]
    assert names, "two prompts must differ"
    empty = alone.unconditional(rows)
    assert [len(value) for _, value in empty._tensors()] == [3] * len(list(rows._tensors()))


def checkpoint_has_what_is_trained(family: Family, path: str, lora_rank: int | None) -> None:
    policy = family.build(path, lora_rank=lora_rank)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    state = policy.state_dict()
    assert set(state) == trained
    assert all(value.dtype == torch.float32 for value in state.values())
    assert all(".lora_" in name for name in trained) == (lora_rank is not None)
    with torch.no_grad():
        for value in state.values():
            value.add_(0.01)
    copy = family.build(path, lora_rank=lora_rank, seed=1)
    latents, sigma = policy.initial_latents([1]), torch.tensor([0.5])
    with torch.no_grad():
        changed, fresh = (entry.velocity(latents, sigma, entry.encode(PROMPTS[:1])) for entry in (policy, copy))
        assert not torch.equal(changed, fresh)
        copy.load_state_dict(state)
        assert torch.equal(copy.velocity(latents, sigma, copy.encode(PROMPTS[:1])), changed)
    removed = next(iter(state))
    with pytest.raises(RuntimeError, match=re.escape(removed)):
        copy.load_state_dict({name: value for name, value in state.items() if name != removed})


def a_policy_that_was_used_can_be_sent(family: Family, path: str) -> None:
    policy = family.make(path)
    assert policy.latent_shape
    assert not list(policy.parameters())
    policy = family.build(path, lora_rank=2)
    policy.encode(PROMPTS[:1])
    policy.decode(policy.initial_latents([1]))
    sent = cloudpickle.loads(cloudpickle.dumps(policy))
    assert [name for name, _ in sent.named_parameters()] == [name for name, _ in policy.named_parameters()]
    assert set(sent.state_dict()) == set(policy.state_dict())
    hidden = [len(cloudpickle.dumps(entry)) for entry in (policy._text_encoding, policy._decoding, policy._embeddings)]
    assert max(hidden) < 2_000


def step_equals_the_colocated_one(family: Family, path: str, algorithm: str, engine: str = "inline") -> None:
    colocated = step_gradient(family, path, "auto", algorithm)
    strategy = DisaggregatedStrategy(
        1,
        1,
        engine=engine,
        groups_per_micro_batch=2,
        # DGPO's gradient is a small rest of terms that cancel, of which the rounding of another batch size would be
        # more than 1e-6.
        timestep_batch_size=1 if algorithm == "DGPO" else "all",
        trainer_assist="off",
    )
    disaggregated = step_gradient(family, path, strategy, algorithm)
    assert max(value.abs().max().item() for value in colocated.values()) > 0
    assert relative_difference(disaggregated, colocated) <= 1e-6


def step_gradient(
    family: Family,
    path: str,
    strategy: Any,
    algorithm: str = "FlowGRPO",
    data: PromptData | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """The gradient of a step, over what is trained."""
    module, start = (module_of(family, path, algorithm=algorithm, **settings) for _ in range(2))
    start.configure_model()
    before = {name: value.clone() for name, value in start.state_dict().items()}
    data = data or PromptData(PROMPTS[:2], prompts_per_step=2, seed=0)
    _, _, after = fit(strategy, module=module, data=data)
    return {name: (before[name] - after[name]) / STEP_SIZE for name in before}


def weights_without_a_gradient_are_left_alone(
    family: Family, path: str, engine: str = "inline", num_trainers: int = 1
) -> None:
    settings: dict[str, Any] = {"lora_rank": None, "ema_decay": 0.9, "ema_interval": 1}
    data = PromptData(PROMPTS[:2], prompts_per_step=2, seed=0)
    strategy = DisaggregatedStrategy(1, num_trainers, engine=engine, trainer_assist="off")
    module = module_of(family, path, **settings)
    trainer, _, after = fit(strategy, module=module, data=data, gradient_clip_val=1e-3, max_steps=2)
    assert trainer.global_step == 2
    assert all(value.isfinite().all() for value in after.values())
    start = module_of(family, path, **settings)
    start.configure_model()
    before = start.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items() if name.startswith("policy."))
    assert any(name.startswith("weight_copies.ema.") for name in after)


Check = Callable[[Family, str], None]

CHECKS: list[Check] = [
    ode_equals_the_pipeline,
    guided_ode_equals_the_pipeline,
    partial(recomputed_ratio_is_one, mode="float32", lora_rank=2),
    partial(recomputed_ratio_is_one, mode="bfloat16", lora_rank=2),
    partial(recomputed_ratio_is_one, mode="float32", lora_rank=None),
    partial(recomputed_ratio_is_one, mode="bfloat16", lora_rank=None),
    partial(recomputed_ratio_is_one, mode="float32", lora_rank=2, scale=2.0),
    partial(recomputed_ratio_is_one, mode="bfloat16", lora_rank=2, scale=2.0),
    partial(timesteps_are_those_that_were_stored, mode="float32"),
    partial(timesteps_are_those_that_were_stored, mode="bfloat16"),
    decoded_media_are_in_range,
    conditions_do_not_depend_on_batching,
    partial(checkpoint_has_what_is_trained, lora_rank=2),
    partial(checkpoint_has_what_is_trained, lora_rank=None),
    a_policy_that_was_used_can_be_sent,
    *(partial(step_equals_the_colocated_one, algorithm=name) for name in ALGORITHMS),
    weights_without_a_gradient_are_left_alone,
]
"""The ordinary ones, in this process; `tests/scale` runs steps on workers of their own."""


def name_of(check: Check) -> str:
    """Name a check for pytest."""
    if isinstance(check, partial):
        return "-".join([check.func.__name__, *map(str, check.keywords.values())])
    return check.__name__
