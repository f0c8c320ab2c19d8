"""Flow-GRPO against its published losses and rollouts, and what two updates for one rollout mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl import Condition, DiffusionPolicy, Prompt, PromptBatch, Trajectory
from digenrl.algorithms import FlowGRPO, MixGRPO
from digenrl.algorithms.reverse_process import KernelName
from digenrl.diffusion import DanceSDE, FlowCPS, FlowSDE, Kernel, WanLinearSDE, sampling
from digenrl.types import RowLosses
from tests.algorithms.stored import StoredVelocity, no_reward, stored_batch
from tests.algorithms.toy_rows import total_loss
from tests.functional.golden import assert_gradient, assert_value, load, tensors
from tests.integration.toy_runs import fit
from tests.toy import WORDS, ToyPolicy, level_reward, toy_module

# ---- published losses ----------------------------------------------------------------------------------------

# Of each stored loss: step, shape of a row, and the settings.
LOSSES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "sd3_step0_kl": (0, (3, 4, 4), {"kl_beta": 0.04}),
    "sd3_step1_kl": (1, (3, 4, 4), {"kl_beta": 0.04}),
    "sd3_step5_nokl": (5, (3, 4, 4), {}),
    "sd3_step8_wideclip": (8, (3, 4, 4), {"clip_range": 0.2, "kl_beta": 0.04}),
    "packed_step3_kl": (3, (12, 4), {"noise_level": 0.9, "clip_range": 1e-3, "kl_beta": 0.004}),
    "cps_step2": (2, (3, 4, 4), {"kernel": "cps", "noise_level": 0.8, "clip_range": 1e-5}),
}
BOUNDS = pytest.mark.parametrize(
    ("dtype", "loss_bound", "kl_bound", "gradient_bound"),
    [(torch.float64, 2e-5, 1e-4, 1e-5), (torch.float32, 1e-4, 1e-3, 1e-4)],
    ids=["float64", "float32"],
)


def stored_module(golden: Any, shape: tuple[int, ...], dtype: torch.dtype, **settings: Any) -> FlowGRPO:
    velocity, reference = (x.reshape(6, *shape) for x in tensors(golden, "v_new", "v_ref", dtype=dtype))
    module = FlowGRPO(StoredVelocity(velocity), no_reward, **settings)
    module.configure_model()
    if module.kl_beta > 0:
        module.policy_copy("reference").weights.value.copy_(reference)
    return module


@BOUNDS
@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient_equal_the_published_ones(
    case: str, dtype: torch.dtype, loss_bound: float, kl_bound: float, gradient_bound: float
) -> None:
    golden = load("flowgrpo_loss")
    step, shape, settings = LOSSES[case]
    module = stored_module(golden, shape, dtype, **settings)
    batch = stored_batch(golden, case, kernel=module.kernel, step=step, dtype=dtype, shape=shape)
    losses = module.timestep_loss(batch)
    if isinstance(losses, RowLosses):
        assert_value(losses.policy.mean(), golden[f"{case}.policy_loss"], loss_bound)
        kl = losses.regularizer.mean().item() / module.kl_beta
        assert kl == pytest.approx(golden[f"{case}.kl_loss"].item(), rel=kl_bound)
    loss = total_loss(losses) / 6
    assert_value(loss, golden[f"{case}.loss"], loss_bound)
    loss.backward()
    assert_gradient(module.policy.value.grad, golden[f"{case}.grad_v"], gradient_bound)


def test_the_papers_kl_is_the_published_one_over_dt() -> None:
    golden, case = load("flowgrpo_loss"), "sd3_step1_kl"
    module = stored_module(golden, (3, 4, 4), torch.float64, kl_beta=1.0, kl_form="paper")
    batch = stored_batch(golden, case, kernel=module.kernel, step=1, dtype=torch.float64, shape=(3, 4, 4))
    losses = module.timestep_loss(batch)
    assert isinstance(losses, RowLosses)
    dt = float(golden["sigmas"][1] - golden["sigmas"][2])
    assert losses.regularizer.mean().item() == pytest.approx(golden[f"{case}.kl_loss"].item() / dt, rel=1e-4)


def test_the_kl_of_cps_is_the_mean_square_of_the_means() -> None:
    golden = load("flowgrpo_loss")
    module = stored_module(golden, (3, 4, 4), torch.float64, kernel="cps", noise_level=0.8, kl_beta=2.0)
    batch = stored_batch(golden, "cps_step2", kernel=module.kernel, step=2, dtype=torch.float64, shape=(3, 4, 4))
    losses = module.timestep_loss(batch)
    assert isinstance(losses, RowLosses)
    means = [module.score_step(batch, policy).mean for policy in (module.policy, module.policy_copy("reference"))]
    torch.testing.assert_close(losses.regularizer, 2 * (means[0] - means[1]).square().mean(dim=(1, 2, 3)))


# ---- published rollouts --------------------------------------------------------------------------------------

# Of each stored rollout: the settings and the recorded steps. Where the last step is an Euler step, it is outside of a
# window.
CPS: dict[str, Any] = {"kernel": "cps", "noise_level": 0.8}
ROLLOUTS: dict[str, tuple[dict[str, Any], range]] = {
    "full_sde_cfg4.5_N10": ({"timestep_fraction": 1.0, "guidance_scale": 4.5}, range(10)),
    "full_sde_nocfg_N10": ({"timestep_fraction": 1.0}, range(10)),
    "fast_sde_w2": ({"sde_window": 2}, range(2, 4)),
    "fast_cps_w3": ({**CPS, "sde_window": 3}, range(1, 4)),
    "fast_cps_w3_b": ({**CPS, "sde_window": 3, "guidance_scale": 4.5}, range(2, 5)),
    "fast_nowindow_sde": ({"sde_window": 9, "sde_window_range": (0, 9)}, range(9)),
    "fast_nowindow_cps": ({**CPS, "sde_window": 5, "sde_window_range": (0, 5), "num_steps": 6}, range(5)),
}


@dataclass(frozen=True)
class TanhCondition(Condition):
    embedding: Tensor  # [B]
    negative: Tensor  # [B]


class TanhPolicy(DiffusionPolicy):
    """The toy of the stored rollouts, for prompts "0" and "1"."""

    latent_shape = (3, 2, 2)

    def __init__(self, case: str) -> None:
        super().__init__()
        self.golden, self.case = load("flowgrpo_rollout"), case

    def build(self) -> None:
        pass

    def encode(self, prompts: Sequence[str]) -> TanhCondition:
        means = (self.golden[key].mean(axis=(1, 2)) for key in ("prompt_embeds", "negative_prompt_embeds"))
        return TanhCondition(*(torch.from_numpy(mean)[[int(prompt) for prompt in prompts]] for mean in means))

    def unconditional(self, condition: Condition) -> TanhCondition:
        assert isinstance(condition, TanhCondition)
        return TanhCondition(condition.negative, condition.negative)

    def velocity(self, latents: Tensor, sigma: Tensor, condition: TanhCondition) -> Tensor:
        return torch.tanh(1.1 * latents + (0.6 * sigma + condition.embedding).view(-1, 1, 1, 1))

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def sigmas(self, num_steps: int) -> Tensor:
        return torch.from_numpy(self.golden[f"{self.case}.sigmas"])

    def initial_latents(self, seeds: Sequence[int]) -> Tensor:
        return torch.from_numpy(self.golden["z0"])


def stored_rollout(
    cls: type[FlowGRPO], case: str, settings: dict[str, Any], window: range, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Trajectory]:
    """Make a stored rollout, in the first training step whose window is the stored one."""
    module = cls(TanhPolicy(case), no_reward, **settings)
    noise = torch.from_numpy(module.policy.golden[f"{case}.noise"])
    monkeypatch.setattr(sampling, "sample_noise", lambda seeds, stream, shape: noise[int(stream.split()[1])])
    step = next(step for step in range(1000) if module.recorded_steps(step) == window)
    return module.policy.golden, module.rollout(
        PromptBatch.for_step([Prompt("0", 0), Prompt("1", 1)], step=step, group_size=1, seed=0)
    )


def assert_close(actual: Tensor | None, expected: np.ndarray, bound: float) -> None:
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=bound, atol=bound)


@pytest.mark.parametrize("case", ROLLOUTS)
def test_a_rollout_equals_the_published_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden, trajectory = stored_rollout(FlowGRPO, case, *ROLLOUTS[case], monkeypatch)
    assert trajectory.timestep_indices == tuple(ROLLOUTS[case][1])
    assert_close(trajectory.latents, golden[f"{case}.all_latents"], 2e-5)
    assert_close(trajectory.final_latents, golden[f"{case}.final"], 2e-5)
    assert_close(trajectory.old_log_probs, golden[f"{case}.log_probs"], 5e-4)
    assert trajectory.old_means is None


def test_the_window_is_drawn_for_each_training_step_and_shared_by_its_samples() -> None:
    module = toy_module(sde_window=2, sde_window_range=(0, 4), timestep_fraction=None)
    windows = {module.recorded_steps(step) for step in range(50)}
    assert windows == {range(0, 2), range(1, 3), range(2, 4)}
    prompts = PromptBatch.for_step([Prompt("low", 0)], step=7, group_size=4, seed=0)
    assert module.select_timesteps(prompts).tolist() == [list(module.recorded_steps(7))] * 4


# ---- two updates for one rollout -----------------------------------------------------------------------------


class Watched(FlowGRPO):
    """Remembers its rollouts with the weights of that moment, and how far ratios are from 1 in each step."""

    def rollout(self, prompts: PromptBatch) -> Trajectory:
        trajectory = super().rollout(prompts)
        weights = {name: value.detach().clone() for name, value in self.policy.named_parameters()}
        self.__dict__.setdefault("seen", []).append((weights, trajectory))
        return trajectory

    def track_ratio(self, ratio: Tensor) -> None:
        deviations = self.__dict__.setdefault("deviations", {})
        worst = (ratio.detach() - 1).abs().max().item()
        deviations[self.next_step] = max(deviations.get(self.next_step, 0.0), worst)
        super().track_ratio(ratio)


def watched_run(updates_per_rollout: int) -> Watched:
    settings: dict[str, Any] = {"group_size": 4, "num_steps": 5, "timestep_fraction": 0.8, "lr": 1e-2, "seed": 0}
    module = Watched(ToyPolicy(), level_reward, clip_range=0.5, updates_per_rollout=updates_per_rollout, **settings)
    fit("auto", module=module, max_steps=5)
    return module


@pytest.mark.parametrize("updates_per_rollout", [1, 2, 3])
def test_samples_of_a_round_are_made_by_the_weights_that_it_began_with(updates_per_rollout: int) -> None:
    module = watched_run(updates_per_rollout)
    again = FlowGRPO(ToyPolicy(), level_reward, group_size=4, num_steps=5, timestep_fraction=0.8, seed=0)
    again.configure_model()
    for step, (_, trajectory) in enumerate(module.seen):
        first_of_round = step - step % updates_per_rollout
        again.policy.load_state_dict(module.seen[first_of_round][0], strict=False)
        expected = again.rollout(trajectory.prompts)
        assert torch.equal(trajectory.final_latents, expected.final_latents)
        assert torch.equal(trajectory.old_log_probs, expected.old_log_probs)


@pytest.mark.parametrize("updates_per_rollout", [1, 2, 3])
def test_the_ratio_leaves_1_after_the_first_update_of_a_round_only(updates_per_rollout: int) -> None:
    deviations = watched_run(updates_per_rollout).deviations
    assert set(deviations) == set(range(5))
    for step, deviation in deviations.items():
        if step % updates_per_rollout == 0:
            assert deviation <= 1e-6
        else:
            assert deviation > 1e-4


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "euler"}, "`kernel` must be one of flow, dance, cps, wan, got 'euler'"),
        ({"kernel": "wan", "noise_level": 1.0}, "`noise_level` must be null with kernel wan.* got 1.0"),
        (
            {"kernel": "cps", "timestep_fraction": 1.0},
            "`timestep_fraction` or .* leave out the last of the 10",
        ),
        ({"kernel": "cps", "sde_window": 2, "sde_window_range": (0, 10)}, "must leave out the last of the 10 steps"),
        (
            {"kernel": "wan", "num_steps": 1, "timestep_fraction": 1.0},
            "`num_steps` must be at least 2 with kernel wan, got",
        ),
        ({"num_steps": 1}, "`num_steps` must be at least 2, got 1: .* or set `timestep_fraction` to 1"),
        ({"noise_level": -1.0}, "`noise_level` must be above 0, got -1.0: without noise a step has no log-prob"),
        ({"noise_level": float("inf")}, "`noise_level` must be finite, got inf"),
        ({"kernel": "cps", "noise_level": 1.5}, "`noise_level` must be at most 1 with kernel cps, got 1.5"),
        ({"kl_beta": -1.0}, "`kl_beta`.* got -1.0"),
        ({"kl_beta": float("inf")}, r"`kl_beta` .* in \[0, inf\), got inf"),
        ({"kernel": "cps", "kl_beta": 0.1, "kl_form": "paper"}, "`kl_form` must be code with kernel cps, got paper"),
        ({"kl_form": "exact"}, "`kl_form` must be code or paper, got 'exact'"),
        ({"sde_window_range": (0, 3)}, "`sde_window_range` bounds a window, but `sde_window` gives none"),
        ({"sde_window": 2, "sde_window_range": (3, 11)}, "`sde_window_range` .*10 steps.* got 3 to 11"),
        ({"sde_window": 2, "sde_window_range": (3, 3)}, "`sde_window_range` .* got 3 to 3"),
        ({"sde_window": 2, "num_steps": 1}, "`sde_window_range` .* got 0 to 0 by default"),
        (
            {"sde_window": 2, "timestep_fraction": 0.5},
            "`timestep_fraction` must be left out with `sde_window`, got 0.5",
        ),
        ({"sde_window": 0}, r"`sde_window` must be in \[1, 5\],.* which is 0 to 5 by default, got 0"),
        ({"sde_window": 6}, r"`sde_window` must be in \[1, 5\],.* which is 0 to 5 by default, got 6"),
        ({"sde_window": 4, "sde_window_range": (2, 5)}, r"`sde_window` must be in \[1, 3\],.* which is 2 to 5, got 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowGRPO(ToyPolicy(), level_reward, **settings)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("flow", FlowSDE(0.7)), ("dance", DanceSDE(0.3)), ("cps", FlowCPS(0.8)), ("wan", WanLinearSDE())],
)
def test_a_kernel_has_its_published_noise_level_by_default(kernel: KernelName, expected: Kernel) -> None:
    assert FlowGRPO(ToyPolicy(), level_reward, kernel=kernel).kernel == expected
    assert MixGRPO(ToyPolicy(), level_reward, kernel=kernel).kernel == expected


def test_a_single_step_can_be_trained_with_a_noise_level_of_its_own() -> None:
    assert FlowGRPO(ToyPolicy(), level_reward, num_steps=1, timestep_fraction=1.0).num_trained_timesteps == 1


def test_a_sample_starts_from_noise_of_its_own() -> None:
    module = toy_module()
    noise = module.initial_latents(module.prompt_batch(WORDS))
    assert len({tuple(row.flatten().tolist()) for row in noise}) == 16
