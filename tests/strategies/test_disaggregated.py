"""What a strategy keeps."""

from __future__ import annotations

import gc
import weakref

import digenrl
from digenrl import DisaggregatedStrategy
from tests.integration.toy_runs import QUIET, toy_data
from tests.toy import toy_module


def test_nothing_of_a_run_that_was_shut_down_is_kept_alive() -> None:
    def run() -> tuple[weakref.ref[DisaggregatedStrategy], weakref.ref[digenrl.Trainer]]:
        strategy = DisaggregatedStrategy(engine="inline")
        trainer = digenrl.Trainer(strategy=strategy, max_steps=1, **QUIET)
        trainer.fit(toy_module(), toy_data())
        strategy.shutdown()
        return weakref.ref(strategy), weakref.ref(trainer)

    strategy, trainer = run()
    gc.collect()
    assert strategy() is None
    assert trainer() is None
