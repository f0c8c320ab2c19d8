"""Several updates per rollout: which weights make the samples, however the run came to its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from digenrl import DisaggregatedStrategy
from digenrl.strategies.weight_planes import WeightSyncError
from digenrl.types import PromptBatch
from tests.algorithms.cases import make
from tests.integration.toy_runs import fit, largest_difference


def inline() -> DisaggregatedStrategy:
    return DisaggregatedStrategy(engine="inline", trainer_assist="off")


def rounds(**settings: Any) -> Any:
    return make("FlowGRPO-2-updates", lr=1e-2, **settings)


def test_weights_from_the_middle_of_a_round_end_it_first() -> None:
    _, _, weights = fit("auto", module=rounds(), max_steps=3)

    class Load(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            module.load_state_dict(weights)

    def run(strategy: Any) -> dict[str, torch.Tensor]:
        return fit(strategy, module=rounds(), max_steps=4, callbacks=[Load()])[2]

    assert largest_difference(run(inline()), run("auto")) <= 1e-5


def test_a_second_fit_begins_with_a_round_of_its_own() -> None:
    first = rounds()
    fit(inline(), module=first, max_steps=3)
    second = rounds()
    second.next_step, second._applied_step = first.next_step, first._applied_step
    ours = fit(inline(), module=first, max_steps=4)[2]
    theirs = fit("auto", module=second, max_steps=4)[2]
    assert largest_difference(ours, theirs) <= 1e-5


@pytest.mark.parametrize("settings", [{}, {"updates_per_rollout": 2}, {"ema_decay": 0.9, "ema_interval": 1}])
def test_an_optimizer_that_moves_nothing_is_an_error_whatever_its_copies_do(settings: dict[str, Any]) -> None:
    with pytest.raises(WeightSyncError, match="very weights of version"):
        fit(inline(), module=make("FlowGRPO", lr=1e-30, weight_decay=0.0, **settings), max_steps=2)


def test_own_initial_latents_count_on_the_forward_process() -> None:
    module: Any = make("DGPO")
    module.configure_model()
    prompts = module.prompt_batch(["low", "high"])
    own = module.rollout(prompts).final_latents

    def zeros(prompts: PromptBatch) -> torch.Tensor:
        return torch.zeros(len(prompts), *module.policy.latent_shape)

    module.initial_latents = zeros
    same = module.rollout(prompts).final_latents
    assert not torch.equal(own, same)
    assert torch.equal(same[0], same[1]), "one prompt, one noise"
