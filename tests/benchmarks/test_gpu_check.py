"""The check of GPUs as far as a CPU allows; a whole run of it is in tests/scale."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import (
    TINY_JOB,
    Check,
    Job,
    Machine,
    Rung,
    as_json,
    check_table,
    hand_written_gradient,
    ladder_table,
    planes_of,
)
from benchmarks.small_flux import PROMPTS, TINY, Descent, SmallFluxPolicy, large, largest_that_fits
from digenrl import PromptData
from tests.integration.toy_runs import fit

CPU = Machine("cpu", "CPU", 1, 0)
ONE_GPU = Machine("cuda", "GPU", 1, 80 << 30)


def test_the_hand_written_step_has_the_colocated_gradient() -> None:
    lr = 1e4  # so large that the moved weights are the gradient
    before, gradient = hand_written_gradient("cpu", TINY, TINY_JOB)
    module = gpu_check._module(TINY, TINY_JOB, Descent, lr)
    data = PromptData(list(PROMPTS[: TINY_JOB.num_groups]), prompts_per_step=TINY_JOB.num_groups, seed=0)
    _, module, _ = fit("auto", module=module, data=data)
    after = dict(module.named_parameters())
    largest = max(value.abs().max().item() for value in gradient.values())
    assert largest > 0
    for name, expected in gradient.items():
        moved = (before[name] - after[name].detach()) / lr
        assert (moved - expected).abs().max().item() <= 1e-5 * largest, name


def test_adapters_are_trained_in_float32_and_nothing_else() -> None:
    policy = SmallFluxPolicy(TINY)
    policy.build()
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora" in name and parameter.dtype == torch.float32 for name, parameter in trained.items())
    assert len(list(policy.blocks())) == TINY.num_double_blocks + TINY.num_single_blocks
    latents = torch.randn(3, *policy.latent_shape)
    velocity = policy(latents, torch.tensor([0.9, 0.5, 0.1]), policy.encode(PROMPTS[:3]))
    assert velocity.shape == latents.shape
    assert policy.decode(latents).shape == (3, 1, 4, 4)


@pytest.mark.parametrize(("gib", "num_processes", "num_double_blocks"), [(8, 2, 1), (24, 2, 3), (80, 2, 4), (80, 1, 4)])
def test_the_size_follows_the_memory(gib: int, num_processes: int, num_double_blocks: int) -> None:
    assert largest_that_fits(gib << 30, num_processes) == large(num_double_blocks)


def test_a_pair_shares_the_only_gpu() -> None:
    assert ONE_GPU.workers_per_device == 2
    assert CPU.workers_per_device == Machine("cuda", "GPU", 2, 80 << 30).workers_per_device == 1


def test_processes_that_share_a_gpu_are_not_joined_by_nccl() -> None:
    assert planes_of(ONE_GPU)["collective"].startswith("needs two GPUs")
    assert planes_of(Machine("cuda", "GPU", 2, 80 << 30))["collective"] == ""
    assert set(planes_of(CPU).values()) == {""}


@pytest.mark.parametrize(("num_devices", "num_pairs"), [(1, 1), (2, 1), (5, 2), (8, 4), (16, 4)])
def test_there_are_as_many_generators_as_trainers(num_devices: int, num_pairs: int) -> None:
    assert Machine("cuda", "GPU", num_devices, 1).num_pairs == num_pairs


def test_a_check_that_raises_is_reported_and_the_rest_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> Check:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(gpu_check, "check_gradient", fail)
    monkeypatch.setattr(gpu_check, "check_plane", lambda *args, **settings: Check(f"weights: {args[3]}", "ok", {}))
    monkeypatch.setattr(gpu_check, "climb", lambda *args, **settings: [])
    checks, _ = gpu_check.run_checks(ONE_GPU, TINY, TINY_JOB, num_steps=1, report=lambda text: None)
    verdicts = {check.name: check.verdict for check in checks}
    assert verdicts["gradient"] == "FAILED: RuntimeError: no such kernel"
    assert verdicts["gradient, fsdp"] == "not run: needs three GPUs"
    assert verdicts["weights: shared_memory"] == "ok"
    assert "ladder" in verdicts


def test_figures_can_be_written_and_shown() -> None:
    rungs = [
        Rung(name, 1.0, 8.0, 1.0, update_s, 0.5, 0.0, 0.0, 0.01, 0.01)
        for name, update_s in (("+GAP", 0.6), ("+TSP", 0.2))
    ]
    checks = [Check("gradient", "ok", {"relative difference": 1e-7})]
    figures = json.loads(json.dumps(as_json(CPU, TINY, Job(4, 2, 2), checks, rungs, 1.0)))
    assert set(figures) == {"machine", "size", "job", "checks", "ladder", "seconds"}
    assert figures["ladder"][1]["update_s"] == 0.2
    caption = ladder_table(rungs, CPU).caption
    assert isinstance(caption, str)
    assert caption.startswith("updates 3.00 times as fast")
    assert check_table(checks).row_count == 1


def test_a_large_model_on_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu"])
    assert "`--device cpu` needs `--size tiny`" in capsys.readouterr().err
