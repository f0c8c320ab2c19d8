"""Options of a policy's blocks: recomputed activations, compilation, and diffusers' attention backends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from digenrl.engines import WorkerError
from digenrl.policies import DiffusionPolicy

if TYPE_CHECKING:
    from digenrl.strategies.workers.settings import WorkerSettings


def apply_block_options(policy: DiffusionPolicy, settings: WorkerSettings) -> None:
    """Change how a policy that is built computes, and neither its parameters nor their names; before it is sharded.

    Raises:
        WorkerError: the policy has nothing that an option applies to, or the attention backend cannot be had.
    """
    if settings.attention_backend is not None:
        set_attention_backend(policy, settings.attention_backend)
    if settings.gradient_checkpointing:
        for block in _blocks_for("gradient_checkpointing", policy):
            _recompute_in_backward(block)
    if settings.compiles_blocks:
        # After the above: what is compiled is the block that recomputes.
        for block in _blocks_for("compile_blocks", policy):
            block.compile()


def _blocks_for(option: str, policy: DiffusionPolicy) -> list[nn.Module]:
    blocks = list(policy.blocks())
    if not blocks:
        name = f"{type(policy).__name__}.blocks()"
        raise WorkerError(f"`{option}` applies to the policy's blocks, and `{name}` gave none.")
    return blocks


def _recompute_in_backward(block: nn.Module) -> None:
    """Keep only a block's inputs for the backward, which computes the rest again.

    Its forward is replaced on the instance: a wrapping module would rename the parameters, and hooks, such as those
    that gather sharded weights, go around it.
    """
    forward: Callable[..., Any] = block.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Policies stay in evaluation mode and draw no random numbers, so there is no state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    block.forward = recomputed


def check_attention_backend(name: str) -> None:
    """Check that diffusers knows an attention backend.

    Raises:
        ValueError: it does not, or is missing.
    """
    known = _attention_backends()
    if name not in known:
        raise ValueError(f"`attention_backend` must be one of diffusers', {', '.join(known)}, got {name!r}.")


def _attention_backends() -> list[str]:
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName
    except ImportError as error:
        raise ValueError(
            f"`attention_backend` needs a diffusers that has them ({error}): pip install --upgrade diffusers"
        ) from error
    return sorted(backend.value for backend in AttentionBackendName)


def set_attention_backend(policy: DiffusionPolicy, name: str) -> None:
    """Give each diffusers model inside a policy an attention backend.

    Raises:
        WorkerError: there is no such model, it takes no backend, or the backend needs what is not installed.
    """
    models = [module for module in policy.modules() if hasattr(module, "set_attention_backend")]
    if not models:
        raise WorkerError(
            f"`attention_backend` {name} applies to models of diffusers, and `{type(policy).__name__}` has none."
        )
    # It warns of an experimental interface, once for each worker.
    logger = logging.getLogger("diffusers.models.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for model in models:
            change: Any = model.set_attention_backend
            change(name)
    except (RuntimeError, ValueError, ImportError) as error:
        raise WorkerError(f"`attention_backend` {name} cannot be had: {' '.join(str(error).split())}") from error
    finally:
        logger.setLevel(level)
    if not any(_dispatches_attention(model) for model in models):
        names = ", ".join(sorted({type(model).__name__ for model in models}))
        raise WorkerError(
            f"`attention_backend` {name} has no effect on {names}: its attention does not go through diffusers' "
            "dispatcher; leave the option out."
        )


def _dispatches_attention(model: nn.Module) -> bool:
    """Whether a model of diffusers has taken a backend; older ones take any and stay as they are."""
    processors = [getattr(module, "processor", None) for module in model.modules()]
    return any(getattr(processor, "_attention_backend", None) is not None for processor in processors)
