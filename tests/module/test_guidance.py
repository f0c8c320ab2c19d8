"""Classifier-free guidance in rollouts and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.types import PromptBatch, ScoredBatch, TimestepBatch
from tests.toy import toy_module


def trained_rows(module: Any, prompts: PromptBatch) -> TimestepBatch:
    with torch.no_grad():
        trajectory = module.rollout(prompts)
    advantages = torch.linspace(-1, 1, len(prompts))
    scored = ScoredBatch.of_groups(trajectory, torch.zeros(len(prompts)), advantages)
    return scored.timestep_batch(module.select_timesteps(prompts))


def gradient(module: Any, rows: TimestepBatch) -> Tensor:
    module.zero_grad()
    module.timestep_loss(rows).mean().backward()
    return torch.cat([entry.grad.flatten() for entry in module.parameters() if entry.grad is not None])


def module_and_prompts(**settings: Any) -> tuple[Any, PromptBatch]:
    module = toy_module(**settings)
    module.configure_model()
    return module, module.prompt_batch(["low", "top"])


@pytest.mark.parametrize("rescale", ["none", "norm"])
def test_two_passes_equal_one_of_both(rescale: str) -> None:
    joint, prompts = module_and_prompts(guidance_scale=3.0, guidance_rescale=rescale)
    separate, _ = module_and_prompts(guidance_scale=3.0, guidance_rescale=rescale, guidance_batching="separate")
    rows = trained_rows(joint, prompts)
    others = trained_rows(separate, prompts)
    assert (rows.latents - others.latents).abs().max() <= 1e-5
    assert torch.allclose(gradient(joint, rows), gradient(separate, rows), rtol=1e-4, atol=1e-6)


def test_training_without_guidance_scores_guided_samples_under_the_policy_itself() -> None:
    guided, prompts = module_and_prompts(guidance_scale=3.0)
    without, _ = module_and_prompts(guidance_scale=3.0, train_guidance=False)
    plain, _ = module_and_prompts()
    rows, expected = trained_rows(without, prompts), trained_rows(guided, prompts)
    assert torch.equal(rows.final_latents, expected.final_latents), "the samples are guided all the same"
    assert torch.equal(without.log_probs(rows), plain.log_probs(rows))
    assert (torch.exp(without.log_probs(rows) - rows.old_log_probs) - 1).abs().max() <= 1e-6
    assert (rows.old_log_probs - expected.old_log_probs).abs().max() > 1e-3
    assert torch.equal(gradient(without, rows), gradient(plain, rows))


def test_means_that_are_kept_are_those_of_the_policy_itself() -> None:
    module, prompts = module_and_prompts(guidance_scale=3.0, train_guidance=False)
    with torch.no_grad():
        trajectory = module.sample_trajectory(prompts, module.kernel, keep_means=True)
    scored = ScoredBatch.of_groups(trajectory, torch.zeros(len(prompts)), torch.zeros(len(prompts)))
    rows = scored.timestep_batch(module.select_timesteps(prompts))
    assert torch.allclose(module.score_step(rows).mean, rows.old_means, atol=1e-6)


def test_an_unknown_batching_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`guidance_batching` must be joint or separate, got 'both'"):
        toy_module(guidance_batching="both")
