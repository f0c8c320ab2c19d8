"""What policies have in common that are also given images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from PIL import Image

from digenrl.policies.embeddings import Embedding, EmbeddingCache
from digenrl.policies.images import check_image, image_paths, read_image
from digenrl.policies.pipeline import PipelinePolicy
from digenrl.types import Condition, Prompt, PromptBatch


class ImagePromptPolicy(PipelinePolicy):
    """A pipeline whose prompts have images: files under `image` or `images` in their metadata.

    What the VAE makes of them is part of the condition: trainers need neither files nor VAE. Workers that generate read
    the files, so on a cluster these are at the same place on all hosts. An image is encoded once in each process.
    """

    prompt_fields = (*PipelinePolicy.prompt_fields, "image", "images")
    image_fields: ClassVar[tuple[str, ...]]
    """Fields of the condition that images make; None in each where prompts have no image."""

    def __init__(
        self,
        path: str,
        *,
        image_height: int | None = None,
        image_width: int | None = None,
        crop_images: bool = False,
        **settings: Any,
    ) -> None:
        """Check the settings; the others are those of `PipelinePolicy`.

        Args:
            path: folder of the pipeline, or its id on the hub.
            image_height: that a prompt's images are scaled to, in pixels; None is `height`.
            image_width: that they are scaled to; None is `width`.
            crop_images: cut off what is too much of images of another shape; else these are refused.
            **settings: see there.

        Raises:
            ValueError: a setting outside its bounds.
        """
        super().__init__(path, **settings)
        for name, value in {"image_height": image_height, "image_width": image_width}.items():
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.image_height = self.height if image_height is None else image_height
        self.image_width = self.width if image_width is None else image_width
        self.crop_images = crop_images
        self._images = EmbeddingCache()

    @abstractmethod
    def _image_counts(self) -> Collection[int]:
        """Say how many images a prompt may have."""

    @abstractmethod
    def _encode_images(self, images: Sequence[Image.Image], device: torch.device) -> Embedding:
        """Encode the images of a prompt, each in its own resolution, to `image_fields`: [1, ...] each."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that prompts have as many images as the model takes, and that these can be read and have its shape.

        Raises:
            ValueError: it is not so.
        """
        super().check_prompts(prompts)
        counts = self._image_counts()
        for prompt in prompts:
            num_images = len(image_paths(prompt))
            if num_images not in counts:
                raise ValueError(
                    f"`{type(self).__name__}` takes {' or '.join(map(str, sorted(counts)))} images with a prompt, but "
                    f"{prompt.text[:60]!r} has {num_images}: give `image` or `images` in a .jsonl file."
                )
        for path in dict.fromkeys(path for prompt in prompts for path in image_paths(prompt)):
            check_image(path, self.image_height, self.image_width, crop=self.crop_images)

    def encode_batch(self, prompts: PromptBatch) -> Condition:
        """Turn B rows of prompts into a condition, with their images."""
        condition = super().encode_batch(prompts)
        rows = ["\0".join(image_paths(prompt)) for prompt in prompts.prompts]
        if not any(rows):
            return condition
        encoded = self._images.get(rows, self._encode_new_images, self._fingerprint)
        fields: dict[str, Any] = {name: torch.cat([entry[name] for entry in encoded]) for name in encoded[0]}
        return replace(condition, **{name: value.to(self.device) for name, value in fields.items()})

    def _encode_new_images(self, rows: Sequence[str]) -> Iterator[Embedding]:
        height, width, crop = self.image_height, self.image_width, self.crop_images
        for row in rows:
            yield self._encode_images(
                [read_image(path, height, width, crop=crop) for path in row.split("\0")], self.device
            )

    def unconditional(self, condition: Condition) -> Condition:
        """Give the condition of the negative prompts for the same rows, with the same images."""
        images: dict[str, Any] = {name: getattr(condition, name) for name in self.image_fields}
        return replace(super().unconditional(condition), **images)
