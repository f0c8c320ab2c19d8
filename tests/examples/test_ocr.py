from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageColor, ImageDraw, ImageFont, ImageOps

from benchmarks.algorithms import ROOT, read_rewards
from digenrl.algorithms import FlowGRPO
from digenrl.cli import main
from digenrl.engines import LocalEngine
from digenrl.rewards import OCRReward
from digenrl.types import Prompt, PromptBatch
from examples.ocr import compare, evaluation, pretrain
from examples.ocr.drawings import TEXTS, draw, draw_all
from examples.ocr.policy import TextPolicy

CONFIG = ROOT / "examples" / "ocr" / "flow_grpo.yaml"


class WorkerStarted(Exception):
    """All checks have passed."""


@pytest.fixture(scope="module")
def policy() -> TextPolicy:
    torch.manual_seed(0)
    policy = TextPolicy()
    policy.build()
    return policy


@pytest.fixture(scope="module")
def reward() -> OCRReward:
    """The reward of the configuration."""
    reward = OCRReward(**yaml.safe_load(CONFIG.read_text())["model"]["init_args"]["reward"]["init_args"])
    reward.setup(torch.device("cpu"))
    return reward


@pytest.fixture(scope="module", autouse=True)
def no_reading_after_pretraining() -> Iterator[None]:
    """Samples of a policy that is hardly trained show nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "draw_texts", lambda policy: torch.zeros(100, 1, 16, 32))
        patch.setattr(pretrain, "read_texts", lambda images: [""] * len(images))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is hardly trained."""
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    pretrain.main(["--output", str(path), "--iterations", "1"])
    return path


@pytest.fixture
def words(restored_process: None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that works in a scratch folder, from the repository's root; leaves the process as it was."""
    monkeypatch.chdir(ROOT)
    options = ["--model.policy.checkpoint", str(base), "--trainer.default_root_dir", str(tmp_path)]
    return ["fit", "--config", "examples/ocr/flow_grpo.yaml", *options]


def ask_for(texts: list[str]) -> PromptBatch:
    return PromptBatch.for_validation([Prompt(f'"{text}"', uid=row) for row, text in enumerate(texts)], seed=0)


def one_drawing_of_each_text() -> tuple[torch.Tensor, list[str]]:
    """100 images, with each font and offset in turn, and their texts."""
    images, texts = draw_all()
    rows = [(index % 4) * 300 + index * 3 + index % 3 for index in range(100)]
    return images[rows], [texts[row] for row in rows]


def test_constructing_a_policy_makes_no_weights() -> None:
    assert not list(TextPolicy().parameters())


def test_policy_has_955_thousand_parameters_and_three_blocks(policy: TextPolicy) -> None:
    assert sum(parameter.numel() for parameter in policy.transformer.parameters()) == 954_640
    assert policy.digit_embedding.weight.shape == (10, 32)
    assert policy.place_embedding.weight.shape == (2, 32)
    assert len(list(policy.blocks())) == 3


def test_encode_reads_digits_from_left_to_right(policy: TextPolicy) -> None:
    condition = policy.encode(['"42"', '"07"', '"99"'])
    assert condition.characters.tolist() == [[4, 2], [0, 7], [9, 9]]
    assert condition.select(slice(1, 3)).characters.tolist() == [[0, 7], [9, 9]]


def test_prompt_file_asks_for_each_text_once(policy: TextPolicy) -> None:
    prompts = CONFIG.with_name("prompts.txt").read_text().splitlines()
    assert policy.encode(prompts).characters.tolist() == [[number // 10, number % 10] for number in range(100)]


@pytest.mark.parametrize("prompt", ["42", '"4"', '"123"', '"4a"', '"4²"', ' "42"', '"42"\n'])
def test_a_prompt_that_is_not_two_quoted_digits_is_refused(policy: TextPolicy, prompt: str) -> None:
    with pytest.raises(ValueError, match="two digits in double quotes, .*, got ") as refusal:
        policy.encode(['"42"', prompt])
    assert str(refusal.value).endswith(f"got {prompt!r}.")


def test_missing_checkpoint_is_refused_at_construction_with_the_remedy() -> None:
    with pytest.raises(FileNotFoundError, match=r"`checkpoint` .* 'no/base.safetensors'.*python examples/ocr/pretrain"):
        TextPolicy("no/base.safetensors")


def test_velocity_has_the_shape_of_latents_and_its_timestep_is_not_rounded(policy: TextPolicy) -> None:
    timesteps: list[torch.Tensor] = []
    hook = policy.transformer.time_text_embed.register_forward_pre_hook(lambda _, inputs: timesteps.append(inputs[0]))
    sigma = torch.tensor([0.9996, 0.1234567])
    velocity = policy.velocity(torch.randn(2, 1, 16, 32), sigma, policy.encode(['"12"', '"34"']))
    hook.remove()
    assert velocity.shape == (2, 1, 16, 32)
    assert timesteps[0].dtype == torch.float32
    assert torch.equal(timesteps[0], sigma * 1000)


def test_velocity_depends_on_the_order_of_digits_and_trains_their_embeddings(policy: TextPolicy) -> None:
    latents = torch.randn(1, 1, 16, 32).expand(2, -1, -1, -1)
    velocity = policy.velocity(latents, torch.full((2,), 0.5), policy.encode(['"15"', '"51"']))
    assert not torch.allclose(velocity[0], velocity[1])
    digits, places = torch.autograd.grad(
        velocity.square().sum(), (policy.digit_embedding.weight, policy.place_embedding.weight)
    )
    assert digits.abs().sum(dim=1).nonzero().flatten().tolist() == [1, 5]
    assert places.abs().sum(dim=1).nonzero().flatten().tolist() == [0, 1]


def test_decode_maps_latents_to_unit_range(policy: TextPolicy) -> None:
    media = policy.decode(torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0]))
    assert media.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_drawings_are_twelve_of_each_text_and_touch_no_border() -> None:
    images, texts = draw_all()
    assert images.shape == (1200, 1, 16, 32)
    assert {text: texts.count(text) for text in TEXTS} == dict.fromkeys(TEXTS, 12)
    assert images.aminmax() == (0, 1)
    assert (images[:, :, [0, -1]] == 1).all()
    assert (images[:, :, :, [0, -1]] == 1).all()
    assert len(images.flatten(1).unique(dim=0)) == 1200


@pytest.mark.parametrize("size", [12, 13, 14])
def test_a_drawing_is_the_whole_text_in_the_middle(size: int) -> None:
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)
    for text in ("07", "11", "42", "68"):
        drawing = ImageOps.invert(Image.fromarray((draw(text, font, 0) * 255).astype(np.uint8)))
        large = Image.new("L", (96, 96))
        ImageDraw.Draw(large).text((32, 32), text, font=font, fill=255)
        left, top, right, bottom = drawing.getbbox()
        assert drawing.crop((left, top, right, bottom)) == large.crop(large.getbbox())
        assert abs(left + right - 32) <= 2
        assert abs(top + bottom - 16) <= 2


def test_the_ocr_reads_drawings_as_asked_for_and_not_otherwise(reward: OCRReward) -> None:
    images, texts = one_drawing_of_each_text()
    assert reward(images, ask_for(texts)).mean() >= 0.95
    assert reward(images[:20], ask_for([text[::-1] for text in texts[12:32]])).mean() == 0
    for no_text in (torch.ones(2, 1, 16, 32), torch.rand(2, 1, 16, 32)):
        assert reward(no_text, ask_for(["11", "42"])).tolist() == [0, 0]


def test_pretraining_writes_the_same_file_for_the_same_seed_and_leaves_it_alone_unless_forced(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "new" / "again.safetensors"
    pretrain.main(["--output", str(again), "--iterations", "1"])
    assert f"{again}: 0 of 100 texts" in capsys.readouterr().out
    assert again.read_bytes() == base.read_bytes()
    again.write_bytes(b"mine")
    pretrain.main(["--output", str(again), "--iterations", "1"])
    assert "--force" in capsys.readouterr().out
    assert again.read_bytes() == b"mine"
    pretrain.main(["--output", str(again), "--iterations", "1", "--force"])
    assert again.read_bytes() == base.read_bytes()


def test_pretraining_lowers_the_loss() -> None:
    torch.manual_seed(0)
    policy = TextPolicy()
    policy.build()
    images, texts = one_drawing_of_each_text()
    data, noise = images * 2 - 1, torch.randn(len(images), 1, 16, 32)
    condition = policy.encode([f'"{text}"' for text in texts])

    def loss() -> float:
        with torch.no_grad():
            velocity = policy.velocity((data + noise) / 2, torch.full((len(data),), 0.5), condition)
        return (velocity - (noise - data)).square().mean().item()

    before = loss()
    pretrain.pretrain(policy, iterations=8)
    assert loss() < 0.9 * before


def test_comparison_frames_the_samples_that_are_read_otherwise(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, picture = tmp_path / "step=1.ckpt", tmp_path / "new" / "sheet.png"
    trained = TextPolicy(str(base))
    trained.build()
    torch.save({"state_dict": {f"policy.{name}": value for name, value in trained.state_dict().items()}}, checkpoint)
    monkeypatch.setattr(evaluation, "NUM_STEPS", 1)
    answers = iter([[*TEXTS[:99], ""], list(TEXTS)])
    monkeypatch.setattr(compare, "read_texts", lambda images: next(answers))
    compare.main(["--before", str(base), "--after", str(checkpoint), "--output", str(picture)])
    out = capsys.readouterr().out
    assert "before: 99 of 100" in out
    assert "after: 100 of 100" in out
    sheet = Image.open(picture)
    is_red = (np.asarray(sheet) == ImageColor.getrgb(compare.WRONG)).all(axis=2)
    assert is_red[:, : sheet.width // 2].any()
    assert not is_red[:, sheet.width // 2 :].any()


def test_validation_samples_of_a_run_are_those_that_are_compared(policy: TextPolicy) -> None:
    num_steps = yaml.safe_load(CONFIG.read_text())["model"]["init_args"]["num_steps"]
    module = FlowGRPO(TextPolicy(), OCRReward(detect=False), seed=3, group_size=2, num_steps=num_steps)
    module.configure_model()
    module.policy.load_state_dict(policy.state_dict())
    rows = [Prompt(f'"{text}"', uid=uid) for uid, text in enumerate(TEXTS)]
    samples = module.sample(PromptBatch.for_validation(rows, seed=3))
    assert torch.equal(samples, evaluation.draw_texts(policy, seed=3))


def test_the_configuration_is_checked_as_far_as_the_first_worker(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **kwargs: object) -> None:
        raise WorkerStarted

    monkeypatch.setattr(LocalEngine, "start", start)
    with pytest.raises(WorkerStarted):
        main(words)
    assert CONFIG.read_text().splitlines()[1] == f"#   digenrl fit --config examples/ocr/{CONFIG.name}"


def test_the_configuration_makes_two_steps(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {
        "model.group_size": "2",
        "model.num_steps": "2",
        "data.prompts_per_step": "2",
        "data.validation_prompts": "['\"07\"', '\"42\"']",
        "trainer.strategy.engine": "inline",
        "trainer.max_steps": "2",
        "trainer.val_check_interval": "1",
        "trainer.callbacks": "[]",
    }
    code = main([*words, *(word for name, value in short.items() for word in (f"--{name}", value))])
    assert code == 0, capsys.readouterr().err
    metrics = tmp_path / "version_0" / "metrics.csv"
    assert [step for step, _ in read_rewards(metrics)] == [0, 1, 2]
    with metrics.open() as file:
        assert sum(bool(line["reward/OCRReward"]) for line in csv.DictReader(file)) == 2
