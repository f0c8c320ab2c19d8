"""Train a deliberately weak base policy for the text rendering example, which leaves the reward something to improve.

Run `python examples/ocr/pretrain.py` from the repository root; `--help` lists the options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

# A script has its own folder on the path, not the root that `examples` lies in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.ocr.drawings import draw_all  # noqa: E402
from examples.ocr.evaluation import draw_texts, num_right, read_texts  # noqa: E402
from examples.ocr.policy import TextPolicy  # noqa: E402
from examples.rectified_flow import fit_velocity  # noqa: E402

OUTPUT = "runs/ocr/base.safetensors"
ITERATIONS = 450
"""About 50 s on one CPU thread; the OCR then reads 67 of 100 texts (59 with seed 1), and 97 after 800."""
PEAK_LR = 4e-3


def pretrain(policy: TextPolicy, *, iterations: int) -> None:
    """Train on drawn texts."""
    images, texts = draw_all()
    data = images * 2 - 1
    condition = policy.encode([f'"{text}"' for text in texts])
    fit_velocity(policy, data, condition, iterations=iterations, peak_lr=PEAK_LR, warm_up=40, decay=0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save and judge the base policy, unless its file is there already."""
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(OUTPUT), help=f"safetensors file ({OUTPUT})")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"optimizer steps ({ITERATIONS})")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (0)")
    parser.add_argument("--force", action="store_true", help="train again if the file is there")
    options = parser.parse_args(arguments)
    if options.iterations < 1:
        parser.error(f"--iterations counts optimizer steps and must be at least 1, got {options.iterations}.")
    if options.output.exists() and not options.force:
        print(f"{options.output} is there already; --force trains it again")
        return
    # Tensors this small run slower on more threads, and sums in another order give other weights.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy = TextPolicy()
    policy.build()
    pretrain(policy, iterations=options.iterations)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save_file(policy.state_dict(), options.output)
    print(f"{options.output}: {num_right(read_texts(draw_texts(policy)))} of 100 texts are read as asked for")


if __name__ == "__main__":
    main()
