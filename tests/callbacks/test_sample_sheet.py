from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from PIL import Image, ImageFont
from torch import Tensor

from digenrl import Prompt, PromptBatch
from digenrl.algorithms import FlowGRPO
from digenrl.callbacks import SampleSheet
from digenrl.callbacks.sample_sheet import SheetLayout, save_sheet, wrap
from tests.callbacks.runs import fit, inline, toy_data, toy_trainer
from tests.toy import WORDS, toy_module

TOY_SCALE = 20  # samples are 2 x 4 pixels, cells at least 80 wide


def cell(sheet: Path, layout: SheetLayout, prompt: int, sample: int) -> np.ndarray:
    left, top = layout.corner(prompt, sample)
    pixels = np.asarray(Image.open(sheet))
    return pixels[top : top + layout.cell_height, left : left + layout.cell_width]


def enlarged(sample: Tensor, scale: int) -> np.ndarray:
    """[C, H, W] in [0, 1] to [H * scale, W * scale, 3] in 0 .. 255."""
    gray = (sample.clamp(0, 1) * 255).round().to(torch.uint8).expand(3, -1, -1)
    return np.kron(gray.permute(1, 2, 0).numpy(), np.ones((scale, scale, 1), dtype=np.uint8))


def toy_layout(sheet: Path, *, num_prompts: int = 4, samples: int = 8) -> SheetLayout:
    layout = SheetLayout(num_prompts, samples, samples, 4 * TOY_SCALE, 2 * TOY_SCALE)
    width, height = Image.open(sheet).size
    assert height == layout.size[1]
    return SheetLayout(num_prompts, samples, samples, 4 * TOY_SCALE, 2 * TOY_SCALE, width - layout.size[0])


def toy_samples(module: FlowGRPO, texts: list[str], count: int) -> Tensor:
    prompts = [Prompt(text, uid, index) for uid, text in enumerate(texts) for index in range(count)]
    samples = module.sample(PromptBatch.for_validation(prompts, seed=module.seed))
    return samples.unflatten(0, (len(texts), count))


@pytest.mark.parametrize("strategy", [lambda: "auto", inline], ids=["colocated", "inline"])
def test_cells_are_the_samples_enlarged(tmp_path: Path, strategy: Callable[[], Strategy | str]) -> None:
    trainer, module = fit(tmp_path, SampleSheet(), strategy=strategy())
    sheet = Path(trainer.log_dir) / "samples_after.png"
    layout = toy_layout(sheet)
    samples = toy_samples(module, WORDS, 8)  # with the trained weights
    for prompt in range(4):
        for index in range(8):
            expected = enlarged(samples[prompt, index], TOY_SCALE).astype(int)
            # A sheet samples a prompt at a time, which may move a value by a rounding.
            assert np.abs(cell(sheet, layout, prompt, index) - expected).max() <= 1


def test_the_sheet_before_shows_untrained_weights(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, SampleSheet(samples_per_prompt=3))
    untrained = toy_module()
    untrained.configure_model()
    sheet = Path(trainer.log_dir) / "samples_before.png"
    shown = cell(sheet, toy_layout(sheet, samples=3), 1, 2)
    expected = enlarged(toy_samples(untrained, WORDS, 3)[1, 2], TOY_SCALE).astype(int)
    assert np.abs(shown - expected).max() <= 1
    assert sheet.read_bytes() != (sheet.parent / "samples_after.png").read_bytes()


def test_sheets_are_the_same_colocated_and_on_workers(tmp_path: Path) -> None:
    folders = [Path(fit(tmp_path, SampleSheet(), strategy=name)[0].log_dir) for name in ("auto", inline())]
    before = [np.asarray(Image.open(folder / "samples_before.png")).astype(int) for folder in folders]
    assert np.abs(before[0] - before[1]).max() <= 1


def test_sheets_in_between_are_named_by_step(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, SampleSheet(every_n_steps=2), max_steps=5)
    names = sorted(path.name for path in Path(trainer.log_dir).glob("*.png"))
    steps = ["samples_step_000002.png", "samples_step_000004.png"]
    assert names == ["samples_after.png", "samples_before.png", *steps]


def test_a_resumed_run_leaves_the_sheet_before_alone(tmp_path: Path) -> None:
    save = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    settings = {"trainer_class": pl.Trainer, "logger": False}
    fit(tmp_path, SampleSheet(), save, enable_checkpointing=True, **settings)
    before = (tmp_path / "samples_before.png").read_bytes()
    trainer = toy_trainer(tmp_path, SampleSheet(), max_steps=5, **settings)
    trainer.fit(toy_module(), toy_data(), ckpt_path=tmp_path / "last.ckpt")
    assert (tmp_path / "samples_before.png").read_bytes() == before
    # The weights of the checkpoint, not those before it.
    continued = np.asarray(Image.open(tmp_path / "samples_step_000003.png"))[90:]
    assert not np.array_equal(continued, np.asarray(Image.open(tmp_path / "samples_before.png"))[90:])


def test_without_validation_prompts_the_first_training_prompts_are_shown(tmp_path: Path) -> None:
    sheet = SampleSheet(samples_per_prompt=1)
    trainer = toy_trainer(tmp_path, sheet, max_steps=1)
    data = toy_data(validation_prompts=None)
    data.prompts = [Prompt(WORDS[row % 4], row) for row in range(12)]
    trainer.fit(toy_module(), data)
    height = Image.open(Path(trainer.log_dir) / "samples_after.png").size[1]
    assert height == SheetLayout(10, 1, 1, 80, 40).size[1]


def test_given_prompts_need_no_data_module(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, SampleSheet(["top"], samples_per_prompt=2), max_steps=1)
    trainer.fit(toy_module(), [["low", "high"]])
    assert (Path(trainer.log_dir) / "samples_after.png").exists()


def test_prompts_must_be_given_without_prompt_data(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, SampleSheet(), max_steps=1)
    with pytest.raises(ValueError, match=r"`prompts` must be given .* got NoneType"):
        trainer.fit(toy_module(), [["low", "high"]])


@pytest.mark.parametrize("name", ["samples_per_prompt", "columns", "scale", "every_n_steps"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is a count and must be at least 1, got 0"):
        SampleSheet(**{name: 0})


def test_a_video_is_shown_by_its_middle_frame(tmp_path: Path) -> None:
    video = torch.rand(2, 5, 3, 8, 8)
    layout = save_sheet(tmp_path / "sheet.png", [("a", video)], title="T", subtitle="s")
    assert np.array_equal(cell(tmp_path / "sheet.png", layout, 0, 1), enlarged(video[1, 2], 10))


def test_columns_break_a_prompts_samples_into_lines(tmp_path: Path) -> None:
    media = torch.rand(5, 3, 8, 8)
    rows = [("a", media), ("b", media.flip(0))]
    layout = save_sheet(tmp_path / "sheet.png", rows, title="T", subtitle="s", columns=2, scale=3)
    assert layout.lines_per_prompt == 3
    assert np.array_equal(cell(tmp_path / "sheet.png", layout, 1, 4), enlarged(media[0], 3))


def test_large_images_are_reduced(tmp_path: Path) -> None:
    layout = save_sheet(tmp_path / "sheet.png", [("a", torch.rand(1, 3, 512, 1024))], title="T", subtitle="s")
    assert (layout.cell_width, layout.cell_height) == (256, 128)


def test_media_of_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 or 3 channels, got \[1, 4, 8, 8\]"):
        save_sheet(tmp_path / "sheet.png", [("a", torch.rand(1, 4, 8, 8))], title="T", subtitle="s")


def test_labels_are_written_beside_their_samples(tmp_path: Path) -> None:
    rows = [(text, torch.ones(1, 1, 8, 8)) for text in ("one", "a much longer prompt " * 20)]
    layout = save_sheet(tmp_path / "sheet.png", rows, title="T", subtitle="s")
    pixels = np.asarray(Image.open(tmp_path / "sheet.png").convert("L"))
    for prompt in range(2):
        left, top = layout.corner(prompt, 0)
        label = pixels[top : top + layout.cell_height, : left - 4]
        assert label.min() < 100  # ink
        assert (label[:, -8:] == 255).all()  # that does not touch the samples


def test_long_texts_wrap_and_end_in_an_ellipsis() -> None:
    font = ImageFont.load_default(15)
    lines = wrap("a prompt with rather many words and one_that_is_longer_than_a_line", font, 100, 9)
    assert "".join(lines).replace(" ", "") == "apromptwithrathermanywordsandone_that_is_longer_than_a_line"
    assert all(font.getlength(line) <= 100 for line in lines)
    short = wrap("a prompt with rather many words", font, 100, 2)
    assert len(short) == 2
    assert short[1].endswith("…")
    assert font.getlength(short[1]) <= 100
