"""Tiny random checkpoints of the classes that preference models are, with their tokenizers, and images to judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    PreTrainedTokenizerFast,
)

from digenrl.rewards import FrameReward
from digenrl.rewards.preference.aesthetic import AestheticScore
from digenrl.rewards.preference.clip_score import CLIPScore
from digenrl.rewards.preference.hpsv2 import HPSv2
from digenrl.rewards.preference.image_reward import ImageReward
from digenrl.rewards.preference.pick_score import PickScore
from digenrl.types import Prompt, PromptBatch

TEXTS = ["a photo of a red cat on a blue sofa", "a green dog", "text that says HELLO", "a green dog"]
SIZE = 32
"""Of the images that the tiny models see, in pixels."""


def images(num_images: int = 4, height: int = 56, width: int = 40) -> Tensor:
    """Give random images that differ in more than their noise."""
    rng = torch.Generator().manual_seed(3)
    coarse = torch.rand(num_images, 3, 7, 5, generator=rng)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")


def prompts(texts: list[str] | None = None) -> PromptBatch:
    return PromptBatch.for_validation([Prompt(text, uid) for uid, text in enumerate(texts or TEXTS)], seed=0)


def pil_images(media: Tensor) -> list[Image.Image]:
    pixels = (media * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(image) for image in pixels]


def clip_tokenizer() -> Any:
    """Train a tokenizer; another call may give another one, so what compares with it loads the saved one."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE(unk_token=end, continuing_subword_prefix="", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[start, end],
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
    )
    marks = {"bos_token": start, "eos_token": end, "pad_token": end, "unk_token": end}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=77, **marks)


def image_processor() -> Any:
    return CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})


def clip_config() -> CLIPConfig:
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "gelu"}
    return CLIPConfig(
        text_config={"vocab_size": 600, "hidden_size": 24, "intermediate_size": 48, "projection_dim": 16}
        | tower
        | ends,
        vision_config={"hidden_size": 32, "intermediate_size": 64, "projection_dim": 16, "image_size": SIZE}
        | {"patch_size": 8}
        | tower,
        projection_dim=16,
    )


@torch.no_grad()
def save_clip(folder: Path) -> Path:
    """Save a CLIP whose weights are so large that it tells images apart."""
    model = CLIPModel(clip_config())
    rng = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=rng))
    model.logit_scale.fill_(2.5)
    model.save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


def save_bert_tokenizer(folder: Path) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word for text in TEXTS for word in text.split()})]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    return folder


def random_state(shapes: dict[str, tuple[int, ...]], scale: float = 0.3) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return {name: scale * torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def linear_shapes(name: str, width: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (num_outputs, width), f"{name}.bias": (num_outputs,)}


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def head_state(width: int, prefix: str = "") -> dict[str, Tensor]:
    sizes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (inputs, outputs) in sizes.items():
        shapes |= linear_shapes(f"{prefix}layers.{index}", inputs, outputs)
    return random_state(shapes, scale=0.1)


def open_clip_state() -> dict[str, Tensor]:
    """Give weights by the names and shapes that open_clip's `CLIP` has for the sizes of `clip_config`."""
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "token_embedding.weight": (600, 24),
        "positional_embedding": (77, 24),
        "text_projection": (24, 16),
        "visual.class_embedding": (32,),
        "visual.positional_embedding": (17, 32),
        "visual.conv1.weight": (32, 3, 8, 8),
        "visual.proj": (32, 16),
    }
    shapes |= norm_shapes("ln_final", 24) | norm_shapes("visual.ln_pre", 32) | norm_shapes("visual.ln_post", 32)
    for tower, width in {"transformer": 24, "visual.transformer": 32}.items():
        for layer in range(2):
            block = f"{tower}.resblocks.{layer}"
            shapes |= {
                f"{block}.attn.in_proj_weight": (3 * width, width),
                f"{block}.attn.in_proj_bias": (3 * width,),
                **linear_shapes(f"{block}.attn.out_proj", width, width),
                **linear_shapes(f"{block}.mlp.c_fc", width, 2 * width),
                **linear_shapes(f"{block}.mlp.c_proj", 2 * width, width),
                **norm_shapes(f"{block}.ln_1", width),
                **norm_shapes(f"{block}.ln_2", width),
            }
    return random_state(shapes)


BLIP_WIDTH = 128
"""Of both encoders: two attention heads."""


def image_reward_state() -> dict[str, Tensor]:
    """Give weights by the names that ImageReward's checkpoint has, of BLIP's two encoders and the head."""
    width = BLIP_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "blip.visual_encoder.cls_token": (1, 1, width),
        "blip.visual_encoder.pos_embed": (1, 17, width),
        "blip.visual_encoder.patch_embed.proj.weight": (width, 3, 8, 8),
        "blip.visual_encoder.patch_embed.proj.bias": (width,),
        **norm_shapes("blip.visual_encoder.norm", width),
        "blip.text_encoder.embeddings.word_embeddings.weight": (40, width),
        "blip.text_encoder.embeddings.position_embeddings.weight": (64, width),
        **norm_shapes("blip.text_encoder.embeddings.LayerNorm", width),
        **linear_shapes("blip.vision_proj", width, 256),  # there, but not read
    }
    for layer in range(2):
        block = f"blip.visual_encoder.blocks.{layer}"
        shapes |= linear_shapes(f"{block}.attn.qkv", width, 3 * width)
        shapes |= linear_shapes(f"{block}.attn.proj", width, width)
        shapes |= linear_shapes(f"{block}.mlp.fc1", width, 96) | linear_shapes(f"{block}.mlp.fc2", 96, width)
        shapes |= norm_shapes(f"{block}.norm1", width) | norm_shapes(f"{block}.norm2", width)
        block = f"blip.text_encoder.encoder.layer.{layer}"
        for attention in ("attention", "crossattention"):
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                shapes |= linear_shapes(f"{block}.{attention}.{part}", width, width)
            shapes |= norm_shapes(f"{block}.{attention}.output.LayerNorm", width)
        shapes |= linear_shapes(f"{block}.intermediate.dense", width, 96)
        shapes |= linear_shapes(f"{block}.output.dense", 96, width) | norm_shapes(f"{block}.output.LayerNorm", width)
    position_ids = {"blip.text_encoder.embeddings.position_ids": torch.arange(64)[None]}
    return random_state(shapes, scale=0.15) | position_ids | head_state(width, "mlp.")


@dataclass(frozen=True)
class TinyModels:
    """Where the checkpoints are."""

    clip: Path
    predictor: Path
    hps: Path
    image_reward: Path
    bert: Path

    @classmethod
    def save(cls, folder: Path) -> TinyModels:
        tiny = cls(*(folder / name for name in ("clip", "predictor.pth", "hps.pt", "image_reward.pt", "bert")))
        save_clip(tiny.clip)
        save_bert_tokenizer(tiny.bert)
        torch.save(head_state(16), tiny.predictor)
        torch.save({"iteration": 4000, "state_dict": open_clip_state()}, tiny.hps)
        torch.save(image_reward_state(), tiny.image_reward)
        return tiny

    def make(self, name: str, **settings: Any) -> FrameReward:
        """Construct the reward of that name with its tiny weights."""
        clip = str(self.clip)
        rewards: dict[str, Callable[..., FrameReward]] = {
            "PickScore": lambda **given: PickScore(clip, processor=clip, **given),
            "CLIPScore": lambda **given: CLIPScore(clip, **given),
            "AestheticScore": lambda **given: AestheticScore(str(self.predictor), model=clip, **given),
            "HPSv2": lambda **given: HPSv2(str(self.hps), base=clip, **given),
            "ImageReward": lambda **given: ImageReward(str(self.image_reward), tokenizer=str(self.bert), **given),
        }
        return rewards[name](**settings)


NAMES = ("PickScore", "CLIPScore", "AestheticScore", "HPSv2", "ImageReward")
