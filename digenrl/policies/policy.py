"""What digenrl asks of a diffusion or flow model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from digenrl.diffusion.noise import sample_noise
from digenrl.policies.stored_tensors import StoredTensor
from digenrl.types import Condition, Prompt, PromptBatch

VelocityField: TypeAlias = Callable[[Tensor, Tensor, Condition], Tensor]
"""(latents [N, ...], sigma [N], condition of N rows) -> velocity [N, ...]: a policy, or a copy of one."""


class DiffusionPolicy(nn.Module, ABC):
    """A flow model seen as a policy: prompts in, velocity field, media out.

    Constructing one is cheap and touches no weights: the process that drives a run constructs it and never
    builds it. `build` loads or makes the weights and runs once in each process that computes. Rollout and
    training call the same `velocity`, so their numerics cannot part.

    Example:
        >>> class Mine(DiffusionPolicy):
        ...     latent_shape = (4, 8, 8)
        ...     def build(self): self.net = load_my_network()
        ...     def encode(self, prompts): return MyCondition(embed(prompts))
        ...     def velocity(self, latents, sigma, condition): return self.net(latents, sigma * 1000, condition.x)
        ...     def decode(self, latents): return (latents / 2 + 0.5).clamp(0, 1)
    """

    latent_shape: tuple[int, ...]
    """Shape of one sample's latents, without the batch axis."""
    prompt_fields: tuple[str, ...] = ()
    """Which of the metadata columns `types.PROMPT_FIELDS` `encode_batch` reads; data with another one is refused."""

    @abstractmethod
    def build(self) -> None:
        """Create the submodules and load their weights; parameters to train have `requires_grad`."""

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Condition:
        """Turn B prompts into a condition of B rows."""

    def encode_batch(self, prompts: PromptBatch) -> Condition:
        """Turn B rows of prompts into a condition: `encode` of their texts, unless a policy also reads metadata."""
        return self.encode(prompts.texts)

    def example_condition(self, prompts: Sequence[str]) -> Condition:
        """Give a condition of B rows with the shapes that `encode` gives, for a dry run, which builds without memory.

        `encode` itself by default. Override it where that loads text encoders: its values have no meaning, so zeros do.
        """
        return self.encode(prompts)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that prompts can be encoded; called before `build` and before anything is generated.

        Raises:
            ValueError: they cannot.
        """

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Predict noise - data.

        Args:
            latents: [N, ...] float32 at `sigma`.
            sigma: [N] float32 in [0, 1]; rows may sit at different noise levels. Scale it to the model's own
                timestep here, in float32.
            condition: N rows.

        Returns:
            [N, ...], any floating dtype.
        """

    def unconditional(self, condition: Condition) -> Condition:
        """Give the condition of an empty prompt for the same rows; only classifier-free guidance asks for it."""
        raise NotImplementedError(f"`{type(self).__name__}` does not define `unconditional`")

    @property
    def has_unconditional(self) -> bool:
        """Whether this policy defines `unconditional`."""
        return type(self).unconditional is not DiffusionPolicy.unconditional

    def guidance_scale_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        """Give the scale of classifier-free guidance of rows at `sigma` [N]: for all `scale`, or [N] of their own."""
        return scale

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Turn final latents [B, ...] into media [B, (F), C, H, W] in [0, 1]."""

    @abstractmethod
    def sigmas(self, num_steps: int) -> Tensor:
        """Give the schedule [num_steps + 1], float32, from 1 (or just below) to 0."""

    def forward(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Call `velocity` as a module, so that hooks of wrappers (sharding, compilation) run."""
        return self.velocity(latents, sigma, condition)

    def train(self, mode: bool = True) -> DiffusionPolicy:
        """Stay in evaluation mode: dropout would make training score other steps than the rollout made."""
        return super().train(False)

    def initial_latents(self, seeds: Sequence[int]) -> Tensor:
        """Draw the noise that B samples start from: [B, *latent_shape], float32, on the CPU."""
        return sample_noise(seeds, "initial", self.latent_shape)

    @classmethod
    def from_pretrained(cls, path: str, **settings: Any) -> DiffusionPolicy:
        """Make the policy of the family that a diffusers pipeline is of; see `PipelinePolicy`."""
        from digenrl.policies.pipeline import PipelinePolicy

        return PipelinePolicy.from_pretrained(path, **settings)

    def prepare(self) -> None:  # noqa: B027 (most have nothing to fetch)
        """Fetch what `build` reads, once, in the process that drives a run; nothing by default."""

    def stored_weights(self) -> Mapping[str, StoredTensor]:
        """Say where the values of parameters and buffers lie that `build` leaves on the meta device; none by default.

        By their names in the policy. They are read after `build`, and by ranks that share the policy's blocks only as
        far as each holds them: a policy that no host can hold whole is built so. See
        `digenrl.policies.stored_tensors` for safetensors files whose names are others.
        """
        return {}

    def blocks(self) -> Iterable[nn.Module]:
        """Give the repeated blocks, the units for sharding and compilation; none by default.

        `velocity` calls them as modules, and nothing else uses their parameters: where ranks share these, they are
        whole only while their block computes.
        """
        return ()
