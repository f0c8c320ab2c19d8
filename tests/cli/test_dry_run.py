from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli.estimates import PolicyCalls
from digenrl.cli.published_models import PUBLISHED, write_published
from digenrl.scheduling.profile import Profile
from digenrl.scheduling.simulate import simulate
from digenrl.strategies import DisaggregatedStrategy
from tests.cli.commands import Digenrl
from tests.toy import ToyPolicy, toy_module

TOY = ("fit", "--config", "toy.yaml", "--dry_run")


def numbers(text: str, name: str) -> list[float]:
    """The numbers of a table's row."""
    [line] = [line for line in text.splitlines() if line.startswith(f" {name} ")]
    return [float(word.replace(",", "")) for word in line.removeprefix(f" {name} ").split() if word[0].isdigit()]


def test_nothing_is_started_or_written(digenrl: Digenrl, folder: Path) -> None:
    result = digenrl(*TOY)
    assert (result.code, result.err, result.workers) == (0, [], [])
    assert "FlowGRPO of ToyPolicy: 1 generator + 1 trainer; a dry run, nothing was started" in result.out
    assert [entry.name for entry in folder.iterdir()] == ["toy.yaml"]


def test_parameters_are_those_of_the_built_policy(digenrl: Digenrl) -> None:
    policy = ToyPolicy()
    policy.build()
    counts = [parameter.numel() for parameter in policy.parameters()]
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    out = digenrl(*TOY).out
    assert numbers(out, "policy") == [sum(counts), trained]
    assert numbers(out, "blocks_") == [2 * (32 * 32 + 32)] * 2
    assert numbers(out, "frozen") == [64, 0]


def test_memory_follows_the_settings(digenrl: Digenrl) -> None:
    words = ("--trainer.strategy.engine", "local", "--trainer.strategy.trainers", "2", "--model.policy.hidden", "1024")
    whole = digenrl(*TOY, *words).out
    shared = digenrl(*TOY, *words, "--trainer.strategy.sharding", "fsdp").out
    parts = digenrl(
        *TOY, *words, "--trainer.strategy.sharding", "fsdp", "--trainer.strategy.grad_sync", "micro_batch"
    ).out
    block_mib = 4 * (1024 * 1024 + 1024) / 1024**2
    assert numbers(whole, "weights")[1] - numbers(shared, "weights")[1] == pytest.approx(block_mib, abs=0.02)
    assert numbers(shared, "gathered blocks") == [pytest.approx(2 * block_mib, abs=0.02)]
    assert numbers(shared, "gradients") == numbers(whole, "gradients")
    assert numbers(whole, "gradients")[0] - numbers(parts, "gradients")[0] == pytest.approx(block_mib, abs=0.02)


def test_plan_says_how_the_step_is_cut(digenrl: Digenrl) -> None:
    strategy = "--trainer.strategy"
    words = (f"{strategy}.engine", "local", f"{strategy}.generators", "3", f"{strategy}.trainers", "2")
    out = digenrl(*TOY, *words, "--model.guidance_scale", "2").out
    assert "A step: 2 groups of 4 samples in 2 micro-batches of 4." in out
    assert "made in slices, 1 of 2 and 2 of 1 samples; 3 denoising steps each." in out
    # Two samples at two of three timesteps, each with and without its prompt.
    assert "Trained: 2 samples a trainer at 2 timesteps, 2 at a time: 8 rows in a forward and backward" in out


def test_auto_takes_what_fits(digenrl: Digenrl) -> None:
    out = digenrl(*TOY, "--trainer.strategy.timestep_batch_size", "auto").out
    assert "2 timesteps, 2 at a time (what is estimated to fit)" in out


def test_times_are_an_estimate_that_names_its_device(digenrl: Digenrl) -> None:
    estimate = digenrl(*TOY).out
    assert "Times are an estimate, from counted operations at 40% of the fp32 peak of a h100, 67 TFLOP/s" in estimate
    other = digenrl(*TOY, "--dry_run_device", "a100").out
    seconds = [float(re.findall(r"\(([\d.e-]+) s to make a sample", out)[0]) for out in (estimate, other)]
    assert seconds[1] / seconds[0] == pytest.approx(67 / 19.5, rel=1e-3)


def test_a_profile_gives_measured_times(digenrl: Digenrl, folder: Path) -> None:
    profile = Profile(
        generate_s=2.0, score_s=0.5, update_s=1.0, num_groups=9, group_size=3, generators=2, trainers=2, load_s=0.25
    )
    profile.write(folder / "profile.json")
    out = digenrl(*TOY, "--dry_run_profile", "profile.json", "--trainer.strategy.trainer_assist", "off").out
    assert "(2 s to make a sample, 2 s to train one, on one worker)" in out
    assert "Times are those of the profile" in out
    assert "estimate," not in out
    # Eight samples, two micro-batches: the last is trained after all are made; the next step's weights are loaded.
    assert "Predicted: 28.25 s a step" in out
    assert "step 3, 28.25 s" in out


def test_timeline_has_a_line_per_generator_and_one_for_the_trainers(digenrl: Digenrl) -> None:
    words = (
        "--trainer.strategy.engine",
        "local",
        "--trainer.strategy.generators",
        "2",
        "--trainer.strategy.trainers",
        "4",
    )
    lines = digenrl(*TOY, *words).out.splitlines()
    bars = [
        line.split()[0] for line in lines if re.fullmatch(r"(generator-\d|trainers|trainer-\d) +[gsuao~x.?]{72}", line)
    ]
    assert bars == ["generator-0", "generator-1", "trainers"]


def test_a_policy_that_cannot_be_traced_is_said_to_be(digenrl: Digenrl) -> None:
    words = ("--model.policy", "tests.cli.toy_parts.ImpatientPolicy")
    result = digenrl(*TOY, *words)
    assert result.code == 0
    assert "could not be traced, so activations are left out: RuntimeError: no" in " ".join(result.out.split())
    assert "No times: give `--dry_run_profile FILE`" in result.out
    assert not any(line.startswith(" activations ") for line in result.out.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dry_run_device", "h10"), "`--dry_run_device` is `h10`, which is not known; did you mean `h100`?"),
        (("--dry_run_profile", "none.json"), "`--dry_run_profile`: none.json: there is no such file"),
        (
            ("--data.prompts_per_step", "3", "--trainer.strategy.groups_per_micro_batch", "2"),
            "must divide the 3 prompts",
        ),
        (("--trainer.strategy.sharding", "fsdp"), "`sharding` fsdp shares the policy among trainers"),
        (
            ("--trainer.strategy.staleness", "0.5", "--model.updates_per_rollout", "2"),
            "`updates_per_rollout` must be 1",
        ),
        (("--trainer.strategy", "auto"), "`--dry_run` describes runs with `DisaggregatedStrategy`"),
        (("--model.policy", "FluxPolicy", "--model.policy.path", "none"), "`path` must be the folder of a diffusers"),
        (("--model.guidance_scale", "0"), "`guidance_scale` must be at least 1"),
        (("--model.lerning_rate", "1"), "is not a setting of FlowGRPO"),
    ],
)
def test_wrong_input_is_one_line(digenrl: Digenrl, words: tuple[str, ...], message: str) -> None:
    assert message in digenrl(*TOY, *words).error


def test_its_flags_stand_by_themselves_and_with_fit_only(digenrl: Digenrl) -> None:
    assert (
        "`--dry_run_device` needs `--dry_run`"
        in digenrl("fit", "--config", "toy.yaml", "--dry_run_device", "a100").error
    )
    for command in ("validate", "simulate"):
        assert "--dry_run" in digenrl(command, "--config", "toy.yaml", "--dry_run").error
    assert "--dry_run_profile FILE" in digenrl("fit", "--help").out
    assert "--dry_run" not in digenrl("validate", "--help").out


def test_published_configurations_are_written_as_pipelines_are(tmp_path: Path) -> None:
    for name in PUBLISHED:
        folder = tmp_path / name
        write_published(name, folder)
        index = json.loads((folder / "model_index.json").read_text())
        parts = {part for part in index if not part.startswith("_")}
        assert parts == {"transformer", "vae", "scheduler"}
        for part in parts:
            [file] = list((folder / part).glob("*config.json"))
            assert json.loads(file.read_text())["_class_name"] == index[part][1]


def test_of_another_pipeline_the_configurations_alone_are_asked_for(
    digenrl: Digenrl, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        write_published("stabilityai/stable-diffusion-3.5-medium", folder / "hub")
        (folder / "hub/transformer/diffusion_pytorch_model.safetensors.index.json").unlink()
        return str(folder / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    words = (
        "--model.policy",
        "StableDiffusion3Policy",
        "--model.policy.path",
        "some/sd",
        "--model.policy.revision",
        "v1",
    )
    result = digenrl(*TOY, *words, "--trainer.strategy.timestep_batch_size", "1")
    assert (result.code, asked) == (0, [("some/sd", "v1", ["*.json"])])
    assert "Of `some/sd` the configurations alone were asked of the hub." in result.out

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    error = digenrl(*TOY, *words).error
    assert "`path` 'some/sd' is no folder here and cannot be had from the hub (no network)" in error


def test_a_repository_that_was_downloaded_in_part_is_not_downloaded(
    digenrl: Digenrl, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run itself leaves the configurations in the hub's cache."""
    repository = folder / "models--some--sd"
    write_published("stabilityai/stable-diffusion-3.5-medium", repository / "snapshots" / "abc")
    (repository / "snapshots/abc/transformer/diffusion_pytorch_model.safetensors.index.json").unlink()
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(folder), raising=False)

    def download(*args: object, **kwargs: object) -> str:
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    words = ["--model.policy.path=some/sd", "--model.policy.revision=v1"]
    result = digenrl(*TOY, "--model.policy", "StableDiffusion3Policy", *words)
    assert (result.code, result.err) == (0, [])
    assert "Sizes of `some/sd` are those that were downloaded before; nothing was downloaded." in result.out


def test_a_known_model_needs_no_hub_and_its_schedule_is_shown(
    digenrl: Digenrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = "stabilityai/stable-diffusion-3.5-medium"
    words = (*TOY, "--model.policy", "StableDiffusion3Policy", "--model.policy.path", path)
    chosen = digenrl(*words, "--model.policy.schedule", "dance", "--model.policy.schedule_shift", "3")
    assert "Sigmas of a rollout: 1.000, 0.857, 0.600, 0.000 (`schedule` dance, shift 3)." in chosen.out
    other = "`schedule` lists the 3 sigmas of 2 steps, and 3 are asked for"
    assert other in digenrl(*words, "--model.policy.schedule", "[1.0, 0.5, 0.0]").error
    assert (
        "`--model.policy.schedule` must be one of `pipeline`, `dance`, `dpm` or a list"
        in digenrl(*words, "--model.policy.schedule", "danse").error
    )
    assert "needs a `schedule_shift`" in digenrl(*words, "--model.policy.schedule", "dpm").error


def test_what_a_policy_gives_as_an_example_is_traced(digenrl: Digenrl) -> None:
    """The policy's `encode` raises, as where text encoders are not there."""
    result = digenrl(*TOY, "--model.policy", "tests.cli.toy_parts.ExamplePolicy")
    assert "could not be traced" not in result.out
    assert numbers(result.out, "activations")
    assert "Predicted: " in result.out


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, (1, 1, 1)),
        ({"guidance_scale": 2.0}, (2, 2, 2)),
        ({"guidance_scale": 2.0, "train_guidance": False}, (3, 1, 1)),
    ],
)
def test_rows_that_a_policy_is_asked_for(settings: dict[str, Any], rows: tuple[int, int, int]) -> None:
    """For a sample: in a denoising step, in a trained timestep, and there by the reference."""
    calls = PolicyCalls.of(toy_module(kl_beta=0.1, **settings))
    assert (calls.rollout_rows, calls.trained_rows, calls.reference_rows) == rows


def test_simulated_workers_are_those_of_the_strategy() -> None:
    from digenrl.cli.estimates import cluster_of

    cluster = cluster_of(DisaggregatedStrategy(3, 2, reward_workers=1))
    profile = Profile(generate_s=1.0, score_s=0.1, update_s=1.0, num_groups=2, group_size=4, generators=1, trainers=1)
    workers = simulate(cluster, profile.workload(), num_steps=1).workers
    assert len(workers) == 6
