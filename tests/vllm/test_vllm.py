"""A real vLLM on the CPU, started by `digenrl serve-judge`, with a tiny Qwen2.5-VL whose weights are random."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from digenrl.rewards import RewardError, compute_rewards, set_up_reward
from digenrl.rewards.judge.answers import YES_NO, scale_choices
from digenrl.rewards.judge.vlm_judge import VLMJudge, VLMRubric
from digenrl.types import Prompt, PromptBatch

HERE = Path(__file__).parent
PYTHON = os.environ.get("DIGENRL_VLLM_PYTHON", "")
SMALL = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8")
CPU = torch.device("cpu")
MEDIA = torch.rand(16, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(16, 3, 56, 56).contiguous()
PROMPTS = PromptBatch.for_validation([Prompt("a cat", uid) for uid in range(16)], seed=0)

pytestmark = pytest.mark.timeout(900)


@dataclass
class Judge:
    """The running server."""

    process: subprocess.Popen[str]
    model: Path
    settings: dict[str, Any]
    """Of `VLMJudge`, as the command prints them."""
    start_s: float


def environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    paths = [str(HERE / "shim"), str(HERE.parents[1])]
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_there(script: str, *words: str, given: str = "") -> str:
    """Run a script of this folder in vLLM's environment."""
    command = [PYTHON, str(HERE / script), *words]
    done = subprocess.run(command, input=given, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "tiny"
    run_there("tiny_judge.py", str(folder))
    return folder


def start(model: Path, log: Path) -> Judge:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "digenrl", "serve-judge", "--python", PYTHON, "--model", str(model)]
    command += ["--served-name", "tiny", "--port", str(port), "--max-images", "4", "--", *SMALL]
    started_s = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:  # vLLM writes to the same stream
        if line.startswith("serving ") or lines:
            lines.append(line)
        if lines and "    url:" in line:
            break
    else:
        pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")
    printed = yaml.safe_load("".join(lines[1:]))
    return Judge(process, model, printed["reward"]["init_args"], time.monotonic() - started_s)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    judge = start(model, tmp_path_factory.mktemp("server") / "log.txt")
    print(f"\nvLLM answers after {judge.start_s:.0f} s")
    yield judge
    judge.process.terminate()
    assert judge.process.wait(60) == 128 + signal.SIGTERM


def scores(reward: VLMJudge, media: Tensor = MEDIA) -> Tensor:
    try:
        set_up_reward(reward, CPU)
        return compute_rewards(reward, media, PROMPTS.select(range(len(media))))
    finally:
        reward.close()


def direct(model: Path, judges: list[VLMJudge], num_images: int) -> list[Tensor]:
    pixels = (MEDIA[:num_images] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).tolist()
    jobs = []
    for judge in judges:
        text = f"{judge.question.format(prompt='a cat')} {judge.instruction}"
        jobs.append({"pixels": pixels, "text": text, "values": dict(judge.choices)})
    return [
        torch.tensor(values) for values in json.loads(run_there("direct_scores.py", str(model), given=json.dumps(jobs)))
    ]


def test_scores_are_those_that_transformers_gives_directly(served: Judge) -> None:
    to_ten = VLMJudge(**served.settings)
    yes_no = VLMJudge(**served.settings, answer="yes_no")
    assert (to_ten.choices, yes_no.choices) == (scale_choices(0, 10), YES_NO)
    expected = direct(served.model, [to_ten, yes_no], 6)
    for judge, values in zip((to_ten, yes_no), expected, strict=True):
        ours = scores(judge, MEDIA[:6])
        print(f"\nserved {ours.tolist()}\ndirect {values.tolist()}")
        torch.testing.assert_close(ours, values, rtol=0, atol=2e-3)
        assert values.std() > 0.01


def test_the_same_images_have_the_same_scores_and_others_have_others(served: Judge) -> None:
    first, second = (scores(VLMJudge(**served.settings)) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    assert len({round(value, 4) for value in first.tolist()}) == 16


def test_sixteen_at_once_are_judged_as_one_by_one(served: Judge) -> None:
    judge = VLMJudge(**served.settings, concurrency=16)
    started_s = time.monotonic()
    together = scores(judge)
    print(f"\n16 at once: {time.monotonic() - started_s:.2f} s")
    apart = torch.cat([scores(judge, MEDIA[row : row + 1]) for row in range(16)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-4)


def test_frames_of_a_video_are_judged_together(served: Judge) -> None:
    video = MEDIA.view(4, 4, 3, 56, 56)
    judged = scores(VLMJudge(**served.settings, num_frames=4), video)
    assert ((judged >= 0) & (judged <= 10)).all()
    assert not torch.allclose(judged, scores(VLMJudge(**served.settings, num_frames=2), video))
    with pytest.raises(RewardError, match="At most 4 image.*set a smaller `num_frames`, or .*`--max-images`"):
        scores(VLMJudge(**served.settings, num_frames=8), MEDIA[None, :8])


def test_a_rubric_scores_each_criterion(served: Judge) -> None:
    criteria = {"faithful": 'Does it show "{prompt}"?', "sharp": "Is it sharp?"}
    rubric = VLMRubric(**served.settings, criteria=criteria, scale=(1, 5))
    both = compute_rewards(rubric, MEDIA[:4], PROMPTS.select(range(4)))
    apart = [scores(VLMJudge(**served.settings, question=text, scale=(1, 5)), MEDIA[:4]) for text in criteria.values()]
    torch.testing.assert_close(both, torch.stack(apart, dim=1), rtol=0, atol=1e-4)


def test_without_structured_outputs_a_model_that_says_something_else_is_an_error(served: Judge) -> None:
    with pytest.raises(RewardError, match="the model's answer is none of 0, 1.*set `structured_outputs` to true"):
        scores(VLMJudge(**served.settings, structured_outputs=False), MEDIA[:2])


def test_another_model_name_is_one_line(served: Judge) -> None:
    with pytest.raises(RewardError, match="it does not serve huge; set `model` to what it serves: tiny"):
        scores(VLMJudge(**{**served.settings, "model": "huge"}))


def test_vllm_in_process_scores_as_the_server_does(served: Judge, tmp_path: Path) -> None:
    np.save(tmp_path / "media.npy", MEDIA[:6].numpy())
    lines = run_there("in_process.py", str(served.model), str(tmp_path / "media.npy")).splitlines()
    (found,) = [line.removeprefix("scores ") for line in lines if line.startswith("scores ")]
    ours = scores(VLMJudge(**served.settings), MEDIA[:6])
    torch.testing.assert_close(torch.tensor(json.loads(found)), ours, rtol=0, atol=1e-4)


def test_a_server_that_is_killed_is_one_line(served: Judge) -> None:  # the last one: it leaves no server
    judge = VLMJudge(**served.settings, retry_timeout_s=1.0)
    set_up_reward(judge, CPU)
    compute_rewards(judge, MEDIA[:2], PROMPTS.select([0, 1]))
    served.process.terminate()
    served.process.wait(60)
    with pytest.raises(RewardError) as info:
        compute_rewards(judge, MEDIA[:2], PROMPTS.select([0, 1]))
    judge.close()
    print(f"\n{info.value}")
    assert "\n" not in str(info.value)
    assert "start it with `digenrl serve-judge --model tiny --port" in str(info.value)
    with pytest.raises(RewardError, match="cannot be set up: .*there is no server .*start it with"):
        set_up_reward(VLMJudge(**served.settings), CPU)
