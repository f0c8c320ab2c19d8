"""Noise belongs to a sample: no placement, batch or order can change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.algorithms import FlowGRPO
from digenrl.types import PromptBatch, Trajectory
from tests.integration.toy_runs import fit
from tests.toy import ToyPolicy, level_reward


class Recording(FlowGRPO):
    """Writes each sample's trajectory to a folder, from whichever process makes it."""

    folder: str

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        trajectory = super().rollout(prompts)
        for row, seed in enumerate(prompts.seeds):
            torch.save(trajectory.latents[row].clone(), Path(self.folder) / f"{seed}.pt")
            place = [prompts.step, prompts.group_ids[row], prompts.sample_indices[row]]
            (Path(self.folder) / f"{seed}.json").write_text(json.dumps(place))
        return trajectory


def samples_of(folder: Path, strategy: DisaggregatedStrategy, **settings: Any) -> dict[int, Tensor]:
    """Latents [K+1, ...] of all samples of a run, by seed."""
    folder.mkdir()
    module = Recording(ToyPolicy(), level_reward, group_size=4, num_steps=5, lr=1e-3, seed=3)
    module.folder = str(folder)
    fit(strategy, module=module, **settings)
    return {int(file.stem): torch.load(file) for file in folder.glob("*.pt")}


@pytest.mark.parametrize("assist", ["off", "static:2"])
@pytest.mark.parametrize(("engine", "generators"), [("inline", 1), ("inline", 2), ("local", 1), ("local", 2)])
def test_samples_are_bit_equal_where_batch_sizes_are_the_same(
    tmp_path: Path, engine: Any, generators: int, assist: str
) -> None:
    plain = DisaggregatedStrategy(engine="inline", generation_batch_size=2, trainer_assist="off")
    base = samples_of(tmp_path / "base", plain)
    strategy = DisaggregatedStrategy(generators, engine=engine, generation_batch_size=2, trainer_assist=assist)
    other = samples_of(tmp_path / "other", strategy)
    assert base.keys() == other.keys()
    assert len(base) == 4 * 4
    assert all(torch.equal(base[seed], other[seed]) for seed in base)


def test_initial_noise_is_bit_equal_and_samples_close_where_batch_sizes_differ(tmp_path: Path) -> None:
    whole = samples_of(tmp_path / "whole", DisaggregatedStrategy(engine="inline", groups_per_micro_batch="all"))
    parts = samples_of(tmp_path / "parts", DisaggregatedStrategy(2, engine="local", generation_batch_size=1))
    assert whole.keys() == parts.keys()
    for seed in whole:
        assert torch.equal(whole[seed][0], parts[seed][0])
        torch.testing.assert_close(whole[seed], parts[seed], rtol=0, atol=1e-5)


def test_colocated_run_makes_the_same_samples(tmp_path: Path) -> None:
    strategy = DisaggregatedStrategy(engine="inline", groups_per_micro_batch="all")
    disaggregated = samples_of(tmp_path / "disaggregated", strategy)
    colocated = samples_of(tmp_path / "colocated", "auto")  # type: ignore[arg-type]
    assert disaggregated.keys() == colocated.keys()
    assert all(torch.equal(disaggregated[seed], colocated[seed]) for seed in colocated)


def test_no_noise_is_used_twice_in_a_run(tmp_path: Path) -> None:
    samples = samples_of(tmp_path / "run", DisaggregatedStrategy(2, engine="inline"), max_steps=3)
    initial = {tuple(latents[0].flatten().tolist()) for latents in samples.values()}
    assert len(initial) == 3 * 4 * 4
