"""Qwen-Image's weights that get no gradient, where several trainers reduce, clip and shard."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from digenrl import DisaggregatedStrategy
from tests.policies.test_qwen_image import check_what_has_no_gradient, train_with_decay
from tests.policies.tiny_pipelines import save_tiny_pipeline


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize(
    ("sharding", "grad_sync"), [("none", "step"), ("fsdp", "step"), ("fsdp", "micro_batch")], ids=str
)
def test_what_has_no_gradient_stays_as_it_is_on_two_trainers(
    tmp_path: Path,
    sharding: Literal["none", "fsdp"],
    grad_sync: Literal["step", "micro_batch"],
    lora_rank: int | None,
) -> None:
    path = str(save_tiny_pipeline("qwen", tmp_path / "qwen"))
    strategy = DisaggregatedStrategy(1, 2, sharding=sharding, grad_sync=grad_sync, trainer_assist="off")
    before, after = train_with_decay(path, strategy, lora_rank)
    check_what_has_no_gradient(before, after, lora_rank)
