"""Writes a tiny Qwen2.5-VL with random weights to a folder, tokenizer and processors included.

Run by the environment that has vLLM, as its transformers shall write what it reads: `python tiny_judge.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
TEXTS = ["a photo of a red cat on a blue sofa", "yes no Yes No", "0 1 2 3 4 5 6 7 8 9", "answer with a number"] * 40
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = {"min_pixels": 28 * 28, "max_pixels": 224 * 224}


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as Qwen's: each digit is a token of its own, so that "10" is two."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=CHAT,
    )


def model(tokens: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    ends = {"bos_token_id": None, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    rope = {"rope_type": "default", "type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
    text = {
        **{"vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048},
        **{"tie_word_embeddings": True, "rope_parameters": rope, **ends},
    }
    vision = {
        **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 14, "window_size": 112},
        "fullatt_block_indexes": [1],
    }
    token_of = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "vision_token_id": "<|vision_pad|>",
    }
    tokens_of = {name: tokens.convert_tokens_to_ids(token) for name, token in token_of.items()}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens_of, **ends)
    return Qwen2_5_VLForConditionalGeneration(config)


def write(folder: Path) -> None:
    torch.manual_seed(0)
    tokens = tokenizer()
    tokens.save_pretrained(folder)
    judge = model(tokens)
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.mul_(4)  # with the usual small weights all images get nearly the same answer
    judge.save_pretrained(folder)
    _update(
        folder / "tokenizer_config.json",
        processor_class="Qwen2_5_VLProcessor",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )
    shared = {
        **{"processor_class": "Qwen2_5_VLProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "resample": 3},
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
        **{**PIXELS, "size": {"shortest_edge": PIXELS["min_pixels"], "longest_edge": PIXELS["max_pixels"]}},
    }
    _update(folder / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor", **shared)
    _update(folder / "video_preprocessor_config.json", video_processor_type="Qwen2VLVideoProcessor", **shared)


def _update(path: Path, **entries: object) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **entries}, indent=2))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
