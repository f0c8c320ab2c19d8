"""The driver holds ids, seeds, rewards and times: no weights, no trajectories."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from digenrl import Condition, DisaggregatedStrategy, Prompt, Trainer
from digenrl.algorithms import FlowGRPO
from tests.integration.toy_runs import QUIET, fit, toy_data
from tests.toy import WORDS, ToyPolicy, level_reward, toy_module


class ScaledPolicy(ToyPolicy):
    """The toy with latents and weights of any size."""

    def __init__(self, latent_size: int = 8, num_spare_weights: int = 1) -> None:
        super().__init__()
        self.latent_shape = (1, latent_size)
        self.num_spare_weights = num_spare_weights

    def build(self) -> None:
        self.gain = nn.Parameter(torch.ones(1))
        self.spare = nn.Parameter(torch.zeros(self.num_spare_weights))

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        return latents * (self.gain + self.spare.sum())


class Look(Callback):
    """Notes what the driver has at the end of each step."""

    def __init__(self) -> None:
        self.devices: set[str] = set()
        self.bytes_received: list[int] = []
        self.memory: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.devices |= {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
        self.bytes_received.append(trainer.strategy.pool.engine.bytes_received)
        self.memory.append(psutil.Process().memory_full_info().uss)


def look(policy: ToyPolicy, **settings: Any) -> Look:
    seen = Look()
    module = FlowGRPO(policy, level_reward, group_size=4, num_steps=4, clip_range=1e-2)
    # Without assistance, whose reports have another size: the tasks of both runs must be the same.
    fit(DisaggregatedStrategy(2, trainer_assist="off"), module=module, callbacks=[seen], max_steps=4, **settings)
    return seen


def test_parameters_are_on_the_meta_device_in_the_driver() -> None:
    seen = Look()
    fit(DisaggregatedStrategy(), callbacks=[seen], max_steps=2)
    assert seen.devices == {"meta"}


def test_optimizer_and_summary_see_names_and_shapes() -> None:
    class Outline(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            reference = toy_module()
            reference.configure_model()
            shapes = {name: value.shape for name, value in reference.named_parameters()}
            assert {name: value.shape for name, value in module.named_parameters()} == shapes
            trained = [value for value in module.parameters() if value.requires_grad]
            assert trainer.optimizers[0].param_groups[0]["params"] == trained

    fit(DisaggregatedStrategy(engine="inline"), callbacks=[Outline()])


def test_bytes_through_the_driver_do_not_depend_on_the_latents_or_the_weights() -> None:
    small = look(ScaledPolicy(latent_size=8, num_spare_weights=1))
    large = look(ScaledPolicy(latent_size=50_000, num_spare_weights=500_000))
    # Of the whole run: when a step's last results arrive, the next may have begun.
    num_samples = len(small.bytes_received) * 4 * 4
    assert small.bytes_received[-1] / num_samples < 2_000
    assert large.bytes_received[-1] < 1.1 * small.bytes_received[-1]


def test_driver_memory_does_not_grow_with_the_policy() -> None:
    weights = 16_000_000  # 64 MB
    seen = look(ScaledPolicy(num_spare_weights=weights))
    base = look(ScaledPolicy())
    assert max(seen.memory) - max(base.memory) < 16e6


def test_prompts_reach_the_workers_with_their_columns() -> None:
    def column_reward(media: Tensor, prompts: Any) -> Tensor:
        return torch.tensor([float(prompt.metadata["score"]) for prompt in prompts.prompts])

    rows: Any = [Prompt(word, uid, metadata={"score": uid}) for uid, word in enumerate(WORDS)]
    module = FlowGRPO(ToyPolicy(), column_reward, group_size=2, num_steps=3)
    trainer, _, _ = fit(DisaggregatedStrategy(2), module=module, data=DataLoader(rows, batch_size=4, collate_fn=list))
    assert trainer.callback_metrics["reward/mean"].item() == 1.5
    assert trainer.callback_metrics["reward/zero_std_group_frac"].item() == 1.0


def test_plain_strings_are_prompts_too() -> None:
    trainer, _, _ = fit(DisaggregatedStrategy(engine="inline"), data=[WORDS[:2], WORDS[2:]], max_steps=2)
    assert trainer.global_step == 2


def test_the_next_step_begins_before_lightning_asks_for_it() -> None:
    begun: list[bool] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            driver = trainer.strategy._driver
            begun.append(driver._started_step == trainer.global_step)

    trainer, _, _ = fit(DisaggregatedStrategy(engine="inline"), max_steps=3, callbacks=[Watch()])
    assert begun == [True, True, False]  # nothing follows the last step
    assert trainer.global_step == 3


def test_a_run_that_stops_early_leaves_no_gradient_of_the_step_begun_ahead() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = True

    module, strategy = toy_module(), DisaggregatedStrategy(engine="inline", trainer_assist="static:1")
    trainer = Trainer(strategy=strategy, max_steps=5, callbacks=[Stop()], **QUIET)
    trainer.fit(module, toy_data())
    assert trainer.global_step < 5
    worker = strategy.pool.engine._workers["trainer-0"]  # type: ignore[attr-defined]
    assert all(parameter.grad is None for parameter in worker._module.parameters())
    strategy.shutdown()
