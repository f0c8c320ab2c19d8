"""Wan 2.1 and 2.2, image to video: a video that begins with an image, and may end with another (arXiv:2503.20314)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from digenrl.policies.components import Pipeline
from digenrl.policies.embeddings import Embedding
from digenrl.policies.image_prompts import ImagePromptPolicy
from digenrl.policies.images import to_pixels
from digenrl.policies.wan import WanCondition, WanPolicy
from digenrl.types import Prompt

_NUM_TEXT_TOKENS = 512  # that the transformer takes the last of its states for, where it has an image's as well


@dataclass(frozen=True)
class WanImageCondition(WanCondition):
    """A prompt and its images as the transformer takes them."""

    image_latents: Tensor | None = None  # [B, t + C, f, h, w] which of t frames are known, and latents; None: no image
    image_embeddings: Tensor | None = None  # [B, L', D'] CLIP's tokens, for models that take them


class WanImageToVideoPolicy(WanPolicy, ImagePromptPolicy):
    """Wan 2.1 I2V and FLF2V (14B), and Wan 2.2 I2V A14B with two transformers.

    A prompt has one image, the first frame, or under `images` two, the first and the last one: FLF2V takes two, other
    models of Wan 2.1 one, and Wan 2.2 either. Images are scaled to `height` and `width`.

    Wan 2.1 is told an image by CLIP, too, whose encoder is one of the `text_encoders`.
    """

    pipeline_classes = ("WanImageToVideoPipeline",)
    condition_class = WanImageCondition
    image_fields = ("image_latents", "image_embeddings")

    def _read_sizes(self) -> tuple[int, ...]:
        index, transformer, vae = (self.files.config(part) for part in ("", "transformer", "vae"))
        self._frames_per_latent: int = vae.get("scale_factor_temporal", 4)
        self._image_dim: int | None = transformer.get("image_dim")
        self._takes_last = transformer.get("pos_embed_seq_len") is not None
        channels = vae.get("z_dim", 16)
        if index.get("expand_timesteps") or transformer["in_channels"] != 2 * channels + self._frames_per_latent:
            raise ValueError(
                f"`{type(self).__name__}` is for models that are given images as further channels, which {self.path!r} "
                "is not; Wan 2.2 5B makes videos from text with `WanPolicy`."
            )
        if (self.image_height, self.image_width) != (self.height, self.width):
            raise ValueError(
                "`image_height` and `image_width` must be left out for Wan: images are frames of the video, got "
                f"{self.image_height} x {self.image_width} beside {self.height} x {self.width}."
            )
        if self._image_dim is not None and self.max_sequence_length != _NUM_TEXT_TOKENS:
            raise ValueError(
                f"`max_sequence_length` must be {_NUM_TEXT_TOKENS} for Wan 2.1 with images, got "
                f"{self.max_sequence_length}."
            )
        return (channels, *super()._read_sizes()[1:])

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check the images of prompts, and that what encodes them stays in memory.

        Raises:
            ValueError: it is not so.
        """
        super().check_prompts(prompts)
        if prompts and self.num_image_tokens and self._text_encoding.after == "free":
            raise ValueError(
                "`text_encoders` must be offload or keep for Wan 2.1 with images, got free: they would be loaded for "
                "each new image."
            )

    def _image_counts(self) -> Collection[int]:
        if not self.files.are_here or self._image_dim is None:
            return (1, 2)
        return (2,) if self._takes_last else (1,)

    @property
    def num_image_tokens(self) -> int:
        """Tokens that CLIP makes of a prompt's images; 0 for models that do not take them."""
        if not self.files.are_here or self._image_dim is None:
            return 0
        clip = self.files.config("image_encoder")
        num_patches = int(clip["image_size"] // clip["patch_size"]) ** 2
        return (num_patches + 1) * (2 if self._takes_last else 1)

    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        from diffusers import WanPipeline

        # The same method as of the image pipeline, which fails where ftfy is not installed (as of diffusers 0.42).
        parts = {name: pipeline.components[name] for name in ("tokenizer", "text_encoder", "scheduler")}
        return super()._encode_one(WanPipeline(**parts, vae=None), prompt, device)

    def _encode_images(self, images: Sequence[Image.Image], device: torch.device) -> Embedding:
        encoded = {"image_latents": self._encode_frames(images, device)}
        if self._image_dim is not None:
            with self._text_encoding.on(device) as pipeline:
                encoded["image_embeddings"] = pipeline.encode_image(list(images), device).flatten(0, 1)[None]
        return encoded

    def _encode_frames(self, images: Sequence[Image.Image], device: torch.device) -> Tensor:
        """Encode a video of which one or two frames are known, and say which: [1, t + C, f, h, w]."""
        video = torch.zeros(1, 3, self.num_frames, self.height, self.width)
        is_known = torch.zeros(self.num_frames)
        for place, image in zip((0, -1), images, strict=False):
            video[:, :, place], is_known[place] = to_pixels(image, self.height, self.width), 1
        with self._decoding.on(device) as vae:
            latents = vae.encode(video.to(device)).latent_dist.mode()
            mean, std = (latents.new_tensor(value) for value in (vae.config.latents_mean, vae.config.latents_std))
        scaled = (latents - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)
        # The first latent frame has one frame, which counts as often as the others have frames.
        counted = torch.cat([is_known[:1].repeat(self._frames_per_latent), is_known[1:]])
        mask = counted.view(-1, self._frames_per_latent).T[None, :, :, None, None].to(device)  # [1, t, f, 1, 1]
        return torch.cat([mask.expand(-1, -1, -1, *scaled.shape[3:]), scaled], dim=1)

    def _inputs(self, latents: Tensor, condition: WanCondition) -> dict[str, Tensor]:
        """Give the usual ones, with the images; zeros where no frame is known."""
        assert isinstance(condition, WanImageCondition)
        inputs = super()._inputs(latents, condition)
        images, embeddings = condition.image_latents, condition.image_embeddings
        if images is None:
            size = (len(latents), self._frames_per_latent + latents.shape[1], *latents.shape[2:])
            images = latents.new_zeros(size)
        inputs["hidden_states"] = torch.cat([latents, images], dim=1)
        if self._image_dim is None:
            return inputs
        if embeddings is None:
            embeddings = latents.new_zeros(len(latents), self.num_image_tokens, self._image_dim)
        # The transformer wants rows of one image each, and joins those of two.
        inputs["encoder_hidden_states_image"] = (
            embeddings.unflatten(1, (2, -1)).flatten(0, 1) if self._takes_last else embeddings
        )
        return inputs
