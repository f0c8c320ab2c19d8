"""Lightning's precision hooks in a driver that computes nothing."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer


class RemotePrecision(Precision):
    """Keeps Lightning's order of hooks around a step; workers have run the backward, and will clip.

    Wraps the plugin that Lightning made from `Trainer(precision=...)`, whose name tells workers what to compute in.
    """

    def __init__(self, inner: Precision) -> None:
        super().__init__()
        self.inner = inner
        self.precision = inner.precision
        self.clip_value = 0.0
        self.clip_algorithm: Literal["norm", "value"] = "norm"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Leave the skeleton as it is."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Leave prompts as they are."""
        return data

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the trainers have accumulated the gradient."""

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Note how to clip; the trainers do it in the coming optimizer step."""
        self.clip_value = float(clip_val or 0.0)
        self.clip_algorithm = (
            "value" if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value" else "norm"
        )

    def take_clipping(self) -> tuple[float, Literal["norm", "value"]]:
        """Hand over what was noted, once."""
        clipping = (self.clip_value, self.clip_algorithm)
        self.clip_value, self.clip_algorithm = 0.0, "norm"
        return clipping
