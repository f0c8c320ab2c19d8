"""However a run ends, nothing of it is left: no process, no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.leftovers import left_in_shared_memory, names_in_shared_memory

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time, torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from digenrl import DisaggregatedStrategy, PromptData, Trainer
from digenrl.algorithms import FlowGRPO
from digenrl.callbacks import RunCheckpoint
from digenrl.engines import local
from digenrl.strategies import disaggregated
from tests.toy import WORDS, ToyPolicy, level_reward

case, folder = sys.argv[1:]

class Slow(FlowGRPO):
    num_calls = 0
    def timestep_loss(self, batch):
        self.num_calls += 1
        if case == "busy":
            if self.num_calls > 3 * 4:  # a step has four micro-batches
                print("busy", flush=True)
                time.sleep(600)
            return super().timestep_loss(batch)
        if case == "error":
            raise ZeroDivisionError("a bug in timestep_loss")
        if case != "success":
            time.sleep(0.3)
        return super().timestep_loss(batch)

class Say(Callback):
    def on_train_batch_end(self, trainer, *args):
        print("step", trainer.global_step, flush=True)

checkpoints = [OnExceptionCheckpoint(folder, "interrupted")]
if case == "busy":
    local._STOP_S, disaggregated._FREE_WITHIN_S = 0.2, 0.5
    checkpoints = [RunCheckpoint(every_n_steps=2)]
module = Slow(ToyPolicy(), level_reward, group_size=4, num_steps=4)
trainer = Trainer(
    strategy=DisaggregatedStrategy(2, 1), accelerator="cpu", max_steps=3 if case == "success" else 1000,
    default_root_dir=folder, callbacks=[Say(), *checkpoints],
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, PromptData(WORDS, prompts_per_step=4))
print("done", flush=True)
"""


class Run:
    """A run in a process group of its own, as a terminal would start it."""

    def __init__(self, case: str, folder: Path) -> None:
        self.shared_memory = names_in_shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, case, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.family: list[psutil.Process] = []

    def wait_for(self, *lines: str) -> None:
        """Wait until all of them were printed, in any order."""
        assert self.process.stdout is not None
        missing = set(lines)
        for printed in self.process.stdout:
            missing.discard(printed.strip())
            if not missing:
                break
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        names = " ".join(" ".join(child.cmdline()) for child in self.family)
        assert "fork_server" in names
        assert len(self.family) >= 4, "a server, two generators and a trainer"

    def finish(self, timeout_s: float) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors

    def leftovers(self) -> list[str]:
        """What is still there, after a few seconds for the kernel to clean up."""
        _, alive = psutil.wait_procs(self.family, timeout=5)
        return [str(process) for process in alive] + left_in_shared_memory(self.shared_memory)


def test_nothing_is_left_after_success(tmp_path: Path) -> None:
    run = Run("success", tmp_path)
    run.wait_for("step 1")
    code, errors = run.finish(60)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert run.leftovers() == []


def test_nothing_is_left_after_an_error_and_the_error_says_where(tmp_path: Path) -> None:
    run = Run("error", tmp_path)
    code, errors = run.finish(60)
    assert code == 1
    assert "ZeroDivisionError: a bug in timestep_loss" in errors
    assert "in worker trainer-0, task `update`" in errors
    mine = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or ())]
    assert mine == []
    assert run.leftovers() == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_step_leaves_a_checkpoint_and_nothing_else(tmp_path: Path, how: signal.Signals) -> None:
    run = Run("interrupt", tmp_path)
    run.wait_for("step 1")
    time.sleep(0.4)  # into the middle of the second step
    # Ctrl-C goes to the whole process group, a scheduler's SIGTERM to the driver.
    (os.killpg if how == signal.SIGINT else os.kill)(run.process.pid, how)
    run.finish(30)
    checkpoint = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert checkpoint["global_step"] == checkpoint["digenrl"]["step"] >= 1
    assert run.leftovers() == []


def test_a_busy_trainer_does_not_hold_up_the_end(tmp_path: Path) -> None:
    run = Run("busy", tmp_path)
    run.wait_for("step 3", "busy")
    os.kill(run.process.pid, signal.SIGTERM)
    _, errors = run.finish(30)
    kept = tmp_path / "version_0/checkpoints/step=2.ckpt"
    assert (
        "no checkpoint of the interrupted run: worker trainer-0 is still at task `update`. "
        f"The last one is {kept}." in errors
    )
    assert list(tmp_path.rglob("*.ckpt")) == [kept]
    assert run.leftovers() == []


def test_nothing_is_left_after_the_driver_was_killed(tmp_path: Path) -> None:
    run = Run("interrupt", tmp_path)
    run.wait_for("step 1")
    os.kill(run.process.pid, signal.SIGKILL)
    run.finish(10)
    assert run.leftovers() == []


def test_a_killed_worker_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run = Run("interrupt", tmp_path)
    run.wait_for("step 1")
    server = next(process for process in run.family if "fork_server" in " ".join(process.cmdline()))
    min(server.children(), key=lambda process: process.create_time()).kill()  # the first one started
    code, errors = run.finish(30)
    assert code == 1
    assert "WorkerDied: worker generator-0 killed by SIGKILL, task `" in errors
    assert run.leftovers() == []
