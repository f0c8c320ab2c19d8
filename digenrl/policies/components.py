"""A pipeline's text encoders and VAE: frozen, no weights of the policy, and on the device while they are used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from digenrl.policies.embeddings import fingerprint_files
from digenrl.policies.pipeline_files import PipelineFiles

TextEncoders = Literal["free", "offload", "keep"]
"""What becomes of text encoders after use: they leave memory, wait in host memory, or stay on the device."""

Pipeline: TypeAlias = Any
"""A pipeline of diffusers."""


class TextEncoding:
    """The pipeline with its tokenizers and text encoders and nothing else, loaded when it is first used."""

    def __init__(
        self, files: PipelineFiles, *, absent: tuple[str, ...], dtype: torch.dtype, after: TextEncoders
    ) -> None:
        """Note what to load.

        Args:
            files: of the pipeline.
            absent: names of its parts that encode no text.
            dtype: of the encoders.
            after: what becomes of them after use.
        """
        self._files, self._absent, self._dtype, self.after = files, absent, dtype, after
        self._pipeline: Pipeline = None
        self._encoders: list[_Lent] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[Pipeline]:
        """Lend the pipeline, its encoders on `device`, without gradient and in its own precision."""
        with ExitStack() as stack:
            # What is made here is also trained with, which inference tensors forbid.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if self._pipeline is None:
                self._pipeline = self._load()
                models = [part for part in self._pipeline.components.values() if isinstance(part, nn.Module)]
                self._encoders = [_Lent(model) for model in models]
            for encoder in self._encoders:
                encoder.move(device)
            yield self._pipeline
            if self.after == "free":
                self._pipeline, self._encoders = None, []
            elif self.after == "offload":
                for encoder in self._encoders:
                    encoder.give_back()
        if device.type == "cuda" and self.after != "keep":
            torch.cuda.empty_cache()

    def fingerprint(self, settings: Mapping[str, Any], *, memo: Path) -> str:
        """Hash all that embeddings depend on but the prompt: files, libraries, and a policy's `settings`.

        Args:
            settings: that JSON can hold.
            memo: see `fingerprint_files`.
        """
        import diffusers
        import transformers

        index = self._files.config("")
        whole = {
            "pipeline": index["_class_name"],
            "dtype": str(self._dtype),
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
            **settings,
        }
        # Whatever a pipeline calls what encodes texts; its scheduler is loaded with it, and encodes nothing.
        others = (*self._absent, "scheduler")
        parts = [name for name, entry in index.items() if isinstance(entry, list) and name not in others]
        files = [path for part in parts for path in (self._files.folder / part).rglob("*") if path.is_file()]
        return fingerprint_files(files, whole, memo=memo)

    def _load(self) -> Pipeline:
        import diffusers

        index = self._files.config("")
        # Parts that a pipeline was saved without must be said to be absent, too.
        parts = {name: None for name, entry in index.items() if name in self._absent or entry == [None, None]}
        with quiet_loading():
            return getattr(diffusers, index["_class_name"]).from_pretrained(
                str(self._files.folder), torch_dtype=self._dtype, local_files_only=True, **parts
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pipeline": None, "_encoders": []}  # to be loaded where it is used


class Decoding:
    """The VAE, loaded when it is first used. It computes in float32, whatever the policy's precision is."""

    def __init__(self, files: PipelineFiles, *, slicing: bool, tiling: bool, offload: bool) -> None:
        """Note what to load.

        Args:
            files: of the pipeline.
            slicing: decode one sample at a time.
            tiling: decode large samples in tiles that overlap.
            offload: keep it in host memory while it is not used.
        """
        self._files, self._slicing, self._tiling, self._offload = files, slicing, tiling, offload
        self._vae: Any = None
        self._lent: _Lent

    @contextmanager
    def on(self, device: torch.device) -> Iterator[Any]:
        """Lend the VAE on `device`, without gradient."""
        if self._vae is None:
            with torch.inference_mode(False):
                self._vae = self._load()
                self._lent = _Lent(self._vae)
        self._lent.move(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield self._vae
        if self._offload:
            self._lent.give_back()

    def _load(self) -> Any:
        import diffusers

        vae_class = getattr(diffusers, self._files.config("vae")["_class_name"])
        with quiet_loading():
            vae = vae_class.from_pretrained(
                str(self._files.folder), subfolder="vae", torch_dtype=torch.float32, local_files_only=True
            )
        if self._slicing:
            vae.enable_slicing()
        if self._tiling:
            vae.enable_tiling()
        return vae

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lent"} | {"_vae": None}


def to_media(decoded: Tensor) -> Tensor:
    """Turn what a VAE decodes, about [-1, 1], into media in [0, 1]."""
    return (decoded.float() / 2 + 0.5).clamp(0, 1)


class _Lent:
    """A frozen model in host memory, whose tensors go to a device and are dropped there: they need no way back."""

    def __init__(self, model: nn.Module) -> None:
        model.requires_grad_(False)
        self._tensors = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]

    def move(self, device: torch.device) -> None:
        for tensor, home in self._tensors:
            if tensor.device != device:
                tensor.data = home.to(device)

    def give_back(self) -> None:
        for tensor, home in self._tensors:
            tensor.data = home


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Load without progress bars, since many workers load at once, and without a word about an argument's old name."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
            yield
    finally:
        for log in shown:
            log.enable_progress_bar()
