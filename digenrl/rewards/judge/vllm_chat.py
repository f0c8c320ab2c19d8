"""Questions about images to a chat model that vLLM runs in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from digenrl.rewards.judge.answers import Candidates
from digenrl.rewards.judge.chat import NUM_CANDIDATES, Question
from digenrl.rewards.reward import RewardError

_MISSING = (
    "`engine` vllm needs the package vllm; install it with `pip install 'digenrl[vllm]'`, or leave `engine` out and "
    "start `digenrl serve-judge`, whose environment may be another one"
)


@dataclass
class VLLMChat:
    """A chat model loaded by `vllm.LLM`.

    vLLM takes the first visible device, starts processes of its own and keeps its memory until `close`.
    """

    model: str
    """Name or folder."""
    max_images: int
    """Most in a question."""
    seed: int
    engine_args: Mapping[str, Any]
    """Further arguments of `vllm.LLM`."""
    _llm: Any = field(default=None, repr=False)

    def setup(self, device: torch.device) -> None:
        """Load the model, once.

        Raises:
            ImportError: there is no vLLM.
        """
        if self._llm is not None:
            return
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError(_MISSING) from error
        limits = {"image": self.max_images, "video": 0}
        self._llm = LLM(
            **{"model": self.model, "limit_mm_per_prompt": limits, "max_logprobs": NUM_CANDIDATES, **self.engine_args}
        )

    def ask(self, questions: Sequence[Question]) -> list[Candidates | Exception]:
        """Ask all questions at once; what begins, and what goes on with an answer, are not mixed."""
        if self._llm is None:
            self.setup(torch.device("cpu"))
        outputs = self._llm.chat(
            [question.messages() for question in questions],
            sampling_params=[self._sampling(question) for question in questions],
            use_tqdm=False,
            add_generation_prompt=not questions[0].begun,
            continue_final_message=bool(questions[0].begun),
        )
        return [_candidates(output) for output in outputs]

    def close(self) -> None:
        """Let go of the model."""
        self._llm = None

    def _sampling(self, question: Question) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        return SamplingParams(
            temperature=0.0,
            seed=self.seed,
            max_tokens=1,
            logprobs=NUM_CANDIDATES,
            structured_outputs=StructuredOutputsParams(choice=list(question.choices)),
        )


def _candidates(output: Any) -> Candidates | Exception:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return RewardError("vLLM gave an answer without log-probabilities.")
    return [(str(entry.decoded_token), float(entry.logprob)) for entry in logprobs[0].values()]
