"""Let the OCR read what a policy draws before and after training: how many of 100 texts are right, and a picture.

Run `python examples/ocr/compare.py --after runs/ocr/version_0/checkpoints/step=200.ckpt` from the repository root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# A script has its own folder on the path, not the root that `examples` lies in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.ocr.drawings import HEIGHT, TEXTS, WIDTH  # noqa: E402
from examples.ocr.evaluation import draw_texts, num_right, read_texts  # noqa: E402
from examples.ocr.policy import TextPolicy  # noqa: E402

COLUMNS, SCALE = 10, 2
GAP, MARGIN, HEADER = 6, 16, 40  # pixels
WRONG, INK, PAPER = "#d62728", "#2b2f36", "white"


def load_policy(path: Path) -> TextPolicy:
    """Load the policy from the file of `pretrain.py` or from a checkpoint of a run."""
    if path.suffix == ".safetensors":
        policy = TextPolicy(str(path))
        policy.build()
        return policy
    policy = TextPolicy()
    policy.build()
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    policy.load_state_dict({key.removeprefix("policy."): value for key, value in state.items() if key[:7] == "policy."})
    return policy


def draw_sheet(panels: Sequence[tuple[str, Tensor, Sequence[str]]]) -> Image.Image:
    """Lay out titled panels of 100 samples side by side; samples that were read otherwise have a red frame.

    Args:
        panels: title, images [100, 1, 16, 32] in [0, 1] and what was read in them.
    """
    cell_width, cell_height = SCALE * WIDTH + GAP, SCALE * HEIGHT + GAP
    panel_width = COLUMNS * cell_width + 2 * MARGIN
    num_lines = len(TEXTS) // COLUMNS
    sheet = Image.new("RGB", (len(panels) * panel_width, HEADER + num_lines * cell_height + MARGIN), PAPER)
    canvas = ImageDraw.Draw(sheet)
    for column, (title, images, read) in enumerate(panels):
        left = column * panel_width + MARGIN
        canvas.text((left, MARGIN), title, font=ImageFont.load_default(16), fill=INK)
        for index, (image, text) in enumerate(zip(images, read, strict=True)):
            x = left + index % COLUMNS * cell_width
            y = HEADER + index // COLUMNS * cell_height
            pixels = Image.fromarray((image[0] * 255).round().to(torch.uint8).numpy())
            sheet.paste(pixels.resize((SCALE * WIDTH, SCALE * HEIGHT), Image.Resampling.NEAREST), (x, y))
            if text != TEXTS[index]:
                frame = (x - 2, y - 2, x + SCALE * WIDTH + 1, y + SCALE * HEIGHT + 1)
                canvas.rectangle(frame, outline=WRONG, width=2)
    return sheet


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how many of the 100 texts are right before and after, and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, default=Path("runs/ocr/base.safetensors"), help="the base policy")
    parser.add_argument("--after", type=Path, required=True, help="checkpoint of the run, a .ckpt file")
    parser.add_argument("--seed", type=int, default=0, help="`model.seed` of the run (0)")
    parser.add_argument("--output", type=Path, default=Path("runs/ocr/before_after.png"), help="where the picture goes")
    options = parser.parse_args(arguments)
    for name in ("before", "after"):
        if not getattr(options, name).is_file():
            parser.error(
                f"--{name} must be a .safetensors or .ckpt file, got {getattr(options, name)}, which is not there."
            )
    torch.set_num_threads(1)
    panels = []
    for name, path in {"before": options.before, "after": options.after}.items():
        images = draw_texts(load_policy(path), seed=options.seed)
        read = read_texts(images)
        panels.append((f"{name}: {num_right(read)} of {len(TEXTS)} texts are read as asked for", images, read))
        print(panels[-1][0])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw_sheet(panels).save(options.output, optimize=True)
    print(f"{options.output}: the wrong ones are framed")


if __name__ == "__main__":
    main()
