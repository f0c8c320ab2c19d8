from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from digenrl.cli import progress
from tests.cli.commands import TOY, Digenrl

PARTS = "tests.cli.toy_parts"
CHECKPOINTS = ["--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "1"]


def printed(digenrl: Digenrl, *words: str) -> dict:  # type: ignore[type-arg]
    result = digenrl("fit", *words, "--print_config")
    assert (result.code, result.workers) == (0, []), result.err
    config = yaml.safe_load(result.out)
    assert isinstance(config, dict)
    return config


def test_fit_writes_metrics_and_its_configuration_to_the_run_folder(digenrl: Digenrl, folder: Path) -> None:
    result = digenrl("fit", "--config", "toy.yaml", "--model.clip_range", "1e-3")
    assert (result.code, result.workers) == (0, ["generator-0", "trainer-0"])
    assert not [line for line in result.err if "warning" in line.lower() or "tip" in line.lower() or "GPU" in line]
    assert len((folder / "runs/version_0/metrics.csv").read_text().splitlines()) == 3
    saved = yaml.safe_load((folder / "runs/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["clip_range"] == 1e-3


def test_printed_configuration_gives_itself(digenrl: Digenrl, folder: Path) -> None:
    words = ["--model.reward", f"{{class_path: {PARTS}.Bright, init_args: {{level: 0.3}}}}", *CHECKPOINTS]
    first = digenrl("fit", "--config", "toy.yaml", *words, "--print_config").out
    (folder / "printed.yaml").write_text(first)
    assert digenrl("fit", "--config", "printed.yaml", "--print_config").out == first
    config = yaml.safe_load(first)
    assert config["data"]["init_args"]["prompts"] == ["low", "middle", "high", "top"]
    assert config["model"]["init_args"]["reward"] == {"class_path": f"{PARTS}.Bright", "init_args": {"level": 0.3}}


@pytest.mark.parametrize("notation", ["1e-4", "1E-4", "0.0001", "1.0e-4"])
def test_scientific_notation_is_a_number(digenrl: Digenrl, folder: Path, notation: str) -> None:
    (folder / "notation.yaml").write_text(TOY.replace("lr: 1e-4", f"lr: {notation}\n    weight_decay: 5e-2"))
    settings = printed(digenrl, "--config", "notation.yaml", "--model.clip_range", notation)["model"]["init_args"]
    assert [settings[name] for name in ("lr", "clip_range", "weight_decay")] == [1e-4, 1e-4, 5e-2]


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.strategy", "digenrl.DisaggregatedStrategy"],
        ["--trainer.strategy", "DisaggregatedStrategy"],
        ["--trainer.strategy", "disaggregated"],
        ["--trainer.strategy.generators", "2"],
        ["--trainer.strategy.init_args.generators", "2"],
        ["--trainer.strategy", "{generators: 2}"],
    ],
)
def test_strategy_is_named_in_any_way_or_not_at_all(digenrl: Digenrl, folder: Path, words: list[str]) -> None:
    config = yaml.safe_load(TOY)
    del config["trainer"]["strategy"]
    (folder / "plain.yaml").write_text(yaml.safe_dump(config))
    strategy = printed(digenrl, "--config", "plain.yaml", *words)["trainer"]["strategy"]
    assert strategy["class_path"].endswith("DisaggregatedStrategy")
    assert strategy["init_args"]["generators"] == (2 if "2" in " ".join(words) else 1)


def test_lightnings_strategies_go_by_their_names(digenrl: Digenrl) -> None:
    assert printed(digenrl, "--config", "toy.yaml", "--trainer.strategy", "auto")["trainer"]["strategy"] == "auto"


def test_rewards_are_functions_or_classes_and_algorithms_may_be_ones_own(digenrl: Digenrl) -> None:
    words = ["--model", f"{PARTS}.MyGRPO", "--model.margin", "0.5", "--model.reward", f"{PARTS}.unannotated"]
    model = printed(digenrl, "--config", "toy.yaml", *words)["model"]
    assert model["class_path"] == f"{PARTS}.MyGRPO"
    assert (model["init_args"]["margin"], model["init_args"]["group_size"]) == (0.5, 4)
    assert model["init_args"]["reward"] == f"{PARTS}.unannotated"


def test_an_algorithm_of_ones_own_needs_no_types_for_what_it_passes_on(digenrl: Digenrl) -> None:
    words = ["--config", "toy.yaml", "--model", f"{PARTS}.UntypedGRPO", "--trainer.strategy", "auto"]
    result = digenrl("fit", *words)
    assert (result.code, result.workers) == (0, []), result.err
    assert "`--model.lr` must be a number or null, got 'fast'." in digenrl("fit", *words, "--model.lr", "fast").error
    printed_lr = printed(digenrl, "--config", "toy.yaml", *words, "--model.lr", "null")["model"]["init_args"]["lr"]
    assert printed_lr is None


def test_failed_run_says_why_on_one_line_and_leaves_its_traceback(digenrl: Digenrl, folder: Path) -> None:
    words = ["--model.reward", f"{PARTS}.not_a_number", "--model.on_reward_error", "raise"]
    result = digenrl("fit", "--config", "toy.yaml", *words)
    assert result.code == 1
    assert result.err[-1].startswith("error: reward `not_a_number` returned nan for 4 of 4 samples")
    assert result.err[-1].endswith("Traceback: runs/version_0/error.txt")
    assert "RewardError" in (folder / "runs/version_0/error.txt").read_text()


def test_bug_in_a_reward_is_one_line_and_keeps_its_traceback(digenrl: Digenrl, folder: Path) -> None:
    words = ["--model.reward", f"{PARTS}.broken", "--model.on_reward_error", "raise"]
    result = digenrl("fit", "--config", "toy.yaml", *words)
    assert result.code == 1
    assert "the first for prompt 'low': ValueError: the reward has a bug." in result.err[-1]
    assert "raise ValueError" in (folder / "runs/version_0/error.txt").read_text()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted_run_saves_its_emergency_checkpoint_and_gives_the_signal(
    digenrl: Digenrl, folder: Path, name: str, code: int
) -> None:
    words = ["--trainer.callbacks+", f"{PARTS}.SignalAt", "--trainer.callbacks.name", name]
    emergency = ["--trainer.callbacks+", "OnExceptionCheckpoint", "--trainer.callbacks.dirpath", "emergency"]
    assert digenrl("fit", "--config", "toy.yaml", *words, *emergency).code == code
    assert (folder / "emergency/on_exception.ckpt").is_file()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted_run_gives_the_signal_also_if_a_callback_gets_no_state(
    digenrl: Digenrl, name: str, code: int
) -> None:
    words = ["--trainer.callbacks+", f"{PARTS}.SignalAt", "--trainer.callbacks.name", name]
    result = digenrl("fit", "--config", "toy.yaml", *words, "--trainer.callbacks+", f"{PARTS}.StateOfABusyTrainer")
    assert result.code == code
    assert result.err[-1].startswith("error: worker trainer-0 is still at task `update`.")


def test_second_interrupt_ends_at_once(digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(progress.os, "_exit", codes.append)
    digenrl("fit", "--config", "toy.yaml", "--trainer.callbacks+", f"{PARTS}.ImpatientUser")
    assert codes == [130]


def test_resume_keeps_the_given_values_and_prints_what_has_changed(digenrl: Digenrl, folder: Path) -> None:
    assert digenrl("fit", "--config", "toy.yaml", *CHECKPOINTS).code == 0
    again = ["--config", "toy.yaml", "--model.lr", "5e-2", "--trainer.max_steps", "3", "--ckpt_path", "last"]
    result = digenrl("fit", *again)
    assert result.code == 0
    assert [line for line in result.err if "in the checkpoint" in line] == ["`lr`: 0.0001 in the checkpoint, 0.05 now"]
    saved = yaml.safe_load((folder / "runs/version_1/config.yaml").read_text())
    assert saved["model"]["init_args"]["lr"] == 5e-2
    assert saved["ckpt_path"].startswith("runs/version_0/checkpoints/")
    assert len((folder / "runs/version_1/metrics.csv").read_text().splitlines()) == 2


def test_resume_with_another_seed_is_refused_before_workers_start(digenrl: Digenrl) -> None:
    assert digenrl("fit", "--config", "toy.yaml", *CHECKPOINTS).code == 0
    error = digenrl("fit", "--config", "toy.yaml", "--model.seed", "7", "--ckpt_path", "last").error
    assert "--model.seed: `seed` is 7, but the checkpoint was made with 0" in error


def test_validate_scores_without_training(digenrl: Digenrl, folder: Path) -> None:
    result = digenrl("validate", "--config", "toy.yaml", "--data.validation_prompts", "[low, top]")
    assert (result.code, result.workers) == (0, ["generator-0"])
    assert "val/reward/mean" in (folder / "runs/version_0/metrics.csv").read_text()
