"""Compiled blocks, whose first pass takes half a minute."""

from __future__ import annotations

import shutil

import pytest

from tests.integration.toy_runs import relative_difference
from tests.strategies.test_blocks import built, velocity_gradient


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on CPUs")
def test_compiled_blocks_keep_their_names_and_gradient() -> None:
    plain, compiled = built(), built(compiles_blocks=True, gradient_checkpointing=True)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    gradient, _ = velocity_gradient(plain)
    assert all(block._compiled_call_impl is not None for block in compiled.blocks())
    found, _ = velocity_gradient(compiled)
    assert relative_difference(found, gradient) <= 1e-6
