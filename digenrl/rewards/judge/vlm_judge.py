"""A vision-language model's judgement as a reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards.counts import check_count
from digenrl.rewards.images import to_pil
from digenrl.rewards.judge.answers import YES_NO, Reading, read_first_token, scale_choices
from digenrl.rewards.judge.chat import DEFAULT_URL, Chat, ChatServer, Question
from digenrl.rewards.judge.templates import fill_in, template_columns
from digenrl.rewards.judge.vllm_chat import VLLMChat
from digenrl.rewards.several import SeveralRewards
from digenrl.types import Prompt, PromptBatch

Answer = Literal["yes_no", "score"]

_QUESTIONS: dict[str, str] = {
    "yes_no": 'Does this show "{prompt}"?',
    "score": 'How well does this show "{prompt}"?',
}


class VLMJudge:
    """Asks a vision-language model a question about each sample and gives the expected value of its answer.

    With `answer="yes_no"` the reward is the probability of yes, in [0, 1], relative to yes and no (VQAScore,
    arXiv:2404.01291, is the probability itself); with `"score"` it is the expected whole number of `scale`. Both are
    read from the log-probabilities of the answer's first token, so they are smooth where sampled answers are coarse and
    noisy. The 10 of a scale up to 10 is two tokens for most models: whether a "1" is one or begins a 10 is then asked
    with "1" put into the model's mouth, unless hardly any probability is on it.

    An answer that is none of those asked for is an error of that sample alone.

    Example:
        >>> judge = VLMJudge("Qwen/Qwen2.5-VL-7B-Instruct", question="Is the {object} in focus?", answer="yes_no")
        >>> judge.requires
        ('object',)
    """

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    needs: ClassVar[str] = (
        "a vision-language model, served by `digenrl serve-judge` or another OpenAI-compatible server"
    )
    extra: ClassVar[str | None] = None

    def __init__(
        self,
        model: str,
        *,
        question: str | None = None,
        answer: Answer = "score",
        scale: tuple[int, int] = (0, 10),
        instruction: str | None = None,
        system: str = "",
        name: str = "VLMJudge",
        num_frames: int = 8,
        max_side: int | None = None,
        engine: Literal["server", "vllm"] = "server",
        url: str = DEFAULT_URL,
        api_key_env: str | None = None,
        concurrency: int = 16,
        timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        retry_timeout_s: float = 60.0,
        structured_outputs: bool = True,
        seed: int = 0,
        extra_body: dict[str, Any] | None = None,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        """Say what is asked and who answers; nothing is sent or loaded before `setup`.

        Args:
            model: as the server names it, or what `vllm.LLM` loads.
            question: what is asked of each sample; `{prompt}` stands for its prompt and `{column}` for a metadata
                column of that name. None asks whether, or how well, it shows the prompt.
            answer: `"yes_no"` or `"score"`.
            scale: lowest and highest score, within 0 to 10; one that ends at 9 or below is always read from one token.
            instruction: how to answer, put behind the question; None says it for `answer`, and "" says nothing.
            system: the system prompt; it may have placeholders too.
            name: in metrics and messages.
            num_frames: most frames of a video that are shown, at even distances, first and last included.
            max_side: make images smaller whose longer side has more pixels; None sends them as they are.
            engine: `"server"` asks the one at `url`, `"vllm"` loads the model in each process that scores, through
                `vllm.LLM`.
            url: base of an OpenAI-compatible API.
            api_key_env: name of the environment variable that holds the server's key.
            concurrency: most requests at a time, of one worker.
            timeout_s: most seconds that a request may take. One that took longer has failed and is not repeated here,
                but the module asks again as its `on_reward_error` says, by default twice: a server that hangs is waited
                for `(1 + reward_retries) * timeout_s` per request, with `drop_group` the last time per sample.
            connect_timeout_s: most seconds to connect.
            retry_timeout_s: how many seconds a request is repeated, after its first failure, if there is no connection
                or the server is overloaded (429) or fails (5xx); 0 never repeats one.
            structured_outputs: let the server allow the choices only, by vLLM's field of this name. Without it, answers
                depend on the model's obedience.
            seed: sent with each question; at temperature 0 only a server that breaks ties by chance heeds it.
            extra_body: further fields of each request, such as `chat_template_kwargs`.
            engine_args: further arguments of `vllm.LLM`.

        Raises:
            ValueError: a setting outside its bounds, or a template that is none.
        """
        if not isinstance(model, str) or not model:
            raise ValueError(f"`model` must be a name, got {model!r}.")
        check_count("`num_frames`", num_frames)
        if max_side is not None:
            check_count("`max_side`", max_side)
        for_server: dict[str, Any] = {
            **{"url": url, "api_key_env": api_key_env, "concurrency": concurrency, "timeout_s": timeout_s},
            **{"connect_timeout_s": connect_timeout_s, "retry_timeout_s": retry_timeout_s},
            **{"structured_outputs": structured_outputs, "extra_body": extra_body or None},
        }
        _check_engine(engine, for_server, engine_args)
        self.choices, usual_instruction = _choices(answer, scale)
        self.model = model
        self.name = name
        self.question = _QUESTIONS[answer] if question is None else question
        self.system = system
        self.instruction = usual_instruction if instruction is None else instruction
        columns = [*template_columns(self.question, name="question"), *template_columns(system, name="system")]
        self.requires = tuple(dict.fromkeys(columns))
        self.num_frames = num_frames
        self.max_side = max_side
        self.chat: Chat = (
            VLLMChat(model, num_frames, seed, dict(engine_args or {}))
            if engine == "vllm"
            else ChatServer(model, seed=seed, **for_server)
        )

    def setup(self, device: torch.device) -> None:
        """Look whether the server is there and serves the model, or load it.

        Raises:
            RewardError: it is not there; the message has the remedy.
            ImportError: `engine` vllm without vLLM.
        """
        self.chat.setup(device)

    def close(self) -> None:
        """Close the connections, or let go of the model; the next question opens or loads it again."""
        self.chat.close()

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: PromptBatch) -> Any:
        """Ask about B samples.

        Args:
            media: [B, (F), C, H, W] in [0, 1].
            prompts: of B rows.

        Returns:
            [B] numbers, an exception in place of one that the model gave no answer for.

        Raises:
            RewardError: a prompt lacks a metadata column.
            ValueError: media that are no images in [0, 1].
        """
        questions = [self._question(sample, prompt) for sample, prompt in zip(media, prompts.prompts, strict=True)]
        answers = self.chat.ask(questions) if questions else []
        readings = [answer if isinstance(answer, Exception) else self._read(answer) for answer in answers]
        return self._values(questions, readings)

    def _question(self, sample: Tensor, prompt: Prompt) -> Question:
        images = self._images(sample)
        texts = [fill_in(self.question, prompt), self.instruction]
        if len(images) > 1:
            texts.insert(0, f"These are {len(images)} frames of a video, in their order.")
        return Question(
            text=" ".join(text for text in texts if text),
            images=tuple(images),
            choices=tuple(self.choices),
            system=fill_in(self.system, prompt),
        )

    def _images(self, sample: Tensor) -> list[Image.Image]:
        """Give the image, or the chosen frames, of a sample, [(F), C, H, W]."""
        if sample.ndim == 3:
            sample = sample[None]
        elif len(sample) > self.num_frames:
            sample = sample[torch.linspace(0, len(sample) - 1, self.num_frames).round().long()]
        images = to_pil(sample)
        if self.max_side is not None:
            for image in images:
                image.thumbnail((self.max_side, self.max_side))  # keeps the aspect; never enlarges
        return images

    def _read(self, answer: Sequence[tuple[str, float]]) -> Reading | Exception:
        try:
            return read_first_token(answer, self.choices)
        except RuntimeError as error:  # of this sample alone
            return error

    def _values(
        self, questions: Sequence[Question], readings: Sequence[Reading | Exception]
    ) -> list[float | Exception]:
        """Give the expected values, after a second question where the first token leaves two choices open."""
        values = [reading if isinstance(reading, Exception) else reading.value for reading in readings]
        open_rows = [
            (row, reading.beginning)
            for row, reading in enumerate(readings)
            if isinstance(reading, Reading) and reading.beginning is not None
        ]
        if not open_rows:
            return values
        answers = self.chat.ask([questions[row].go_on(begun.text, begun.rest) for row, begun in open_rows])
        for (row, begun), answer in zip(open_rows, answers, strict=True):
            if isinstance(answer, Exception):
                values[row] = answer
            else:
                values[row] += begun.share * begun.mean(self.choices, answer)  # type: ignore[operator]
        return values


class VLMRubric(SeveralRewards):
    """Asks one judge about several criteria, each a reward of its own: [B, R].

    Each criterion is a question that is answered as `VLMJudge` says. By default samples are compared by each criterion
    and their advantages are added up; with `mode="sum"` they are compared by the weighted mean of their scores.

    Example:
        >>> VLMRubric("judge", {"faithful": 'Does it show "{prompt}"?', "sharp": "Is it sharp?"}, answer="yes_no").names
        ('faithful', 'sharp')
    """

    modalities: ClassVar[tuple[str, ...]] = VLMJudge.modalities
    needs: ClassVar[str] = VLMJudge.needs
    extra: ClassVar[str | None] = VLMJudge.extra

    def __init__(
        self,
        model: str,
        criteria: dict[str, str],
        *,
        weights: dict[str, float] | None = None,
        mode: Literal["normalize_then_sum", "sum"] = "normalize_then_sum",
        **settings: Any,
    ) -> None:
        """Say what is asked.

        Args:
            model: as for `VLMJudge`.
            criteria: the question of each criterion, by a name for metrics; two or more.
            weights: of criteria, by name; those left out weigh 1. They count relative to each other.
            mode: as for `SeveralRewards`.
            **settings: those of `VLMJudge`, for all criteria.

        Raises:
            ValueError: as `VLMJudge` and `SeveralRewards`, or a weight of no criterion.
        """
        weights = weights or {}
        for own in ("question", "name"):
            if own in settings:
                raise ValueError(f"`{own}` must be left out: each of the `criteria` has its own.")
        unknown = [name for name in weights if name not in criteria]
        if unknown:
            raise ValueError(f"`weights` must be of {', '.join(criteria)}, got `{unknown[0]}`.")
        judges = [VLMJudge(model, question=question, name=name, **settings) for name, question in criteria.items()]
        for judge in judges[1:]:
            judge.chat = judges[0].chat  # one model and one set of connections for all
        super().__init__(judges, [weights.get(name, 1.0) for name in criteria], mode=mode)


def _check_engine(engine: str, for_server: Mapping[str, Any], engine_args: Mapping[str, Any] | None) -> None:
    """Refuse another engine, and settings that this one would not heed."""
    if engine not in ("server", "vllm"):
        raise ValueError(f"`engine` must be server or vllm, got {engine!r}.")
    if engine == "server" and engine_args:
        raise ValueError("`engine_args` are those of `engine` vllm; a server takes them as it is started.")
    usual = inspect.signature(VLMJudge).parameters
    unheeded = [name for name, value in for_server.items() if value != usual[name].default]
    if engine == "vllm" and unheeded:
        raise ValueError(f"`{unheeded[0]}` is for a server; leave it out with `engine` vllm.")


def _choices(answer: Answer, scale: tuple[int, int]) -> tuple[Mapping[str, float], str]:
    """Give the answers and their values, and what says how to answer."""
    if answer not in ("yes_no", "score"):
        raise ValueError(f"`answer` must be yes_no or score, got {answer!r}; `VLMRubric` asks about several criteria.")
    low, high = _checked_scale(scale)
    if answer == "yes_no":
        return YES_NO, "Answer with yes or no and nothing else."
    instruction = f"Answer with one whole number from {low} (worst) to {high} (best) and nothing else."
    return scale_choices(low, high), instruction


def _checked_scale(scale: tuple[int, int]) -> tuple[int, int]:
    numbers = tuple(scale) if isinstance(scale, (tuple, list)) else ()
    if (
        len(numbers) != 2
        or not all(type(number) is int for number in numbers)
        or not 0 <= numbers[0] < numbers[1] <= 10
    ):
        raise ValueError(f"`scale` must be two whole numbers within 0 to 10, the lower first, got {scale!r}.")
    return numbers[0], numbers[1]
