from __future__ import annotations

from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.rewards import compute_rewards
from digenrl.types import Prompt, PromptBatch
from examples.digits import pretrain
from examples.digits.policy import DIGIT_WORDS, DigitCondition, DigitsPolicy
from examples.digits.reward import DigitReward, load_images


@pytest.fixture(scope="module")
def policy() -> DigitsPolicy:
    torch.manual_seed(0)
    policy = DigitsPolicy()
    policy.build()
    return policy


@pytest.fixture(scope="module")
def reward() -> DigitReward:
    return DigitReward()


def ask_for(digits: np.ndarray) -> PromptBatch:
    return PromptBatch.for_validation([Prompt(DIGIT_WORDS[digit], uid=row) for row, digit in enumerate(digits)], seed=0)


def held_out_images() -> tuple[Tensor, np.ndarray]:
    """Real images [360, 1, 8, 8] that the reward was not fitted on, and their digits [360]."""
    images, digits = load_images(held_out=True)
    return torch.from_numpy(images).float().reshape(-1, 1, 8, 8), digits


def test_constructing_a_policy_makes_no_weights() -> None:
    assert not list(DigitsPolicy().parameters())


def test_policy_has_283_thousand_parameters_and_two_blocks(policy: DigitsPolicy) -> None:
    assert sum(parameter.numel() for parameter in policy.transformer.parameters()) == 282_756
    assert policy.prompt_embedding.weight.shape == (10, 32)
    assert len(list(policy.blocks())) == 2


def test_encode_maps_words_to_digits(policy: DigitsPolicy) -> None:
    condition = policy.encode(["nine", "zero", "nine"])
    assert condition.digits.tolist() == [9, 0, 9]
    assert condition.select(slice(0, 2)).digits.tolist() == [9, 0]


def test_prompt_file_lists_the_words() -> None:
    assert tuple(Path(pretrain.__file__).with_name("prompts.txt").read_text().split()) == DIGIT_WORDS


def test_unknown_word_is_named_with_the_known_ones(policy: DigitsPolicy) -> None:
    with pytest.raises(ValueError, match="one of zero, one, .*, nine, got 'ten'"):
        policy.encode(["one", "ten"])


def test_missing_checkpoint_is_refused_at_construction_with_the_remedy() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"`checkpoint` .* 'no/base.safetensors'.*python examples/digits/pretrain"
    ):
        DigitsPolicy("no/base.safetensors")


def test_velocity_has_the_shape_of_latents_and_its_timestep_is_not_rounded(policy: DigitsPolicy) -> None:
    timesteps: list[Tensor] = []
    hook = policy.transformer.time_text_embed.register_forward_pre_hook(lambda _, inputs: timesteps.append(inputs[0]))
    sigma = torch.tensor([0.9996, 0.1234567])
    velocity = policy.velocity(torch.randn(2, 1, 8, 8), sigma, policy.encode(["one", "two"]))
    hook.remove()
    assert velocity.shape == (2, 1, 8, 8)
    assert timesteps[0].dtype == torch.float32
    assert torch.equal(timesteps[0], sigma * 1000)


def test_velocity_depends_on_the_word_and_trains_its_embedding(policy: DigitsPolicy) -> None:
    latents = torch.randn(1, 1, 8, 8).expand(2, -1, -1, -1)
    velocity = policy.velocity(latents, torch.full((2,), 0.5), policy.encode(["one", "two"]))
    assert not torch.allclose(velocity[0], velocity[1])
    (gradient,) = torch.autograd.grad(velocity.square().sum(), policy.prompt_embedding.weight)
    assert gradient.abs().sum(dim=1).nonzero().flatten().tolist() == [1, 2]


def test_decode_maps_latents_to_unit_range(policy: DigitsPolicy) -> None:
    media = policy.decode(torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0]))
    assert media.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_reward_is_high_for_the_right_word_on_real_held_out_digits(reward: DigitReward) -> None:
    media, digits = held_out_images()
    assert compute_rewards(reward, media, ask_for(digits)).mean() >= 0.95


def test_reward_is_low_for_every_wrong_word(reward: DigitReward) -> None:
    media, digits = held_out_images()
    for digit in range(10):
        rewards = reward(media[digits != digit][:30], ask_for(np.full(30, digit)))
        assert rewards.mean() < 0.05


def test_reward_is_not_fooled_by_what_is_no_digit(reward: DigitReward) -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(64, 64, generator=rng)
    real = held_out_images()[0].flatten(1)[:64]
    shuffled = real.gather(1, noise.argsort(dim=1))  # the pixels of a digit in another order
    flat = torch.linspace(0, 1, 64)[:, None].expand(-1, 64)
    for images in (noise, noise.round(), shuffled, flat):
        assert reward.probabilities(images.double().numpy()).sum(axis=1).max() < 0.02


def test_reward_of_a_sample_depends_neither_on_its_batch_nor_on_the_copy(reward: DigitReward) -> None:
    media, digits = held_out_images()
    rewards = reward(media, ask_for(digits))
    copy = cloudpickle.loads(cloudpickle.dumps(reward))
    assert torch.equal(copy(media, ask_for(digits)), rewards)
    assert torch.equal(DigitReward()(media, ask_for(digits)), rewards)
    assert torch.equal(reward(media[5:8], ask_for(digits[5:8])), rewards[5:8])


def test_pretraining_writes_the_same_file_for_the_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [tmp_path / "new" / f"{name}.safetensors" for name in ("first", "second")]
    for output in outputs:
        pretrain.main(["--output", str(output), "--iterations", "3"])
        assert f"{output}: mean reward 0." in capsys.readouterr().out
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    policy = DigitsPolicy(str(outputs[0]))
    policy.build()
    condition = DigitCondition(torch.tensor([3]))
    assert policy.velocity(torch.zeros(1, 1, 8, 8), torch.ones(1), condition).isfinite().all()


def test_pretraining_leaves_a_file_alone_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "base.safetensors"
    output.write_bytes(b"mine")
    pretrain.main(["--output", str(output), "--iterations", "1"])
    assert output.read_bytes() == b"mine"
    assert "--force" in capsys.readouterr().out
    pretrain.main(["--output", str(output), "--iterations", "1", "--force"])
    DigitsPolicy(str(output)).build()


def test_pretraining_lowers_the_loss() -> None:
    torch.manual_seed(0)
    policy = DigitsPolicy()
    policy.build()
    images, digits = held_out_images()
    data, noise = images * 2 - 1, torch.randn(len(images), 1, 8, 8)

    def loss() -> float:
        with torch.no_grad():
            velocity = policy.velocity(
                (data + noise) / 2, torch.full((len(data),), 0.5), DigitCondition(torch.from_numpy(digits))
            )
        return (velocity - (noise - data)).square().mean().item()

    before = loss()
    pretrain.pretrain(policy, iterations=15)
    assert loss() < 0.9 * before
