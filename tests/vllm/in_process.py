"""Scores of the tiny judge loaded by `vllm.LLM`: `python in_process.py MODEL MEDIA.npy > scores`."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from digenrl.rewards import compute_rewards, set_up_reward
from digenrl.rewards.judge.vlm_judge import VLMJudge
from digenrl.types import Prompt, PromptBatch

if __name__ == "__main__":
    media = torch.from_numpy(np.load(sys.argv[2]))
    prompts = PromptBatch.for_validation([Prompt("a cat", uid) for uid in range(len(media))], seed=0)
    arguments = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 8}
    judge = VLMJudge(sys.argv[1], engine="vllm", num_frames=4, engine_args=arguments)
    set_up_reward(judge, torch.device("cpu"))
    scores = compute_rewards(judge, media, prompts).tolist()
    judge.close()
    print("scores", json.dumps(scores))  # vLLM writes to the same stream
