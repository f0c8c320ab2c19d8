"""The base of policies over diffusers' pipelines: their transformer, VAE, text encoders and schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from digenrl.policies.checks import check_adapter_settings, check_choice, check_is_there
from digenrl.policies.components import Decoding, Pipeline, TextEncoders, TextEncoding, to_media
from digenrl.policies.embeddings import Embedding, EmbeddingCache
from digenrl.policies.lora import LoRAInit, LoRASettings, StoredAdapter, add_lora
from digenrl.policies.pipeline_files import PipelineFiles
from digenrl.policies.pipeline_schedule import Schedule, check_schedule, chosen_schedule, flow_match_schedule
from digenrl.policies.pipeline_transformer import make_transformer, stored_transformer
from digenrl.policies.policy import DiffusionPolicy
from digenrl.policies.stored_tensors import StoredTensor
from digenrl.types import Condition, Prompt, PromptBatch

DType = Literal["bfloat16", "float32"]

_NEGATIVE = "negative_prompt"
_LORA_INIT: LoRAInit = "gaussian"
_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FAMILIES: dict[str, type[PipelinePolicy]] = {}
"""By the class name in `model_index.json`."""


class PipelinePolicy(DiffusionPolicy):
    """A pipeline that diffusers has, as a policy.

    The transformer is the only part with weights of the policy. Text encoders and VAE are loaded when they are first
    needed, are in no checkpoint, and no optimizer or sharding sees them. Weights that are not trained are in no
    checkpoint either: they are read from the pipeline's files again.

    A family names its `pipeline_classes`, which registers it, and defines `_read_sizes`, `_encode_one`, `velocity` and
    `pipeline_sigmas`; `StableDiffusion3Policy` is a short one.
    """

    pipeline_classes: ClassVar[tuple[str, ...]] = ()
    """Class names in `model_index.json` that this family serves."""
    prompt_fields: tuple[str, ...] = (_NEGATIVE,)
    condition_class: ClassVar[type[Condition]] = Condition
    """Whose fields `_encode_one` gives."""
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """Names of the lists of repeated blocks in a transformer."""
    transformers: tuple[str, ...] = ("transformer",)
    """Names of the pipeline's parts that are trained, and of the policy's submodules."""

    @classmethod
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a family for its pipelines."""
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("pipeline_classes", ()):
            _FAMILIES[name] = cls

    def __init__(
        self,
        path: str,
        *,
        revision: str | None = None,
        height: int = 512,
        width: int = 512,
        max_sequence_length: int = 256,
        negative_prompt: str = "",
        schedule: Schedule = "pipeline",
        schedule_shift: float | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_targets: Sequence[str] | str | None = None,
        lora_init: LoRAInit = _LORA_INIT,
        adapter: str | None = None,
        dtype: DType = "bfloat16",
        embedding_cache: str | None = None,
        text_encoders: TextEncoders = "offload",
        vae_slicing: bool = True,
        vae_tiling: bool = False,
        offload_vae: bool = False,
    ) -> None:
        """Check the settings; weights are read by `build`, and a repository on the hub is fetched there.

        Args:
            path: folder of the pipeline, or its id on the hub.
            revision: of the repository on the hub.
            height: of media, in pixels.
            width: of media, in pixels.
            max_sequence_length: tokens that a prompt is padded or cut to.
            negative_prompt: what classifier-free guidance leads away from, unless a prompt has a `negative_prompt` of
                its own in its metadata.
            schedule: noise levels of rollouts, of training and of validation: `"pipeline"` has those of the pipeline's
                own scheduler, `"dance"` DanceGRPO's (`dance_sigmas`), `"dpm"` DGPO's and DiffusionNFT's (`dpm_sigmas`);
                a list has sigmas as they are, of one number of steps, and falls from at most 1 to 0.
            schedule_shift: of `"dance"` and `"dpm"`, which need one.
            lora_rank: of the adapter that is trained; None trains all weights of the transformer, or, with `adapter`,
                takes that one's.
            lora_alpha: the adapter is scaled by this over the rank; None is twice the rank, or the `adapter`'s.
            lora_targets: ends of the names of linear layers that are adapted, or a regular expression of whole names;
                None is the attention layers, or the `adapter`'s.
            lora_init: of the adapter's first factor; the second is 0.
            adapter: file or folder of a LoRA that training starts from; a reference policy then is that start.
            dtype: of text encoders, and of the transformer's weights if they are not trained; trained weights are
                float32.
            embedding_cache: folder for the prompts' embeddings; None keeps them in memory only.
            text_encoders: whether they leave memory after use (`"free"`, for prompts that are all in
                `embedding_cache`), wait in host memory (`"offload"`) or stay on the device (`"keep"`).
            vae_slicing: decode one sample at a time, so that its media do not depend on its batch.
            vae_tiling: decode large samples in tiles.
            offload_vae: keep the VAE in host memory while it is not used.

        Raises:
            FileNotFoundError: `path` or `adapter` is not there.
            ValueError: a setting outside its bounds.
        """
        super().__init__()
        for name, value in {"height": height, "width": width, "max_sequence_length": max_sequence_length}.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        check_choice("dtype", dtype, tuple(_DTYPES))
        check_choice("text_encoders", text_encoders, ("free", "offload", "keep"))
        check_schedule(schedule, schedule_shift)
        check_adapter_settings(
            rank=lora_rank,
            alpha=lora_alpha,
            targets=lora_targets,
            init=lora_init,
            default_init=_LORA_INIT,
            adapter=adapter,
        )
        check_is_there("adapter", adapter)
        self.path, self.height, self.width = path, height, width
        self.max_sequence_length, self.negative_prompt = max_sequence_length, negative_prompt
        self.schedule, self.schedule_shift = schedule, schedule_shift
        self.adapter = adapter
        self.dtype: torch.dtype = _DTYPES[dtype]
        self.lora: LoRASettings | None = None
        """Form of the adapter; None if all weights are trained, and before `build` if `adapter` says it."""
        self._lora_settings = (lora_rank, lora_alpha, lora_targets, lora_init)
        if lora_rank is not None:
            self.lora = self._lora_of(lora_rank, lora_alpha, lora_targets or self.default_lora_targets)
        self._adapted: dict[str, list[str]] = {}
        self._is_made = False
        self._latent_shape: tuple[int, ...] | None = None
        self.files = PipelineFiles(path, revision)
        self._text_encoding = TextEncoding(
            self.files, absent=(*self.transformers, "transformer_2", "vae"), dtype=self.dtype, after=text_encoders
        )
        self._decoding = Decoding(self.files, slicing=vae_slicing, tiling=vae_tiling, offload=offload_vae)
        self._embedding_cache = embedding_cache
        self._embeddings = EmbeddingCache(embedding_cache)
        self._fingerprints: dict[str, str] = {}
        self._empty: dict[torch.device, Condition] = {}
        """The condition of `negative_prompt`, one row, on the device that asked last."""
        self.register_state_dict_post_hook(_drop_stored)
        self.register_load_state_dict_post_hook(_excuse_stored)

    def _finish_init(self) -> None:
        """Check sizes and schedule if the pipeline's configuration is here; the last line of a family's constructor."""
        if self.files.are_here:
            self._read_configs()
            self._check_scheduler()

    @property
    def latent_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of one sample's latents; of a repository that is yet to be fetched it is known after `prepare`."""
        if self._latent_shape is None:
            raise RuntimeError(f"the sizes of {self.path!r}, which is on the hub, are known once it is fetched.")
        return self._latent_shape

    @classmethod
    def from_pretrained(cls, path: str, **settings: Any) -> PipelinePolicy:
        """Make the policy of the family that a pipeline is of.

        Args:
            path: folder of the pipeline, or its id on the hub, which is asked for `model_index.json` at once.
            **settings: of the family's constructor.

        Raises:
            ValueError: no family is known for it, or another than this class.
        """
        name = PipelineFiles(path, settings.get("revision")).index().get("_class_name")
        family = find_family(name)
        if not issubclass(family, cls):
            raise ValueError(f"{path!r} is a {name}, which `{family.__name__}` is for, and not `{cls.__name__}`.")
        return family(path, **settings)

    # ---- what a family defines -----------------------------------------------------------------------------

    @abstractmethod
    def _read_sizes(self) -> tuple[int, ...]:
        """Give `latent_shape`, from `self.files.config` of the parts.

        Raises:
            ValueError: `height` or `width` do not suit the model; `check_multiple` says so.
        """

    @abstractmethod
    def _encode_one(self, pipeline: Pipeline, prompt: str, device: torch.device) -> Embedding:
        """Encode a prompt with the pipeline's own methods, padded to `max_sequence_length`: [1, ...] each."""

    @abstractmethod
    def pipeline_sigmas(self, num_steps: int) -> Tensor:
        """Give the schedule [num_steps + 1] of the pipeline's own scheduler, from `self.files.config` of the parts.

        Raises:
            ValueError: there is no formula for it.
        """

    def _encoding_settings(self) -> Mapping[str, Any]:
        """Give further settings that embeddings depend on."""
        return {}

    def _unscale(self, latents: Tensor, vae: Any) -> Tensor:
        """Turn latents of the policy into those of the VAE."""
        config = vae.config
        unscaled: Tensor = latents / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
        return unscaled

    # ---- building ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Fetch a repository from the hub, once, before workers want it, and check the sizes, schedule and adapters.

        Raises:
            FileNotFoundError: it is not here and cannot be fetched.
            ValueError: the sizes or an adapter do not suit the model, or its scheduler has no formula.
        """
        self.files.fetch()
        self._read_configs()
        self._check_scheduler()
        if self._lora_settings[2] is not None or any(self._adapter_of(part)[0] for part in self.transformers):
            with torch.random.fork_rng(devices=[]):
                for part in self.transformers:
                    self._make(part)

    def build(self) -> None:
        """Make the transformer without weights: `stored_weights` says where those are; an adapter gets its own."""
        self.files.fetch()
        self._read_configs()
        for part in self.transformers:
            self.add_module(part, self._make(part))
        self._is_made = True

    def _make(self, part: str) -> nn.Module:
        adapt = partial(self._add_adapter, part)
        return make_transformer(self.files, part, adapt=adapt, frozen_dtype=self.dtype)

    def _read_configs(self) -> None:
        index = self.files.config("")
        if index["_class_name"] not in self.pipeline_classes:
            raise ValueError(
                f"`{type(self).__name__}` is for {' and '.join(self.pipeline_classes)}, but {self.path!r} is a "
                f"{index['_class_name']}; `DiffusionPolicy.from_pretrained` finds the class for it."
            )
        self._latent_shape = self._read_sizes()

    def _check_scheduler(self) -> None:
        if self.schedule == "pipeline":
            self.sigmas(2)

    def _add_adapter(self, part: str, model: nn.Module) -> None:
        """Put the adapter into a transformer, if there is one; what is to stay as it is must not require a gradient."""
        path, prefix = self._adapter_of(part)
        if path is None:
            if self.lora is not None:
                self._adapted[part] = add_lora(model, self.lora)
            return
        rank, alpha, targets, _ = self._lora_settings
        stored = StoredAdapter.read(_pipeline_class(self.files), path, prefix)
        if rank not in (None, stored.rank) or (stored.alpha is not None and alpha not in (None, stored.alpha)):
            raise ValueError(
                f"`adapter` {path!r} has rank {stored.rank} and alpha {stored.alpha}, but `lora_rank` is "
                f"{rank} and `lora_alpha` {alpha}: leave them out."
            )
        if targets is not None:
            raise ValueError("`lora_targets` are those of `adapter`: leave them out.")
        # Without a note, the ecosystem loads an adapter with scale 1.
        self.lora = self._lora_of(stored.rank, stored.alpha or alpha or stored.rank, stored.targets)
        self._adapted[part] = add_lora(model, self.lora, stored.weights)

    def _adapter_of(self, part: str) -> tuple[str | None, str]:
        """Give the file of the adapter that a transformer starts from, and what its names begin with there."""
        return self.adapter, part

    def _lora_of(self, rank: int, alpha: float | None, targets: Sequence[str] | str) -> LoRASettings:
        return LoRASettings(rank, 2 * rank if alpha is None else alpha, targets, self._lora_settings[3])

    def stored_weights(self) -> Mapping[str, StoredTensor]:
        """Say which of the pipeline's files the transformer's weights are in."""
        return {
            name: entry
            for part in self.transformers
            for name, entry in stored_transformer(self.files, part, self._adapted.get(part, ())).items()
        }

    def untrained_names(self) -> set[str]:
        """Give the names of parameters and buffers that come from files and stay as they are; none before `build`."""
        if not self._is_made:
            return set()
        stored = self.stored_weights()
        tensors = (*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False))
        return {name for name, tensor in tensors if name in stored and not tensor.requires_grad}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self._load_prefix = prefix  # for the hook that comes after the submodules, and is not told
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def blocks(self) -> Iterable[nn.Module]:
        """Give the transformer's repeated blocks."""
        return [
            block
            for part in self.transformers
            for name in self.block_lists
            for block in self.get_submodule(f"{part}.{name}").children()
        ]

    # ---- computing -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.parameters()).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the transformer is fed in; autocast may lower it."""
        return torch.float32 if self.lora is None else self.dtype

    def encode(self, prompts: Sequence[str]) -> Condition:
        """Turn B prompts into a condition of B rows; each distinct prompt is encoded once, alone."""
        embeddings = self._embeddings.get(prompts, self._encode_new, self._fingerprint)
        rows: dict[str, Any] = {name: torch.cat([entry[name] for entry in embeddings]) for name in embeddings[0]}
        return self.condition_class(**rows).to(self.device)

    def _encode_new(self, prompts: Sequence[str]) -> Iterator[Embedding]:
        device = self.device
        with self._text_encoding.on(device) as pipeline:
            for prompt in prompts:
                yield self._encode_one(pipeline, prompt, device)

    def encode_batch(self, prompts: PromptBatch) -> Condition:
        """Turn B rows of prompts into a condition, with their own negative prompts if they have such."""
        condition = self.encode(prompts.texts)
        if not any(_NEGATIVE in prompt.metadata for prompt in prompts.prompts):
            return condition
        texts = [prompt.metadata.get(_NEGATIVE) for prompt in prompts.prompts]
        return replace(
            condition, negative_condition=self.encode([self.negative_prompt if t is None else t for t in texts])
        )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that negative prompts are texts, or None for `negative_prompt`.

        Raises:
            ValueError: one is not.
        """
        for prompt in prompts:
            text = prompt.metadata.get(_NEGATIVE)
            if not isinstance(text, str | None):
                raise ValueError(f"`{_NEGATIVE}` must be a text, got {text!r} for prompt {prompt.text!r}.")

    def unconditional(self, condition: Condition) -> Condition:
        """Give the condition of the negative prompts for the same rows."""
        if condition.negative_condition is not None:
            return condition.negative_condition
        num_rows = len(next(value for _, value in condition._tensors()))
        device = self.device
        if device not in self._empty:
            with torch.inference_mode(False):  # it is also trained with
                self._empty = {device: self.encode([self.negative_prompt])}
        return self._empty[device].select(torch.zeros(num_rows, dtype=torch.int64, device=device))

    def decode(self, latents: Tensor) -> Tensor:
        """Decode final latents [B, ...] to media [B, (F), C, H, W] in [0, 1]."""
        with self._decoding.on(self.device) as vae:
            return to_media(vae.decode(self._unscale(latents.float(), vae), return_dict=False)[0])

    def _fingerprint(self) -> str:
        device = self.device.type
        if device not in self._fingerprints:
            assert self._embedding_cache is not None, "asked for where there is a folder"
            settings = {
                "max_sequence_length": self.max_sequence_length,
                "device": device,
                **self._encoding_settings(),
            }
            memo = Path(self._embedding_cache)
            self._fingerprints[device] = self._text_encoding.fingerprint(settings, memo=memo)
        return self._fingerprints[device]

    def sigmas(self, num_steps: int) -> Tensor:
        """Give the schedule [num_steps + 1]: the pipeline's own, or the one that `schedule` asks for.

        Raises:
            ValueError: it lists sigmas of another number of steps.
        """
        if self.schedule == "pipeline":
            return self.pipeline_sigmas(num_steps)
        return chosen_schedule(self.schedule, self.schedule_shift, num_steps)

    def check_steps(self, num_steps: int) -> None:
        """Check that there is a schedule of so many steps, as far as the pipeline's configuration is here.

        Raises:
            ValueError: there is none.
        """
        if self.files.are_here or self.schedule != "pipeline":
            self.sigmas(num_steps)

    def flow_match_schedule(self, num_steps: int, *, sequence_length: int, double_shift: bool = False) -> Tensor:
        """Give the schedule of the pipeline's own scheduler, [num_steps + 1]; see `pipeline_schedule`."""
        return flow_match_schedule(
            self.files.config("scheduler"), num_steps, sequence_length=sequence_length, double_shift=double_shift
        )


def find_family(pipeline_class: str | None) -> type[PipelinePolicy]:
    """Give the policy class for a pipeline's class name.

    Raises:
        ValueError: there is none.
    """
    if pipeline_class not in _FAMILIES:
        raise ValueError(
            f"no policy is known for the pipeline class `{pipeline_class}`; known are {', '.join(sorted(_FAMILIES))}. "
            "Subclass `PipelinePolicy` with its name in `pipeline_classes` and import that first, as "
            "docs/guide/new_model.md shows."
        )
    return _FAMILIES[pipeline_class]


def _pipeline_class(files: PipelineFiles) -> Any:
    import diffusers

    return getattr(diffusers, files.config("")["_class_name"])


def _drop_stored(policy: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave out of a state what is read from the pipeline's files."""
    assert isinstance(policy, PipelinePolicy)
    for name in policy.untrained_names():
        state_dict.pop(f"{prefix}{name}", None)


def _excuse_stored(policy: nn.Module, incompatible: Any) -> None:
    """Let a state be without what is read from the pipeline's files."""
    assert isinstance(policy, PipelinePolicy)
    untrained = policy.untrained_names()
    prefix = policy._load_prefix
    incompatible.missing_keys[:] = [
        key for key in incompatible.missing_keys if key.removeprefix(prefix) not in untrained
    ]
