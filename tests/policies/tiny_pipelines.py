"""Tiny pipelines with random weights, of all five families, made and saved without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TEXTS = [
    "a photo of a red cat on a blue sofa",
    "a green dog",
    "digit 0 1 2 3 4 5 6 7 8 9",
    "text that says HELLO",
    "dance monkey",
] * 40

PROMPTS = ["a red cat", "a green dog", "a photo of a blue sofa", "digit 7"]

_KL = {
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "shift_factor": 0.0609,
    "scaling_factor": 1.5035,
    "sample_size": 32,
    "block_out_channels": (4,),
    "norm_num_groups": 1,
}


def save_tiny_pipeline(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save the pipeline called flux, sd3, qwen, wan or hunyuan; returns its folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _BUILDERS[name]().save_pretrained(folder)
    return folder


def clip_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    start, end = "<|startoftext|>", "<|endoftext|>"
    made = Tokenizer(models.BPE(unk_token=end, continuing_subword_prefix="", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=[start, end],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=start, eos_token=end, pad_token=end, unk_token=end, model_max_length=77
    )


def t5_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,!?'-"
    made.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=["<pad>", "</s>", "<unk>"],
            unk_token="<unk>",
            initial_alphabet=list(letters),
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_QWEN_TEMPLATE_TEXTS = [
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:",
    "user\nassistant\n",
] * 40
"""Each word becomes one token, so that the template before a prompt has the 34 that the pipeline leaves out."""


def qwen_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [*TEXTS, *_QWEN_TEMPLATE_TEXTS],
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:],
        chat_template=_CHAT,
    )


def _clip_config(hidden: int, projection: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        hidden_size=hidden,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=1000,
        hidden_act="gelu",
        projection_dim=projection,
    )


def _t5_config(config_class: Any) -> Any:
    return config_class(
        vocab_size=320,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def _flux(pipeline_class: str = "FluxPipeline") -> Any:
    import diffusers
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5Config, T5EncoderModel

    return getattr(diffusers, pipeline_class)(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
        text_encoder=CLIPTextModel(_clip_config(32, 32)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=T5EncoderModel(_t5_config(T5Config)),
        tokenizer_2=t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=True,
        ),
        vae=AutoencoderKL(**_KL, latent_channels=1),  # 2x2 of them are packed to 4
    )


def _sd3() -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from diffusers import StableDiffusion3Pipeline as Pipeline
    from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

    return Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=CLIPTextModelWithProjection(_clip_config(16, 16)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(16, 16)),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=T5EncoderModel(_t5_config(T5Config)),
        tokenizer_3=t5_tokenizer(),
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=32,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        vae=AutoencoderKL(**_KL, latent_channels=4),
    )


def _qwen() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 640,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            shift=1.0,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=qwen_tokenizer(),
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=16,
            guidance_embeds=False,
            axes_dims_rope=(8, 4, 4),
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.0, 1.5, 0.5, 2.0],
        ),
    )


def _wan(num_transformers: int = 1, **settings: Any) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    transformers = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )
        for _ in range(num_transformers)
    ]
    return WanPipeline(
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        tokenizer=t5_tokenizer(),
        text_encoder=UMT5EncoderModel(_t5_config(UMT5Config)),
        **dict(zip(("transformer", "transformer_2"), transformers, strict=False)),
        vae=AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        **settings,
    )


def _wan_image_to_video(num_transformers: int = 1, *, num_images: int = 0, **settings: Any) -> Any:
    """Wan 2.2's; with a number of images, Wan 2.1's, which is told them by CLIP as well."""
    from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    parts = dict(_wan(num_transformers, **settings).components)
    told = {"image_dim": 16, "added_kv_proj_dim": 24, "pos_embed_seq_len": 10 if num_images == 2 else None}
    for name in ("transformer", "transformer_2")[:num_transformers]:
        config = {key: value for key, value in parts[name].config.items() if not key.startswith("_")}
        parts[name] = WanTransformer3DModel(**{**config, "in_channels": 36, **(told if num_images else {})})
    if num_images:
        vision = CLIPVisionConfig(
            hidden_size=16, intermediate_size=37, num_attention_heads=4, num_hidden_layers=3, image_size=8, patch_size=4
        )
        parts["image_encoder"] = CLIPVisionModel(vision)
        parts["image_processor"] = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8)
    return WanImageToVideoPipeline(**parts, **settings)


def _wan_two_transformers() -> Any:
    """As Wan 2.2 A14B is: one for high noise, one for low noise."""
    return _wan(2, boundary_ratio=0.875)


def _hunyuan() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextModel, LlamaConfig, LlamaModel

    llama = LlamaConfig(
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        hidden_size=16,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,  # the pipeline takes the third state from the end
        vocab_size=1000,
        hidden_act="gelu",
    )
    return HunyuanVideoPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=LlamaModel(llama),
        tokenizer=qwen_tokenizer(),
        text_encoder_2=CLIPTextModel(_clip_config(8, 8)),
        tokenizer_2=clip_tokenizer(),
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        vae=AutoencoderKLHunyuanVideo(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(8,) * 4,
            layers_per_block=1,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            act_fn="silu",
            norm_num_groups=4,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            mid_block_add_attention=True,
        ),
    )


_BUILDERS: dict[str, Callable[[], Any]] = {
    "flux": _flux,
    "kontext": lambda: _flux("FluxKontextPipeline"),
    "sd3": _sd3,
    "qwen": _qwen,
    "wan": _wan,
    "wan_two_transformers": _wan_two_transformers,
    "wan_token_timesteps": lambda: _wan(expand_timesteps=True),
    "wan_image": lambda: _wan_image_to_video(2, boundary_ratio=0.875),
    "wan_image_told": lambda: _wan_image_to_video(num_images=1),
    "wan_two_images_told": lambda: _wan_image_to_video(num_images=2),
    "hunyuan": _hunyuan,
}
