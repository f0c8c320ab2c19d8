from __future__ import annotations

from collections.abc import Callable

import pytest

from digenrl.policies import FluxPolicy
from tests.policies.family_checks import CHECKS, Check, Family, name_of

FAMILY = Family(
    policy=FluxPolicy,
    pipeline="flux",
    settings={"height": 8, "width": 16, "max_sequence_length": 16},
    media_shape=(3, 8, 16),
    call={"height": 8, "width": 16, "max_sequence_length": 16, "guidance_scale": 3.5},
    timestep_scale=1.0,
    guided_call={"true_cfg_scale": 2.0, "negative_prompt": ""},
)


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_family(check: Check, tiny_pipeline: Callable[[str], str]) -> None:
    check(FAMILY, tiny_pipeline(FAMILY.pipeline))
