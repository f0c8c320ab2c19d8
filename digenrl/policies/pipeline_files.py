"""Where the files of a diffusers pipeline lie, and its small configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX = "model_index.json"


class PipelineFiles:
    """A pipeline as `save_pretrained` writes it: a local folder, or a repository on the hub.

    A local folder is read at once, and so is a repository that was downloaded before; of another one nothing is known
    before `fetch`.
    """

    def __init__(self, path: str, revision: str | None = None) -> None:
        """Look for the folder, without the network.

        Raises:
            FileNotFoundError: a local path without a pipeline, or a repository that is not here while the hub is not
                to be asked.
            ValueError: a `revision` of a local folder.
        """
        self.path, self.revision = path, revision
        self._is_on_hub = not Path(path).is_dir()
        self._folder: Path | None = Path(path)
        if self._is_on_hub:
            if not may_be_on_the_hub(path):
                raise FileNotFoundError(
                    f"`path` must be the folder of a diffusers pipeline or its hub id, got {path!r}."
                )
            self._folder = self._downloaded_before()
            return
        if revision is not None:
            raise ValueError(f"`revision` is of a repository on the hub, but `path` {path!r} is a folder here.")
        if not (Path(path) / INDEX).is_file():
            raise FileNotFoundError(f"`path` {path!r} has no {INDEX}: it is not the folder of a diffusers pipeline.")

    def _downloaded_before(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.constants import HF_HUB_OFFLINE

        found = try_to_load_from_cache(self.path, INDEX, revision=self.revision)
        folder = Path(found).parent if isinstance(found, str) else None
        if folder is not None and any(folder.glob("transformer*/config.json")):
            return folder
        if HF_HUB_OFFLINE:
            raise FileNotFoundError(
                f"`path` {self.path!r} is no folder here and was not downloaded before, and HF_HUB_OFFLINE forbids to "
                "ask the hub: give the folder of a pipeline."
            )
        return None

    @property
    def are_here(self) -> bool:
        """Whether the folder is known: that of a repository after `fetch`."""
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """The local folder."""
        if self._folder is None:
            raise RuntimeError(f"the pipeline {self.path!r} is on the hub and known once the policy is built.")
        return self._folder

    def fetch(self) -> None:
        """Download a repository, or find it where it was downloaded before.

        Raises:
            FileNotFoundError: neither is possible.
        """
        if not self._is_on_hub:
            return
        from diffusers import DiffusionPipeline

        try:
            folder = DiffusionPipeline.download(self.path, revision=self.revision, use_safetensors=True)
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        self._folder = Path(folder)

    def index(self) -> dict[str, Any]:
        """Read which class the pipeline is of, and which parts it has; this file alone is asked of the hub."""
        if self._folder is not None:
            return self.config("")
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(self.path, INDEX, revision=self.revision)
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        return _read_json(Path(path))

    def config(self, part: str) -> dict[str, Any]:
        """Read the configuration of a part, such as `"transformer"`; of the pipeline for an empty name.

        Raises:
            FileNotFoundError: there is none.
        """
        name = INDEX if not part else "scheduler_config.json" if part == "scheduler" else "config.json"
        path = self.folder / part / name
        if not path.is_file():
            raise FileNotFoundError(f"the pipeline in {self.path!r} has no {part}/{name}.")
        return _read_json(path)

    def weights(self, part: str) -> Path:
        """Give the safetensors file, or index of several, with the weights of a model of diffusers.

        Raises:
            FileNotFoundError: there is none.
        """
        names = ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
        for name in names:
            if (self.folder / part / name).is_file():
                return self.folder / part / name
        raise FileNotFoundError(f"the pipeline in {self.path!r} has neither {part}/{names[1]} nor an index of several.")

    def _unreachable(self, error: Exception) -> FileNotFoundError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return FileNotFoundError(
            f"`path` {self.path!r} is no folder here and cannot be had from the hub ({reason}): check its name and the "
            "network, or give the folder of a pipeline that was downloaded."
        )


def vae_factor(files: PipelineFiles) -> int:
    """Give the pixels along a side of a latent, for `AutoencoderKL`."""
    return int(2 ** (len(files.config("vae")["block_out_channels"]) - 1))


def may_be_on_the_hub(path: str) -> bool:
    """Whether a path looks like `owner/name`."""
    parts = path.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _read_json(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config
