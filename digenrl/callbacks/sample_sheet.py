"""Contact sheets of samples, to see what a run changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from digenrl.callbacks.run_folder import run_folder
from digenrl.data import PromptData
from digenrl.module import DiffusionRLModule
from digenrl.types import Prompt, PromptBatch

_NUM_DEFAULT_PROMPTS = 10
_MIN_SIDE, _MAX_SIDE = 80, 256  # pixels of a cell's longer side, when no `scale` is given
_MARGIN, _GAP = 24, 6  # pixels
_INK, _QUIET, _PAPER = "#2b2f36", "#6b7280", "white"


class SampleSheet(Callback):
    """Writes `samples_before.png` and `samples_after.png` to the run folder, a line of samples per prompt.

    Samples are deterministic and their noise is the same in all sheets (and in validation, for its prompts), so
    sheets can be compared cell by cell. A resumed run writes `samples_step_000050.png`, with the step at which
    it continues, in place of `samples_before.png`.
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        samples_per_prompt: int = 8,
        *,
        columns: int | None = None,
        scale: int | None = None,
        every_n_steps: int | None = None,
    ) -> None:
        """Choose what to show.

        Args:
            prompts: what to sample; None takes the first 10 of the data module's validation prompts or, if it has
                none, of its training prompts.
            samples_per_prompt: samples of each; they are made together.
            columns: samples on a line; None puts all of a prompt on one.
            scale: how often each pixel is repeated; None enlarges small images and reduces large ones.
            every_n_steps: write sheets in between, too, as `samples_step_000050.png`; None for none.

        Raises:
            ValueError: a setting outside its bounds.
        """
        counts = {
            "samples_per_prompt": samples_per_prompt,
            "columns": columns,
            "scale": scale,
            "every_n_steps": every_n_steps,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is a count and must be at least 1, got {value}.")
        if prompts is not None and not prompts:
            raise ValueError("`prompts` must hold at least one prompt, got an empty list; None takes the data's.")
        self.prompts = prompts
        self.samples_per_prompt = samples_per_prompt
        self.columns = columns
        self.scale = scale
        self.every_n_steps = every_n_steps
        self._prompts: list[Prompt] = []
        self._num_steps_seen = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the prompts."""
        if stage != "fit":
            return
        if not isinstance(pl_module, DiffusionRLModule):
            raise TypeError(f"`SampleSheet` samples a `DiffusionRLModule`, got {type(pl_module).__name__}; remove it.")
        if self.prompts is not None:
            self._prompts = [Prompt(text, uid) for uid, text in enumerate(self.prompts)]
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptData):
            raise ValueError(
                f"`prompts` must be given when the data module is not a `PromptData`, got {type(data).__name__}: "
                "`SampleSheet(prompts=[...])`."
            )
        self._prompts = (data.validation_prompts or data.prompts)[:_NUM_DEFAULT_PROMPTS]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the policy as it was before."""
        # Not in `on_fit_start`: the checkpoint of a resumed run may be restored only after it.
        self._num_steps_seen = trainer.global_step
        if trainer.global_step == 0:
            self._write(trainer, pl_module, "samples_before.png", "Before training")
        else:
            self._write_step(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the policy in between."""
        step = trainer.global_step
        if self.every_n_steps and step > self._num_steps_seen and step % self.every_n_steps == 0:
            self._write_step(trainer, pl_module)
        self._num_steps_seen = step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the policy as it is now."""
        # Not in `on_fit_end`: by then a stock strategy has moved the weights to the CPU.
        self._write(trainer, pl_module, "samples_after.png", "After training")

    def _write_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        self._write(trainer, pl_module, f"samples_step_{step:06d}.png", "During training")

    def _write(self, trainer: Trainer, pl_module: LightningModule, name: str, title: str) -> None:
        assert isinstance(pl_module, DiffusionRLModule), "`setup` checks the type"
        path = run_folder(trainer) / name
        # All ranks sample: a sharded model needs them all.
        rows = [(prompt.text, self._samples(trainer, pl_module, prompt)) for prompt in self._prompts]
        if trainer.is_global_zero:
            subtitle = f"optimizer step {trainer.global_step} · same noise in every sheet"
            save_sheet(path, rows, title=title, subtitle=subtitle, columns=self.columns, scale=self.scale)

    def _samples(self, trainer: Trainer, module: DiffusionRLModule, prompt: Prompt) -> Tensor:
        """Make the samples of one prompt, no more at a time: a sheet must not need more memory than training."""
        rows = [Prompt(prompt.text, prompt.uid, index, prompt.metadata) for index in range(self.samples_per_prompt)]
        with trainer.precision_plugin.forward_context():
            return module.sample(PromptBatch.for_validation(rows, seed=module.seed)).float().cpu()


@dataclass(frozen=True)
class SheetLayout:
    """Where everything on a sheet is, in pixels."""

    num_prompts: int
    samples_per_prompt: int
    columns: int
    cell_width: int
    cell_height: int
    label_width: int = 0

    @property
    def font_size(self) -> int:
        """Larger on sheets of larger cells, which are seen from further away."""
        return min(28, max(15, self.cell_width // 8))

    @property
    def header_height(self) -> int:
        """Room for title and subtitle."""
        return round(4.2 * self.font_size)

    @property
    def lines_per_prompt(self) -> int:
        """Lines that the samples of a prompt fill."""
        return -(-self.samples_per_prompt // self.columns)

    @property
    def prompt_height(self) -> int:
        """From one prompt to the next; wider than between the lines of one, if it has several."""
        return self.lines_per_prompt * (self.cell_height + _GAP) + (2 * _GAP if self.lines_per_prompt > 1 else 0)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the sheet."""
        width = self.label_width + self.columns * (self.cell_width + _GAP) - _GAP
        return width + 2 * _MARGIN, self.header_height + self.num_prompts * self.prompt_height + 2 * _MARGIN

    def corner(self, prompt: int, sample: int) -> tuple[int, int]:
        """Left and top of a sample's cell."""
        line, column = divmod(sample, self.columns)
        left = _MARGIN + self.label_width + column * (self.cell_width + _GAP)
        return left, _MARGIN + self.header_height + prompt * self.prompt_height + line * (self.cell_height + _GAP)


def save_sheet(
    path: Path,
    rows: Sequence[tuple[str, Tensor]],
    *,
    title: str,
    subtitle: str,
    columns: int | None = None,
    scale: int | None = None,
) -> SheetLayout:
    """Write a PNG with the samples of each prompt.

    Args:
        path: of the PNG.
        rows: the text and the media [B, (F), C, H, W] in [0, 1] of each prompt; of a video its middle frame is taken.
        title: the header.
        subtitle: a quieter line below it.
        columns: see `SampleSheet`.
        scale: see `SampleSheet`.
    """
    cells = [[_cell(image, scale) for image in _images(media)] for _, media in rows]
    num_samples = len(cells[0])
    layout = SheetLayout(len(cells), num_samples, min(columns or num_samples, num_samples), *cells[0][0].size)
    font, title_font = _font(layout.font_size), _font(round(1.5 * layout.font_size))
    # As wide as the longest prompt needs, up to two fifths of the images' width.
    longest = max(_text_width(" ".join(text.split()), font) for text, _ in rows)
    text_width = min(longest, max(12 * layout.font_size, round(0.4 * layout.size[0])))
    layout = replace(layout, label_width=text_width + 20)

    width, height = layout.size
    header_width = max(_text_width(title, title_font), _text_width(subtitle, font)) + 2 * _MARGIN
    sheet = Image.new("RGB", (max(width, header_width), height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN), title, font=title_font, fill=_INK, anchor="lt")
    draw.text((_MARGIN, _MARGIN + 2.05 * layout.font_size), subtitle, font=font, fill=_QUIET, anchor="lt")
    block_height = layout.lines_per_prompt * (layout.cell_height + _GAP) - _GAP
    line_height = 1.3 * layout.font_size
    for prompt, ((text, _), images) in enumerate(zip(rows, cells, strict=True)):
        lines = wrap(text, font, text_width, max(1, int(block_height // line_height)))
        middle = layout.corner(prompt, 0)[1] + block_height / 2
        for index, line in enumerate(lines):
            y = middle + (index - (len(lines) - 1) / 2) * line_height
            draw.text((_MARGIN, y), line, font=font, fill=_INK, anchor="lm")
        for sample, image in enumerate(images):
            sheet.paste(image, layout.corner(prompt, sample))
    sheet.save(path)
    return layout


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, max_lines: int) -> list[str]:
    """Break `text` between words, or within one that is too wide, into lines of at most `width` pixels.

    What does not fit into `max_lines` is replaced by an ellipsis.
    """
    lines = [""]
    for word in text.split():
        line = f"{lines[-1]} {word}".strip()
        if _text_width(line, font) <= width:
            lines[-1] = line
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and _text_width(lines[-1] + letter, font) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while last and _text_width(f"{last}…", font) > width:
        last = last[:-1]
    return [*lines[: max_lines - 1], f"{last.rstrip()}…"]


def _images(media: Tensor) -> list[Image.Image]:
    if media.ndim == 5:
        media = media[:, media.shape[1] // 2]
    if media.ndim != 4 or media.shape[1] not in (1, 3):
        raise ValueError(f"media must be [B, (F), C, H, W] with 1 or 3 channels, got {list(media.shape)}.")
    pixels = (media.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return [Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()) for image in pixels]


def _cell(image: Image.Image, scale: int | None) -> Image.Image:
    side = max(image.size)
    if scale is None and side > _MAX_SIDE:
        width, height = (max(1, round(length * _MAX_SIDE / side)) for length in image.size)
        return image.resize((width, height), Image.Resampling.LANCZOS)
    factor = scale if scale is not None else -(-_MIN_SIDE // side)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _text_width(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return -int(-font.getlength(text) // 1)
