from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from digenrl import DisaggregatedStrategy, Trainer
from digenrl.callbacks import StepProgress
from tests.callbacks.runs import module_that_drops_step_1
from tests.integration.toy_runs import QUIET, toy_data
from tests.toy import WORDS, toy_module


def output_of(**settings: Any) -> str:
    """What a run of three steps prints, on a terminal or not."""
    console = Console(file=io.StringIO(), width=120, **settings)
    trainer = Trainer(
        strategy=DisaggregatedStrategy(engine="inline"),
        callbacks=[StepProgress(console, line_every_s=0.0)],
        max_steps=3,
        val_check_interval=2,
        **{**QUIET, "enable_progress_bar": True},
    )
    trainer.fit(toy_module(), toy_data(validation_prompts=WORDS))
    reward = trainer.callback_metrics["reward/mean"].item()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"reward/mean {reward:.3f}" in text
    return text


def test_a_log_file_gets_lines_with_the_step_and_the_rewards() -> None:
    lines = output_of(force_terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "2/3", "3/3"]
    assert "val/reward/mean" in lines[-1]


def test_a_step_of_which_all_groups_were_dropped_shows_no_reward() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    trainer = Trainer(
        strategy=DisaggregatedStrategy(engine="inline"),
        callbacks=[StepProgress(console, line_every_s=0.0)],
        max_steps=3,
        **{**QUIET, "enable_progress_bar": True},
    )
    trainer.fit(module_that_drops_step_1(), toy_data())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert ["reward/mean" in line for line in lines] == [True, False, True]


def test_a_terminal_gets_a_bar_that_counts_steps() -> None:
    text = output_of(force_terminal=True)
    assert "3/3" in text
    assert "━" in text


def test_progress_can_be_switched_off() -> None:
    trainer = Trainer(strategy=DisaggregatedStrategy(engine="inline"), max_steps=1, **QUIET)
    assert not any(isinstance(callback, StepProgress) for callback in trainer.callbacks)  # type: ignore[attr-defined]
