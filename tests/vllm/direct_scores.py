"""Expected answers of the tiny judge, from its logits: `python direct_scores.py MODEL < job > values`.

An independent computation: transformers runs the model, and the answer is spelt out token by token, where only tokens
that lead to a choice, or end one, are allowed. Run by the environment that has vLLM.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration


class DirectJudge:
    def __init__(self, folder: str, text: str, values: dict[str, float]) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.values = values
        tokenizer = self.processor.tokenizer
        self.end = tokenizer.eos_token_id
        self.tokens = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token != self.end}
        content = [{"type": "image"}, {"type": "text", "text": text}]
        self.chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def expected(self, image: Image.Image, begun: str = "", ids: tuple[int, ...] = ()) -> float:
        """Give the expected value of an answer that has begun with some tokens."""
        reachable = {value for choice, value in self.values.items() if choice.startswith(begun)}
        if len(reachable) == 1:
            return reachable.pop()
        allowed = [
            token
            for token, text in self.tokens.items()
            if text and any(choice.startswith(begun + text) for choice in self.values)
        ]
        ends = [self.end] if begun in self.values else []
        chances = self.next_logits(image, ids)[allowed + ends].double().softmax(0).tolist()
        total = chances[-1] * self.values[begun] if ends else 0.0
        for token, chance in zip(allowed, chances, strict=False):
            total += chance * self.expected(image, begun + self.tokens[token], (*ids, token))
        return total

    @torch.no_grad()
    def next_logits(self, image: Image.Image, ids: tuple[int, ...]) -> torch.Tensor:
        inputs = self.processor(text=[self.chat], images=[image], return_tensors="pt")
        added = torch.tensor([ids], dtype=torch.long)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], added], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(added)], dim=1)
        logits: torch.Tensor = self.model(**inputs).logits[0, -1]
        return logits


def main(folder: str, jobs: list[dict[str, Any]]) -> list[list[float]]:
    """Give the expected values of each job's images; a job has pixels [N, H, W, 3], a text and values of choices."""
    found = []
    for job in jobs:
        judge = DirectJudge(folder, job["text"], job["values"])
        found.append([judge.expected(Image.fromarray(np.array(pixels, dtype=np.uint8))) for pixels in job["pixels"]])
    return found


if __name__ == "__main__":
    json.dump(main(sys.argv[1], json.load(sys.stdin)), sys.stdout)
