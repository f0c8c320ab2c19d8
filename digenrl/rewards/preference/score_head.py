"""The head that two preference models have in common: an embedding becomes one number."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from digenrl.rewards.preference.weights import bounded
from digenrl.rewards.reward import RewardError


class ScoreHead(nn.Module):
    """Five linear layers, 768 → 1024 → 128 → 64 → 16 → 1, with nothing between them at inference.

    Of the LAION aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor, `simple_inference.py`)
    and of ImageReward (github.com/THUDM/ImageReward, `ImageReward/ImageReward.py`), which drop out in training and have
    no activations. Places of the sequence that dropout takes there are left empty, so their weights load by name.
    """

    def __init__(self, width: int = 768) -> None:
        """Make a head for embeddings [N, width]."""
        super().__init__()
        self.width = width
        linear = nn.Linear
        self.layers = nn.Sequential(
            *(linear(width, 1024), nn.Identity(), linear(1024, 128), nn.Identity()),
            *(linear(128, 64), nn.Identity(), linear(64, 16), linear(16, 1)),
        )

    @classmethod
    def from_state(cls, argument: str, source: str, state: Mapping[str, Tensor]) -> ScoreHead:
        """Make the head from its weights, `layers.0.weight` and so on.

        Raises:
            RewardError: they are others; the message names `argument` and `source`.
        """
        first = state.get("layers.0.weight")
        head = cls(first.shape[1] if first is not None and first.ndim == 2 else 768)
        try:
            head.load_state_dict(state)
        except RuntimeError as error:
            reason = bounded(" ".join(str(error).split()))
            raise RewardError(f"`{argument}` {source} is no head of 5 linear layers: {reason}") from error
        return head.float().eval().requires_grad_(False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Score N embeddings, [N, width]: [N]."""
        scores: Tensor = self.layers(embeddings).squeeze(-1)
        return scores
