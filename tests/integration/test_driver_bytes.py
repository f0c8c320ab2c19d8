"""What passes through the driver does not depend on how large a sample is."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from benchmarks.empty_work import EmptyPolicy, empty_module
from digenrl import DisaggregatedStrategy
from digenrl.engines import Engine, LocalEngine
from tests.integration.toy_runs import fit, toy_data

GROUP_SIZE = 16
NUM_SAMPLES = 4 * GROUP_SIZE
MOST_BYTES_PER_SAMPLE = 2000


class Traffic(pl.Callback):
    """Counts the bytes that come to the driver and go from it, at the end of each step."""

    def __init__(self, strategy: DisaggregatedStrategy, sent: list[int]) -> None:
        self.strategy = strategy
        self.sent = sent
        self.totals: list[tuple[int, int]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        engine: Engine = self.strategy.pool.engine
        self.totals.append((engine.bytes_received, sum(self.sent)))

    def per_step(self) -> list[tuple[int, int]]:
        return [
            (after[0] - before[0], after[1] - before[1])
            for before, after in zip(self.totals, self.totals[1:], strict=False)
        ]


def traffic_of(latent_size: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[int, int]]:
    """Bytes (received, sent) of each step but the first, which the local engine's connections carry."""
    sent: list[int] = []
    start = LocalEngine.start

    def counting_start(self: LocalEngine, worker: str, *args: Any, **kwargs: Any) -> None:
        start(self, worker, *args, **kwargs)
        connection = self._processes[worker].connection
        send = connection.send_bytes

        def counting_send(message: bytes) -> None:
            sent.append(len(message))
            send(message)

        monkeypatch.setattr(connection, "send_bytes", counting_send, raising=False)

    monkeypatch.setattr(LocalEngine, "start", counting_start)
    strategy = DisaggregatedStrategy(2, 1, **settings)
    traffic = Traffic(strategy, sent)
    module = empty_module(EmptyPolicy(4, latent_shape=(latent_size,)), group_size=GROUP_SIZE)
    fit(strategy, module=module, data=toy_data(), max_steps=4, callbacks=[traffic])
    return traffic.per_step()


@pytest.mark.parametrize("settings", [{}, {"reward_workers": 1, "generation_batch_size": 1}])
def test_bytes_per_sample_are_few_and_the_same_for_any_latents(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (traffic_of(size, monkeypatch, **settings) for size in (1, 1 << 16))
    assert len(small) == len(large) == 3
    for steps in (small, large):
        for received, sent in steps:
            assert 0 < received + sent < MOST_BYTES_PER_SAMPLE * NUM_SAMPLES
    # Numbers of more digits may take a few bytes more; 64 samples of 64 thousand numbers would be 16 MB.
    assert max(map(sum, large)) < 1.3 * max(map(sum, small))
