"""How many timesteps are trained at a time follows from memory, and never changes the gradient."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from digenrl.strategies.workers import TrainerOutOfMemory, memory, timestep_batch_size
from digenrl.strategies.workers.memory import MemoryMeter
from tests.integration.test_equivalence import STEP_SIZE, Descent
from tests.integration.toy_runs import fit, relative_difference
from tests.strategies.workers_at_hand import TrainersAtHand
from tests.toy import ToyCondition, ToyPolicy, level_reward

NUM_TIMESTEPS, GROUP_SIZE = 4, 4


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, is_too_large: bool) -> Tensor:  # type: ignore[override]
        ctx.is_too_large = is_too_large
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if ctx.is_too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient, None


class SmallMemory(ToyPolicy):
    """Runs out of memory with more rows than it has room for, once `num_free` passes are over."""

    def __init__(self, limit: int = 10_000, where: Literal["forward", "backward"] = "forward", num_free: int = 0):
        super().__init__()
        self.limit, self.where, self.num_free = limit, where, num_free

    def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
        is_too_large = False
        if torch.is_grad_enabled():
            self.num_free -= 1
            is_too_large = self.num_free < 0 and len(latents) > self.limit
        if is_too_large and self.where == "forward":
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
            )
        hidden = self.input(torch.cat([latents.flatten(1), sigma[:, None], condition.level[:, None]], dim=1))
        hidden = hidden + self.blocks_[0](torch.nn.functional.silu(hidden))
        hidden = _FailsInBackward.apply(hidden, is_too_large)  # the weights below have their gradient by then
        hidden = hidden + self.blocks_[1](torch.nn.functional.silu(hidden))
        return (self.output(hidden) + 0.1 * self.frozen(latents.flatten(1))).view_as(latents)


def module(policy: ToyPolicy | None = None, **settings: Any) -> Descent:
    usual: dict[str, Any] = {"num_steps": 5, "timestep_fraction": 0.8, "clip_range": 1e-2, "seed": 0}
    return Descent(policy or SmallMemory(), level_reward, group_size=GROUP_SIZE, **{**usual, **settings})


def gradient(trainers: TrainersAtHand) -> dict[str, Tensor]:
    """What an optimizer step makes of it, which all ranks must agree on."""
    before = {name: value.clone() for name, value in trainers.weights[0].items()}
    trainers.step(lr=STEP_SIZE)
    changes = [
        {name: (before[name] - value) / STEP_SIZE for name, value in weights.items()} for weights in trainers.weights
    ]
    assert all(torch.equal(changes[0][name], rank[name]) for rank in changes for name in before)
    return changes[0]


@cache
def reference_gradient() -> dict[str, Tensor]:
    trainers = TrainersAtHand(module())
    trainers.train(1)
    return gradient(trainers)


def test_what_fits_is_measured_at_the_first_timestep_which_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timestep_batch_size, "free_bytes", lambda *args: 10**9)
    trainers = TrainersAtHand(module())
    sizes = watch_rows(trainers)
    assert trainers.train("auto") == 0
    rows = GROUP_SIZE
    assert sizes == [rows, 3 * rows, *[4 * rows] * 3]
    assert relative_difference(gradient(trainers), reference_gradient()) <= 1e-6


def watch_rows(trainers: TrainersAtHand) -> list[int]:
    """The rows of each pass with gradient of the first rank."""
    sizes: list[int] = []
    loss = trainers.workers[0]._module.checked_losses

    def noted(batch: Any) -> Any:
        sizes.append(len(batch))
        return loss(batch)

    trainers.workers[0]._module.checked_losses = noted  # type: ignore[method-assign]
    return sizes


def test_as_many_timesteps_are_taken_as_fit_into_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = TrainersAtHand(module(), num_workers=3)
    weights = sum(value.nbytes for value in trainers.workers[0]._trained_parameters().values())

    def free(device: torch.device, num_workers: int) -> int:
        assert (device.type, num_workers) == ("cpu", 3)
        return 2 * 2999 + 2 * weights  # Adam's state will take the latter, and half of the rest is margin

    monkeypatch.setattr(timestep_batch_size, "free_bytes", free)
    monkeypatch.setattr(MemoryMeter, "num_bytes", 1000)
    sizes = watch_rows(trainers)
    trainers.update(0, "auto")
    assert sizes == [GROUP_SIZE, 2 * GROUP_SIZE, GROUP_SIZE]


def test_what_autograd_keeps_is_counted_once_and_without_weights() -> None:
    weight = torch.ones(10, 10, requires_grad=True)
    inputs = torch.ones(5, 10)
    meter = MemoryMeter(torch.device("cpu"), [weight])
    with meter.forward():
        hidden = (inputs @ weight).exp()  # keeps the inputs and, of exp, the result
        loss = (hidden * hidden).sum()  # keeps that again
    loss.backward()
    assert meter.num_bytes == inputs.nbytes + hidden.nbytes


@pytest.mark.parametrize(
    ("num_ranks", "where", "num_free", "left"),
    [(1, "forward", 1, 1), (1, "backward", 3, 2), (2, "forward", 3, 2), (2, "backward", 1, 1)],
)
def test_half_of_what_was_too_much_gives_the_same_gradient(
    num_ranks: int, where: Any, num_free: int, left: int
) -> None:
    """Memory runs out in the first micro-batch, of which one timestep is trained already, or in the third."""
    limit = 2 * GROUP_SIZE // num_ranks
    trainers = TrainersAtHand(module(SmallMemory(limit, where, num_free), kl_beta=0.1), num_ranks)
    num_again = trainers.train("auto", keeps_parts_apart=True)
    # Three timesteps were too much, later four; and of one rank's forward nothing need be done again.
    assert num_again == (0 if num_ranks == 1 and where == "forward" else 1)
    assert {worker._fitting_timesteps for worker in trainers.workers} == {left}
    reference = TrainersAtHand(module(kl_beta=0.1))
    reference.train(1)
    assert relative_difference(gradient(trainers), gradient(reference)) <= 1e-6


def test_a_backward_that_failed_before_any_other_is_made_again_at_once() -> None:
    trainers = TrainersAtHand(module(SmallMemory(2 * GROUP_SIZE, "backward")))
    trainers.workers[0].limit_timestep_batch(NUM_TIMESTEPS)
    assert trainers.train("auto") == 0
    assert trainers.workers[0]._fitting_timesteps == 2
    assert relative_difference(gradient(trainers), reference_gradient()) <= 1e-6


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_of_two_that_runs_out_of_memory_halves_both(where: Any) -> None:
    trainers = TrainersAtHand(module(), 2)
    policy = trainers.workers[1]._module.policy
    assert isinstance(policy, SmallMemory)
    policy.limit, policy.where, policy.num_free = 2 * GROUP_SIZE // 2, where, 2  # type: ignore[assignment]
    assert trainers.train("auto") == 1
    assert [worker._fitting_timesteps for worker in trainers.workers] == [2, 2]
    assert relative_difference(gradient(trainers), reference_gradient()) <= 1e-6


def test_ranks_that_exchange_sums_inside_their_losses_do_not_wait_for_one_that_failed() -> None:
    class Coupled(Descent):
        def timestep_loss(self, batch: Any) -> Tensor:
            losses = self.score_step(batch).log_prob  # where the memory runs out
            assert losses is not None
            mean = self.group_mean(losses, batch.group_index)
            return -batch.advantages * losses * mean.exp()

    def coupled(policy: ToyPolicy) -> Coupled:
        return Coupled(policy, level_reward, group_size=GROUP_SIZE, num_steps=5, timestep_fraction=0.8, seed=0)

    reference = TrainersAtHand(coupled(SmallMemory()))
    reference.train(1)
    trainers = TrainersAtHand(coupled(SmallMemory()), 2)
    policy = trainers.workers[1]._module.policy
    assert isinstance(policy, SmallMemory)
    policy.limit, policy.num_free = 2 * GROUP_SIZE // 2, 2
    assert trainers.train("auto") == 1
    assert relative_difference(gradient(trainers), gradient(reference)) <= 1e-6


@pytest.mark.parametrize(("size", "remedy"), [("auto", "one timestep"), (1, "one timestep"), (None, "auto or lower")])
def test_what_cannot_fit_ends_the_run_in_one_line_with_remedies(size: Any, remedy: str) -> None:
    trainers = TrainersAtHand(module(SmallMemory(GROUP_SIZE - 1)))
    with pytest.raises(TrainerOutOfMemory, match="trainer-0 ran out of memory") as caught:
        trainers.train(size)
    assert remedy in str(caught.value)
    assert "`gradient_checkpointing`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_are_raised_as_they_are() -> None:
    class Broken(ToyPolicy):
        def velocity(self, latents: Tensor, sigma: Tensor, condition: ToyCondition) -> Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("shapes do not match")
            return super().velocity(latents, sigma, condition)

    with pytest.raises(RuntimeError, match="shapes do not match"):
        TrainersAtHand(module(Broken())).train("auto")


def test_metrics_of_a_batch_that_failed_do_not_count() -> None:
    (expected,) = TrainersAtHand(module()).update(0, 1)
    trainers = TrainersAtHand(module(SmallMemory(2 * GROUP_SIZE)))
    (report,) = trainers.update(0, "auto")
    assert report.loss_sum == pytest.approx(expected.loss_sum)
    metrics = dict(report.metrics)
    assert metrics.pop("timestep_batch_size").value == 1
    assert metrics.keys() == expected.metrics.keys()
    for name, metric in metrics.items():
        assert metric.num_rows == expected.metrics[name].num_rows == NUM_TIMESTEPS * GROUP_SIZE
        assert metric.value == pytest.approx(expected.metrics[name].value, abs=1e-6)


def test_free_memory_is_what_the_host_and_its_control_groups_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    group = tmp_path / "job" / "task"
    group.mkdir(parents=True)
    for folder, limit, used, cache_bytes in ((group, "max", 5, 0), (group.parent, "1000", 700, 100)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache_bytes}\n")
    files = {"": (tmp_path, memory._FILES[""][1])}
    monkeypatch.setattr(memory, "_FILES", files)
    monkeypatch.setattr(memory, "_groups", lambda: [("", "/job/task"), ("cpu", "/")])
    assert memory._available_in_cgroup() == 400
    assert memory.free_bytes(torch.device("cpu"), 4) == 100


def test_a_run_with_auto_logs_its_choice_and_notes_it_in_the_profile(caplog: pytest.LogCaptureFixture) -> None:
    from digenrl import DisaggregatedStrategy

    strategy = DisaggregatedStrategy(engine="inline", timestep_batch_size="auto")
    with caplog.at_level("INFO", logger="digenrl"):
        trainer, _, _ = fit(strategy, max_steps=3)
    assert trainer.callback_metrics["timestep_batch_size"] == NUM_TIMESTEPS
    said = [record.message for record in caplog.records if "timestep_batch_size" in record.message]
    assert said == [
        "`timestep_batch_size` auto trains 4 of 4 timesteps at a time from step 0 on, which fit into memory."
    ]
