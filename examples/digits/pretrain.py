"""Train a deliberately weak base policy for the digits example, which leaves the reward something to improve.

Run `python examples/digits/pretrain.py` from the repository root; `--help` lists the options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

# A script has its own folder on the path, not the root that `examples` lies in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from digenrl.diffusion.sampling import sample_ode  # noqa: E402
from digenrl.types import Prompt, PromptBatch  # noqa: E402
from examples.digits.policy import DIGIT_WORDS, DigitCondition, DigitsPolicy  # noqa: E402
from examples.digits.reward import DigitReward  # noqa: E402
from examples.rectified_flow import fit_velocity  # noqa: E402

OUTPUT = "runs/digits/base.safetensors"
ITERATIONS = 350
"""About 12 s on one CPU thread and a mean reward of 0.83; 1000 would reach 0.9 and take half a minute."""
PEAK_LR = 6e-3
"""Three times what a long training would use: with a linear decay at the end the short one gains from it."""
NUM_STEPS = 10


def pretrain(policy: DigitsPolicy, *, iterations: int) -> None:
    """Train on scikit-learn's 1797 digits."""
    images, digits = load_digits(return_X_y=True)
    data = torch.from_numpy(images / 8 - 1).float().reshape(-1, *policy.latent_shape)  # gray values 0 .. 16
    condition = DigitCondition(torch.from_numpy(digits))
    fit_velocity(policy, data, condition, iterations=iterations, peak_lr=PEAK_LR, warm_up=20, decay=0.4)


def validation_rewards(policy: DigitsPolicy) -> Tensor:
    """Score 20 samples of each digit, the same noise whatever the weights are: rewards [200]."""
    prompts = PromptBatch.for_validation(
        [Prompt(word, uid=digit, sample_index=index) for digit, word in enumerate(DIGIT_WORDS) for index in range(20)],
        seed=0,
    )
    condition = policy.encode(prompts.texts)
    latents = sample_ode(
        lambda latents, sigma: policy.velocity(latents, sigma, condition),
        policy.initial_latents(prompts.seeds),
        policy.sigmas(NUM_STEPS),
    )
    return DigitReward()(policy.decode(latents), prompts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save and score the base policy, unless its file is there already."""
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
    policy = DigitsPolicy()
    policy.build()
    pretrain(policy, iterations=options.iterations)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save_file(policy.state_dict(), options.output)
    print(f"{options.output}: mean reward {validation_rewards(policy).mean().item():.3f} on 200 samples")


if __name__ == "__main__":
    main()
