"""The data between the stages: seeds, layouts, and what must not be joined."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from digenrl import Condition, Prompt, PromptBatch, ScoredBatch, TimestepBatch, Trajectory
from digenrl.diffusion import Euler, FlowSDE
from digenrl.types import derive_seed

ROW_FIELDS = ["latents", "next_latents", "final_latents", "sigma", "next_sigma", "sigma_max", "timestep_index"]
ROW_FIELDS += ["old_log_probs", "advantages", "group_index"]


@dataclass(frozen=True)
class TwoConditions(Condition):
    text: Tensor  # [B, 3]
    level: Tensor  # [B]
    guidance: float = 4.5


def prompts_named(*texts: str) -> list[Prompt]:
    return [Prompt(text, uid) for uid, text in enumerate(texts)]


def trajectory_of(prompts: PromptBatch, *, num_steps: int = 5, recorded: tuple[int, ...] = (0, 1, 2)) -> Trajectory:
    num_samples = len(prompts)
    return Trajectory(
        prompts=prompts,
        condition=TwoConditions(torch.randn(num_samples, 3), torch.randn(num_samples)),
        latents=torch.randn(num_samples, len(recorded) + 1, 2, 4),
        final_latents=torch.randn(num_samples, 2, 4),
        sigmas=torch.linspace(1, 0, num_steps + 1),
        timestep_indices=recorded,
        old_log_probs=torch.randn(num_samples, len(recorded)),
        kernel=FlowSDE(0.7),
    )


# ---- prompts -------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 2**40), st.integers(1, 6), st.integers(2, 6))
def test_all_seeds_of_a_run_differ(step: int, seed: int, num_prompts: int, group_size: int) -> None:
    prompts = prompts_named(*["same text"] * num_prompts)
    seeds = [
        value
        for at in (step, step + 1)
        for value in PromptBatch.for_step(prompts, step=at, group_size=group_size, seed=seed).seeds
    ]
    seeds += PromptBatch.for_step(prompts, step=step, group_size=group_size, seed=seed + 1).seeds
    seeds += PromptBatch.for_validation(prompts, seed=seed).seeds
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**63 for value in seeds)


@given(st.lists(st.text(), min_size=1, max_size=6), st.integers(2, 5), st.randoms())
def test_a_samples_seed_does_not_depend_on_slicing_or_order(texts: list[str], group_size: int, random: object) -> None:
    batch = PromptBatch.for_step(prompts_named(*texts), step=3, group_size=group_size, seed=1)
    rows = list(range(len(batch)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    shuffled = batch.select(rows)
    assert [shuffled.seeds[rows.index(row)] for row in range(len(batch))] == list(batch.seeds)
    cut = len(batch) // 2
    assert PromptBatch.cat([batch.select(slice(cut)), batch.select(slice(cut, None))]) == batch


def test_ranks_with_shares_of_a_step_ask_for_the_samples_of_the_whole_step() -> None:
    prompts = prompts_named(*"abcd")
    whole = PromptBatch.for_step(prompts, step=7, group_size=3, seed=5)
    shares = [
        PromptBatch.for_step(prompts[first : first + 2], step=7, group_size=3, seed=5, first_group=first)
        for first in (0, 2)
    ]
    assert PromptBatch.cat(shares) == whole


def test_equal_prompts_and_those_that_differ_by_a_space_keep_groups_and_noise_of_their_own() -> None:
    twice = Prompt("a cat", 0)  # the very same row, as in a step that reaches into the next pass
    batch = PromptBatch.for_step([twice, Prompt("a cat", 1), Prompt("a cat ", 2), twice], step=0, group_size=2, seed=0)
    assert batch.group_ids == (0, 0, 1, 1, 2, 2, 3, 3)
    assert batch.sample_indices == (0, 1) * 4
    assert batch.texts == ("a cat",) * 4 + ("a cat ",) * 2 + ("a cat",) * 2
    assert len(set(batch.seeds)) == 8


def test_the_noise_of_a_validation_sample_depends_on_its_row_and_index_alone() -> None:
    prompts = [Prompt("a", 4, 0), Prompt("a", 4, 1), Prompt("b", 9, 0)]
    whole = PromptBatch.for_validation(prompts, seed=3)
    alone = [PromptBatch.for_validation([prompt], seed=3).seeds[0] for prompt in reversed(prompts)]
    assert list(whole.seeds) == alone[::-1]
    assert len(set(whole.seeds)) == 3


def test_batches_of_two_steps_cannot_be_joined() -> None:
    parts = [PromptBatch.for_step(prompts_named("a"), step=step, group_size=2, seed=0) for step in (0, 1)]
    with pytest.raises(AssertionError, match=r"steps \[0, 1\]"):
        PromptBatch.cat(parts)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), st.lists(st.integers(0, 10**9), min_size=1, max_size=5))
def test_seeds_of_different_parts_differ(left: list[int], right: list[int]) -> None:
    assert (derive_seed(*left) == derive_seed(*right)) == (left == right)


def test_a_seed_is_the_same_in_every_version_and_on_every_machine() -> None:
    assert derive_seed(0, "train", 1) == 4314656094532500422


# ---- trajectories --------------------------------------------------------------------------------------------


@pytest.fixture
def trajectory() -> Trajectory:
    torch.manual_seed(0)
    return trajectory_of(PromptBatch.for_step(prompts_named("a", "b", "c"), step=2, group_size=2, seed=0))


def assert_same_samples(left: Trajectory, right: Trajectory) -> None:
    assert left.prompts == right.prompts
    for name in ("latents", "final_latents", "old_log_probs", "sigmas"):
        assert torch.equal(getattr(left, name), getattr(right, name))
    assert torch.equal(left.condition.text, right.condition.text)  # type: ignore[attr-defined]
    assert torch.equal(left.condition.level, right.condition.level)  # type: ignore[attr-defined]
    assert left.condition.guidance == right.condition.guidance  # type: ignore[attr-defined]
    shared = (left.kernel, left.policy_version, left.timestep_indices)
    assert shared == (right.kernel, right.policy_version, right.timestep_indices)


@pytest.mark.parametrize("borders", [(0, 6), (0, 1, 6), (0, 2, 3, 6)])
def test_slices_of_a_trajectory_join_to_the_whole(trajectory: Trajectory, borders: tuple[int, ...]) -> None:
    parts = [trajectory.select(slice(*pair)) for pair in zip(borders[:-1], borders[1:], strict=True)]
    assert [len(part) for part in parts] == [b - a for a, b in zip(borders[:-1], borders[1:], strict=True)]
    assert_same_samples(Trajectory.cat(parts), trajectory)


def test_a_selection_holds_the_rows_it_was_asked_for(trajectory: Trajectory) -> None:
    part = trajectory.select(slice(1, 5))
    for row in range(4):
        assert part.prompts.seeds[row] == trajectory.prompts.seeds[row + 1]
        assert torch.equal(part.latents[row], trajectory.latents[row + 1])
        assert torch.equal(part.final_latents[row], trajectory.final_latents[row + 1])
        assert torch.equal(part.old_log_probs[row], trajectory.old_log_probs[row + 1])  # type: ignore[index]
        assert torch.equal(part.condition.text[row], trajectory.condition.text[row + 1])  # type: ignore[attr-defined]


def test_a_deterministic_trajectory_has_no_log_probs_in_any_part(trajectory: Trajectory) -> None:
    deterministic = replace(trajectory, old_log_probs=None, kernel=Euler())
    joined = Trajectory.cat([deterministic.select(slice(2)), deterministic.select(slice(2, 6)).to("cpu")])
    assert joined.old_log_probs is None
    assert len(joined) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigmas": torch.linspace(1, 0, 6).square()}, "different schedules"),
        ({"timestep_indices": (1, 2, 3)}, "different steps"),
        ({"kernel": FlowSDE(0.8)}, "different kernels"),
        ({"policy_version": 1}, "different weights"),
        ({"old_log_probs": None}, "old_log_probs"),
    ],
)
def test_trajectories_that_differ_cannot_be_joined(
    trajectory: Trajectory, change: dict[str, object], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        Trajectory.cat([trajectory, replace(trajectory, **change)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": torch.zeros(6, 3, 2, 4)}, "latents must be"),
        ({"latents": torch.zeros(5, 4, 2, 4)}, "latents must be"),
        ({"latents": torch.zeros(6, 4, 2, 4, dtype=torch.bfloat16)}, "float32"),
        ({"final_latents": torch.zeros(6, 2, 5)}, "final_latents"),
        ({"old_log_probs": torch.zeros(6, 4)}, "old_log_probs"),
        ({"old_log_probs": torch.zeros(6)}, "old_log_probs"),
        ({"timestep_indices": (0, 2, 4)}, "consecutive"),
    ],
)
def test_a_trajectory_of_another_shape_is_a_bug(
    trajectory: Trajectory, change: dict[str, object], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        replace(trajectory, **change)  # type: ignore[arg-type]


# ---- rows ----------------------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 4), st.integers(0, 2), st.integers(1, 4))
def test_rows_are_laid_out_timestep_major_as_in_brute_force_loops(
    data: st.DataObject, num_prompts: int, first: int, num_recorded: int
) -> None:
    prompts = PromptBatch.for_step(prompts_named(*"abcd"[:num_prompts]), step=0, group_size=2, seed=0)
    recorded = tuple(range(first, first + num_recorded))
    trajectory = trajectory_of(prompts, num_steps=first + num_recorded + 1, recorded=recorded)
    scored = ScoredBatch.of_groups(trajectory, torch.randn(len(prompts)), torch.randn(len(prompts)))
    columns = data.draw(st.integers(1, num_recorded))
    index = st.integers(first, first + num_recorded - 1)
    timesteps = data.draw(
        st.lists(st.lists(index, min_size=columns, max_size=columns), min_size=len(prompts), max_size=len(prompts))
    )
    batch = scored.timestep_batch(torch.tensor(timesteps))
    assert len(batch) == columns * len(prompts)
    row = 0
    for column in range(columns):
        for sample in range(len(prompts)):
            assert_row(batch, row, scored, sample, timesteps[sample][column])
            row += 1


def assert_row(batch: TimestepBatch, row: int, scored: ScoredBatch, sample: int, timestep: int) -> None:
    trajectory = scored.trajectory
    place = trajectory.timestep_indices.index(timestep)
    assert trajectory.old_log_probs is not None
    expected = {
        "latents": trajectory.latents[sample, place],
        "next_latents": trajectory.latents[sample, place + 1],
        "final_latents": trajectory.final_latents[sample],
        "sigma": trajectory.sigmas[timestep],
        "next_sigma": trajectory.sigmas[timestep + 1],
        "sigma_max": trajectory.sigmas[1],
        "timestep_index": torch.tensor(timestep),
        "old_log_probs": trajectory.old_log_probs[sample, place],
        "advantages": scored.advantages[sample],
        # Groups of the next timestep have numbers of their own.
        "group_index": torch.tensor(
            row // len(trajectory) * (len(trajectory) // 2) + trajectory.prompts.group_ids[sample]
        ),
    }
    for name in ROW_FIELDS:
        assert torch.equal(getattr(batch, name)[row], expected[name]), name
    assert batch.prompts.seeds[row] == trajectory.prompts.seeds[sample]
    assert torch.equal(batch.condition.text[row], trajectory.condition.text[sample])  # type: ignore[attr-defined]
    assert torch.equal(batch.condition.level[row], trajectory.condition.level[sample])  # type: ignore[attr-defined]
    assert batch.kernel == trajectory.kernel


def test_chunks_of_timesteps_hold_the_rows_of_the_whole(trajectory: Trajectory) -> None:
    scored = ScoredBatch.of_groups(trajectory, torch.randn(6), torch.randn(6))
    timesteps = torch.arange(3).expand(6, -1)
    whole = scored.timestep_batch(timesteps)
    chunks = [scored.timestep_batch(timesteps[:, :2]), scored.timestep_batch(timesteps[:, 2:], first_column=2)]
    for name in ROW_FIELDS:
        assert torch.equal(torch.cat([getattr(chunk, name) for chunk in chunks]), getattr(whole, name))


def test_rows_after_a_deterministic_rollout_have_no_log_probs(trajectory: Trajectory) -> None:
    scored = ScoredBatch.of_groups(replace(trajectory, old_log_probs=None), torch.zeros(6), torch.zeros(6))
    assert scored.timestep_batch(torch.zeros(6, 1, dtype=torch.long)).old_log_probs is None


@pytest.mark.parametrize("timestep", [0, 4])
def test_a_timestep_that_was_not_recorded_is_refused(timestep: int) -> None:
    prompts = PromptBatch.for_step(prompts_named("a"), step=0, group_size=2, seed=0)
    scored = ScoredBatch.of_groups(trajectory_of(prompts, recorded=(1, 2, 3)), torch.zeros(2), torch.zeros(2))
    with pytest.raises((AssertionError, ValueError), match="record"):
        scored.timestep_batch(torch.tensor([[2], [timestep]]))


def test_rows_move_select_and_join_their_tensors_only() -> None:
    condition = TwoConditions(torch.randn(4, 3), torch.randn(4), guidance=2.0)
    parts = [condition.select(slice(1)), condition.select(torch.tensor([1, 2, 3]))]
    joined = TwoConditions.cat(parts).to("cpu")
    assert torch.equal(joined.text, condition.text)
    assert torch.equal(joined.level, condition.level)
    assert joined.guidance == 2.0
