"""Guidance, compared with published code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.diffusion import classifier_free_guidance

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "cfg.npz")


def stored(key: str) -> Tensor:
    return torch.from_numpy(GOLDEN[key])


def assert_close(actual: Tensor, key: str) -> None:
    torch.testing.assert_close(actual, stored(key), rtol=2e-6, atol=2e-6)


def test_guidance_equals_flow_grpos() -> None:
    assert_close(classifier_free_guidance(stored("cond"), stored("uncond"), 4.5), "plain_cfg4.5")


def test_guidance_that_keeps_the_norm_equals_qwen_images() -> None:
    guided = classifier_free_guidance(stored("cond"), stored("uncond"), 4.0, rescale="norm")
    assert_close(guided, "qwen_norm_cfg4")
    torch.testing.assert_close(guided.norm(dim=-1), stored("cond").norm(dim=-1))


@pytest.mark.parametrize("rescale", ["none", "norm"])
def test_scale_one_is_the_conditional_velocity(rescale: str) -> None:
    guided = classifier_free_guidance(stored("cond"), stored("uncond"), 1.0, rescale=rescale)
    torch.testing.assert_close(guided, stored("cond"))


def test_guidance_and_its_gradient_equal_dgpos_with_the_unconditional_branch_detached() -> None:
    weight = torch.tensor([0.5, 0.5, 2.0, 2.0]).view(4, 1, 1).requires_grad_()
    unconditional, conditional = (weight * stored("cond").repeat(2, 1, 1)).chunk(2)
    guided = classifier_free_guidance(conditional, unconditional, 4.5, detach_unconditional=True)
    guided.sum().backward()
    assert_close(guided.detach(), "dgpo_cfg.out")
    assert_close(weight.grad, "dgpo_cfg.grad_w")


@pytest.mark.parametrize("rescale", ["none", "norm"])
def test_both_branches_have_a_gradient_unless_one_is_detached(rescale: str) -> None:
    branches = [stored(key).requires_grad_() for key in ("cond", "uncond")]
    classifier_free_guidance(*branches, 4.0, rescale=rescale).square().mul(stored("cond")).sum().backward()
    assert all(branch.grad.abs().min() > 0 for branch in branches)


def test_a_vector_that_is_zero_stays_zero_with_a_finite_gradient() -> None:
    branches = [torch.zeros(1, 2, 3, requires_grad=True) for _ in range(2)]
    guided = classifier_free_guidance(*branches, 4.0, rescale="norm")
    guided.sum().backward()
    assert torch.equal(guided, torch.zeros(1, 2, 3))
    assert all(branch.grad.isfinite().all() for branch in branches)


def test_an_unknown_rescaling_is_refused() -> None:
    with pytest.raises(ValueError, match="`rescale` .* got 'std'"):
        classifier_free_guidance(stored("cond"), stored("uncond"), 4.0, rescale="std")
