"""A judge on loopback whose probabilities are known, and what becomes of them."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import yaml
from torch import Tensor

from digenrl import DisaggregatedStrategy
from digenrl.rewards import ErrorPolicy, RewardError, compute_rewards, score_samples, set_up_reward
from digenrl.rewards.judge.vlm_judge import VLMJudge, VLMRubric
from digenrl.rewards.reward import RewardTraits, check_prompts
from digenrl.types import Prompt, PromptBatch
from tests.integration.toy_runs import fit
from tests.rewards.judge.fake_chat_server import Asked, FakeChatServer, Token, refusal
from tests.toy import toy_module

CPU = torch.device("cpu")
LEVELS = torch.arange(16.0) * 16 / 255  # of brightness, exact in 8 bits


@pytest.fixture
def server() -> Iterator[FakeChatServer]:
    fake = FakeChatServer()
    yield fake
    fake.close()


def judge_at(server: FakeChatServer, **settings: Any) -> VLMJudge:
    return VLMJudge("judge", url=server.url, **settings)


def flat(levels: Tensor, *shape: int) -> Tensor:
    """Give media of one level each, [B, *shape]."""
    return levels.view(-1, *(1 for _ in shape)).expand(-1, *shape)


def prompts_of(*texts: str, **metadata: Any) -> PromptBatch:
    return PromptBatch.for_validation([Prompt(text, uid, metadata=metadata) for uid, text in enumerate(texts)], seed=0)


SIXTEEN = prompts_of(*(f"prompt {row}" for row in range(16)))


def ratings(asked: Asked) -> list[Token]:
    """Half of the probability is on a score as high as the brightness, a third on "1", which is 10 in three of four."""
    if asked.begun:
        assert asked.begun == "1"
        return [("<|im_end|>", 0.25), ("0", 0.75)]
    return [(str(round(9 * asked.brightness)), 1 / 2), ("1", 1 / 3), ("0", 1 / 6), ("\n", 0.0)]


def test_yes_or_no_is_the_probability_of_yes_relative_to_yes_and_no(server: FakeChatServer) -> None:
    rewards = compute_rewards(judge_at(server, answer="yes_no"), flat(LEVELS, 3, 4, 4), SIXTEEN)
    torch.testing.assert_close(rewards, LEVELS)
    assert set(server.asked[0].body["structured_outputs"]["choice"]) == {"Yes", "yes", "YES", "No", "no", "NO"}


def test_a_score_is_the_mean_over_zero_to_ten_with_one_and_ten_told_apart(server: FakeChatServer) -> None:
    server.answer = ratings
    judge = judge_at(server, concurrency=1)
    rewards = compute_rewards(judge, flat(torch.tensor([1.0, 4 / 9]), 3, 4, 4), prompts_of("a", "b"))
    ten, one = 0.75 / 3, 0.25 / 3
    expected = [0.5 * 9 + 10 * ten + 1 * one, 0.5 * 4 + 10 * ten + 1 * one]
    assert rewards.tolist() == pytest.approx(expected)
    assert server.asked[0].body["structured_outputs"] == {"choice": [str(score) for score in range(11)]}
    assert [bool(asked.begun) for asked in server.asked] == [False, False, True, True]
    assert server.asked[2].text == server.asked[0].text
    assert server.asked[2].images


def test_a_scale_of_digits_takes_one_request_a_sample(server: FakeChatServer) -> None:
    server.answer = ratings
    rewards = compute_rewards(judge_at(server, scale=(0, 9)), flat(torch.tensor([1.0]), 3, 4, 4), prompts_of("a"))
    assert rewards.tolist() == pytest.approx([0.5 * 9 + 1 / 3])
    assert len(server.asked) == 1


def test_repeated_questions_have_equal_rewards(server: FakeChatServer) -> None:
    judge = judge_at(server, answer="yes_no")
    first, second = (compute_rewards(judge, flat(LEVELS, 3, 4, 4), SIXTEEN) for _ in range(2))
    assert torch.equal(first, second)


def test_question_and_system_are_filled_in_for_each_sample(server: FakeChatServer) -> None:
    judge = judge_at(
        server, answer="yes_no", question="Is the {thing} of {prompt} red?", system="You know {thing}s.", concurrency=1
    )
    prompts = PromptBatch.for_validation(
        [Prompt("{a} car", 0, metadata={"thing": "wheel"}), Prompt("a cat", 1, metadata={"thing": "tail"})], seed=0
    )
    compute_rewards(judge, flat(LEVELS[:2], 3, 4, 4), prompts)
    assert [asked.text for asked in server.asked] == [
        "Is the wheel of {a} car red? Answer with yes or no and nothing else.",
        "Is the tail of a cat red? Answer with yes or no and nothing else.",
    ]
    assert [asked.body["messages"][0]["content"] for asked in server.asked] == ["You know wheels.", "You know tails."]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, 'How well does this show "a cat"? Answer with one whole number from 0 (worst) to 10 (best)'),
        ({"scale": (1, 5)}, 'How well does this show "a cat"? Answer with one whole number from 1 (worst) to 5 (best)'),
        ({"answer": "yes_no"}, 'Does this show "a cat"? Answer with yes or no'),
    ],
)
def test_the_question_says_how_to_answer(server: FakeChatServer, settings: dict[str, Any], text: str) -> None:
    server.answer = lambda asked: [("5", 0.5), ("Yes", 0.5)]
    compute_rewards(judge_at(server, **settings), flat(LEVELS[:1], 3, 4, 4), prompts_of("a cat"))
    assert server.asked[0].text == f"{text} and nothing else."


@pytest.mark.parametrize(("instruction", "text"), [("From {0} to 10.", "Sharp? From {0} to 10."), ("", "Sharp?")])
def test_an_instruction_of_ones_own_is_taken_as_it_is(server: FakeChatServer, instruction: str, text: str) -> None:
    server.answer = lambda asked: [("5", 1.0)]
    judge = judge_at(server, question="Sharp?", instruction=instruction)
    compute_rewards(judge, flat(LEVELS[:1], 3, 4, 4), prompts_of("a cat"))
    assert server.asked[0].text == text


def test_an_image_is_sent_as_it_is(server: FakeChatServer) -> None:
    image = torch.randint(0, 256, (1, 3, 5, 7), generator=torch.Generator().manual_seed(0))
    compute_rewards(judge_at(server, answer="yes_no"), image / 255, prompts_of("a"))
    (sent,) = server.asked[0].images
    assert (sent.mode, sent.size) == ("RGB", (7, 5))
    assert list(sent.tobytes()) == image[0].permute(1, 2, 0).flatten().tolist()


def test_large_images_are_made_smaller_and_keep_their_aspect(server: FakeChatServer) -> None:
    judge = judge_at(server, answer="yes_no", max_side=16)
    compute_rewards(judge, torch.zeros(1, 3, 32, 64), prompts_of("a"))
    compute_rewards(judge, torch.zeros(1, 3, 8, 4), prompts_of("a"))
    assert [asked.images[0].size for asked in server.asked] == [(16, 8), (4, 8)]


def test_a_video_is_one_question_with_frames_at_even_distances(server: FakeChatServer) -> None:
    video = flat(LEVELS[:9], 3, 4, 4)[None]
    rewards = compute_rewards(judge_at(server, answer="yes_no", num_frames=3), video, prompts_of("a"))
    assert [round(image.getpixel((0, 0))[0] / 16) for image in server.asked[0].images] == [0, 4, 8]  # type: ignore[index]
    assert server.asked[0].text.startswith("These are 3 frames of a video, in their order. Does this show")
    torch.testing.assert_close(rewards, LEVELS[[0, 4, 8]].mean()[None])


def test_one_answer_of_sixteen_that_is_none_is_an_error_of_that_sample_alone(server: FakeChatServer) -> None:
    judge = judge_at(server, answer="yes_no")
    server.fault_of = lambda asked: refusal(400, "too blurred") if '"prompt 5"' in asked.text else None
    batch = score_samples(judge, flat(LEVELS, 3, 4, 4), SIXTEEN, ErrorPolicy(on_error="drop_group", num_retries=0))
    assert [failure.row for failure in batch.failures] == [5]
    assert "refused with status 400: too blurred" in batch.failures[0].reason
    good = [row for row in range(16) if row != 5]
    torch.testing.assert_close(batch.rewards[good], LEVELS[good])
    with pytest.raises(RewardError, match="`VLMJudge` failed for 1 of 16 samples, .*'prompt 5': .*too blurred"):
        compute_rewards(judge, flat(LEVELS, 3, 4, 4), SIXTEEN)


def test_an_answer_of_another_kind_is_an_error_and_never_a_zero(server: FakeChatServer) -> None:
    server.answer = lambda asked: [("The", 0.9), ("A", 0.1)] if '"prompt 3"' in asked.text else [("7", 1.0)]
    with pytest.raises(RewardError, match="for 1 of 16 samples, .*'prompt 3': .* is none of 0, 1.* 'The' \\(90%\\)"):
        compute_rewards(judge_at(server), flat(LEVELS, 3, 4, 4), SIXTEEN)


def test_a_failed_second_question_is_an_error_of_that_sample_alone(server: FakeChatServer) -> None:
    server.answer = ratings
    server.fault_of = lambda asked: refusal(400, "no continue_final_message") if asked.begun else None
    with pytest.raises(RewardError, match="for 2 of 2 .*let `scale` end below 10"):
        compute_rewards(judge_at(server), flat(LEVELS[:2], 3, 4, 4), prompts_of("a", "b"))


def test_setup_says_in_one_line_that_there_is_no_server_and_what_starts_it(server: FakeChatServer) -> None:
    server.close()
    with pytest.raises(RewardError) as info:
        set_up_reward(judge_at(server, name="aesthetics"), CPU)
    assert str(info.value) == (
        f"reward `aesthetics` cannot be set up: {server.url}: there is no server ([Errno 111] Connection refused); "
        f"start it with `digenrl serve-judge --model judge --port {server.port}`, or correct `url`."
    )


def test_columns_of_its_templates_are_required_before_anything_is_generated() -> None:
    judge = VLMJudge("judge", question="Is the {thing} of {prompt} red?", system="{style}")
    assert RewardTraits.of(judge).requires == ("thing", "style")
    with pytest.raises(ValueError, match="must have the column `style`, which reward `VLMJudge` needs"):
        check_prompts(judge, [Prompt("a", 0, metadata={"thing": "nose"})])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answer": "rubric"}, "`answer` must be yes_no or score, got 'rubric'; `VLMRubric` asks"),
        ({"engine": "sglang"}, "`engine` must be server or vllm, got 'sglang'"),
        ({"model": ""}, "`model` must be a name"),
        ({"scale": (0, 100)}, r"`scale` must be two whole numbers within 0 to 10, the lower first, got \(0, 100\)"),
        ({"scale": (5, 1)}, r"the lower first, got \(5, 1\)"),
        ({"scale": (0.0, 10.0)}, "`scale` must be two whole numbers"),
        ({"scale": 10}, "`scale` must be two whole numbers"),
        ({"question": "{}?"}, r"`question` may name \{prompt\}"),
        ({"system": "{prompt!r}"}, r"`system` may name \{prompt\}"),
        ({"num_frames": 0}, "`num_frames` is a count and must be at least 1, got 0"),
        ({"max_side": 0.5}, "`max_side` is a count"),
        ({"url": "localhost"}, "`url` must be the base"),
        ({"engine_args": {"dtype": "float32"}}, "`engine_args` are those of `engine` vllm"),
        *(
            ({"engine": "vllm", **setting}, f"`{next(iter(setting))}` is for a server; leave it out with `engine` vllm")
            for setting in (
                *({"url": "http://host/v1"}, {"api_key_env": "KEY"}, {"concurrency": 4}, {"timeout_s": 1.0}),
                *({"connect_timeout_s": 1.0}, {"retry_timeout_s": 0.0}, {"structured_outputs": False}),
                {"extra_body": {"top_k": 1}},
            )
        ),
        ({"num_frames": None}, "`num_frames` is a count and must be at least 1, got None"),
    ],
)
def test_settings_outside_their_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        VLMJudge(**{"model": "judge", **settings})
    assert "\n" not in str(info.value)


def test_a_copy_for_a_worker_judges_alike(server: FakeChatServer) -> None:
    judge = judge_at(server, answer="yes_no")
    copy = cloudpickle.loads(cloudpickle.dumps(judge))
    ours, theirs = (compute_rewards(each, flat(LEVELS, 3, 4, 4), SIXTEEN) for each in (judge, copy))
    assert torch.equal(ours, theirs)


def test_workers_train_with_it(server: FakeChatServer) -> None:
    module = toy_module()
    module._reward = (judge_at(server, answer="yes_no"),)
    trainer, _, _ = fit(DisaggregatedStrategy(generators=1, trainers=1, groups_per_micro_batch=2), module=module)
    levels = [asked.brightness for asked in server.asked]
    assert len(levels) == 16
    assert float(trainer.callback_metrics["reward/mean"]) == pytest.approx(sum(levels) / 16, abs=1e-5)


CRITERIA = {"faithful": 'Does it show "{prompt}"?', "sharp": "Is the {thing} sharp?"}


def test_a_rubric_has_a_column_for_each_criterion(server: FakeChatServer) -> None:
    server.answer = lambda asked: [("8" if "sharp" in asked.text else "4", 1.0)]
    rubric = VLMRubric("judge", CRITERIA, weights={"sharp": 3}, url=server.url)
    rewards = compute_rewards(rubric, flat(LEVELS[:2], 3, 4, 4), prompts_of("a", "b", thing="nose"))
    assert rewards.tolist() == [[4.0, 8.0], [4.0, 8.0]]
    assert (rubric.names, rubric.weights, rubric.sums_raw_rewards) == (("faithful", "sharp"), (1.0, 3.0), False)
    assert RewardTraits.of(rubric).requires == ("thing",)
    assert {asked.text.partition("?")[0] for asked in server.asked} >= {'Does it show "a"', "Is the nose sharp"}


def test_criteria_share_connections_in_workers_too(server: FakeChatServer) -> None:
    rubric = VLMRubric("judge", CRITERIA, answer="yes_no", url=server.url, concurrency=1)
    for each in (rubric, cloudpickle.loads(cloudpickle.dumps(rubric))):
        before = server.num_connections
        set_up_reward(each, CPU)
        compute_rewards(each, flat(LEVELS[:4], 3, 4, 4), prompts_of(*"abcd", thing="nose"))
        assert server.num_connections == before + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"criteria": {"sharp": "Is it?"}}, "at least two"),
        ({"weights": {"shrap": 1.0}}, "`weights` must be of faithful, sharp, got `shrap`"),
        ({"weights": {"sharp": -1.0}}, "at least 0"),
        ({"question": "Is it?"}, "`question` must be left out"),
        ({"scale": (1, 1)}, "`scale` must be"),
    ],
)
def test_a_rubric_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLMRubric(**{"model": "judge", "criteria": CRITERIA, **settings})


class FakeLLM:
    """Stands for `vllm.LLM`: notes what it is asked and answers as the fake server does."""

    loaded: list[dict[str, Any]]
    chats: list[dict[str, Any]]

    def __init__(self, **arguments: Any) -> None:
        FakeLLM.loaded.append(arguments)

    def chat(self, messages: list[Any], sampling_params: list[Any], **how: Any) -> list[Any]:
        FakeLLM.chats.append({"messages": messages, "sampling_params": sampling_params, **how})
        outputs = []
        for conversation in messages:
            tokens = ratings(Asked({"messages": conversation}, {}))
            entries = {
                number: types.SimpleNamespace(decoded_token=text, logprob=float(torch.tensor(chance).log()))
                for number, (text, chance) in enumerate(tokens)
            }
            outputs.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(logprobs=[entries])]))
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake: Any = types.ModuleType("vllm")
    params: Any = types.ModuleType("vllm.sampling_params")
    fake.LLM, fake.SamplingParams = FakeLLM, types.SimpleNamespace
    params.StructuredOutputsParams = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    FakeLLM.loaded, FakeLLM.chats = [], []
    return FakeLLM


def test_vllm_in_this_process_is_asked_the_same_and_says_the_same(server: FakeChatServer, vllm: type[FakeLLM]) -> None:
    server.answer = ratings
    media, prompts = flat(LEVELS[[3, 9]], 3, 4, 4), prompts_of("a", "b")
    local = VLMJudge("judge", engine="vllm", engine_args={"dtype": "float32"}, seed=3, num_frames=2)
    set_up_reward(local, CPU)
    ours, theirs = (compute_rewards(each, media, prompts) for each in (local, judge_at(server, seed=3, concurrency=1)))
    torch.testing.assert_close(ours, theirs)
    (loaded,) = vllm.loaded
    assert loaded == {
        **{"model": "judge", "limit_mm_per_prompt": {"image": 2, "video": 0}, "max_logprobs": 20, "dtype": "float32"},
    }
    begin, go_on = vllm.chats
    assert [*begin["messages"], *go_on["messages"]] == [asked.body["messages"] for asked in server.asked]
    assert (begin["add_generation_prompt"], begin["continue_final_message"]) == (True, False)
    assert (go_on["add_generation_prompt"], go_on["continue_final_message"]) == (False, True)
    sent = vars(begin["sampling_params"][0])
    assert sent.pop("structured_outputs").choice == [str(score) for score in range(11)]
    assert sent == {"temperature": 0.0, "seed": 3, "max_tokens": 1, "logprobs": 20}


def test_criteria_share_one_loaded_model(vllm: type[FakeLLM]) -> None:
    set_up_reward(VLMRubric("judge", CRITERIA, engine="vllm"), CPU)
    assert len(vllm.loaded) == 1


def test_missing_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RewardError, match=r"`VLMJudge` cannot be set up: .*pip install 'digenrl\[vllm\]'"):
        set_up_reward(VLMJudge("judge", engine="vllm"), CPU)


def test_the_guides_configurations_are_taken() -> None:
    text = (Path(__file__).parents[3] / "docs" / "guide" / "vlm_judge.md").read_text()
    rewards = [yaml.safe_load(block)["reward"] for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    judge, rubric = ({"VLMJudge": VLMJudge, "VLMRubric": VLMRubric}[each["class_path"]] for each in rewards)
    assert judge(**rewards[0]["init_args"]).requires == ("object", "color")
    assert rubric(**rewards[1]["init_args"]).weights == (1.0, 0.5)
