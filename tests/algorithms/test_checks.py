"""Settings that would change nothing are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from digenrl.algorithms import AWM, CRD, DGPO, DanceGRPO, DiffusionNFT, FlowGRPO, OnlineDPO
from digenrl.module import DiffusionRLModule
from tests.toy import ToyPolicy, level_reward


@pytest.mark.parametrize(
    ("algorithm", "name", "value", "condition", "others"),
    [
        (FlowGRPO, "kl_form", "paper", "`kl_beta` 0", {"kl_beta": 0.1}),
        (FlowGRPO, "train_guidance", False, "`guidance_scale` 1", {"guidance_scale": 2.0}),
        (DanceGRPO, "guidance_rescale", "norm", "`guidance_scale` 1", {"guidance_scale": 2.0}),
        (DGPO, "clips_kl", True, "`kl_beta` 0", {"kl_beta": 0.1}),
        (DGPO, "guidance_batching", "separate", "`guidance_scale` 1", {"reference_guidance_scale": 2.0}),
        (CRD, "reference_guidance_scale", 2.0, "`kl_beta` 0", {"kl_beta": 0.2}),
        (CRD, "guidance_rescale", "norm", "`guidance_scale` 1", {"reference_guidance_scale": 2.0}),
        (AWM, "clip_range", 0.5, "`updates_per_rollout` 1", {"updates_per_rollout": 2}),
        (AWM, "average_cap", 0.5, "`average_kl_beta` 0", {"average_kl_beta": 1.0}),
        (AWM, "guidance_batching", "separate", "`guidance_scale` 1", {"guidance_scale": 2.0}),
        (DiffusionNFT, "guidance_batching", "separate", "`guidance_scale` 1", {"guidance_scale": 2.0}),
        (OnlineDPO, "guidance_rescale", "norm", "`guidance_scale` 1", {"guidance_scale": 2.0}),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(
    algorithm: type[DiffusionRLModule], name: str, value: Any, condition: str, others: dict[str, Any]
) -> None:
    make: Callable[..., DiffusionRLModule] = algorithm
    off = {key: type(entry)(0) for key, entry in others.items() if key.endswith("kl_beta")}
    with pytest.raises(ValueError, match=f"`{name}` must be left out with {condition}, .* got {value}"):
        make(ToyPolicy(), level_reward, **{name: value}, **off)
    make(ToyPolicy(), level_reward, **{name: value}, **others)
