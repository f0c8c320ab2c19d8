"""How rewards become advantages, and how the std of a whole step is applied while its groups arrive one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from digenrl.functional import batch_std, exceeds_advantage_clip, group_advantages, per_reward_advantages


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """Settings of `group_advantages`, and the clamp of its result."""

    scope: Literal["group", "batch"] = "group"
    """Whose rewards the std is taken over."""
    ddof: int = 0
    """The std divides by (number of rewards - this)."""
    eps: float = 1e-4
    """Added to the std."""
    clip: float = 5.0
    """Advantages are clamped to plus or minus this."""
    normalize_by_std: bool = True
    """Whether the std divides at all."""

    def __post_init__(self) -> None:
        """Check them, by the names that the algorithms' constructors have."""
        if self.scope not in ("group", "batch"):
            raise ValueError(f"`advantage_scope` is whose std divides and must be group or batch, got {self.scope!r}.")
        if self.ddof not in (0, 1):
            raise ValueError(f"`advantage_ddof` must be 0 or 1, got {self.ddof}.")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"`advantage_eps` is added to the std and must be in [0, inf), got {self.eps}.")
        if not self.clip > 0:
            raise ValueError(f"`advantage_clip` must be above 0, got {self.clip}; use inf for no bound.")

    def compare(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Compare rewards [B], or [B, R] each with its own kind, with those of their groups; without the clamp."""
        compare = group_advantages if rewards.ndim == 1 else per_reward_advantages
        return compare(
            rewards,
            group_ids,
            scope=self.scope,
            ddof=self.ddof,
            eps=self.eps,
            normalize_by_std=self.normalize_by_std,
        )

    def clamp(self, advantages: Tensor) -> Tensor:
        """Bound advantages by the clip."""
        return advantages.clamp(-self.clip, self.clip)

    # ---- the whole step's std, see docs/design/batch_std.md --------------------------------------------------

    @property
    def need_batch_std(self) -> bool:
        """Whether advantages depend on the rewards of all groups of the step."""
        return self.scope == "batch" and self.normalize_by_std

    def centered(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Give rewards less the mean of their groups, [B]: advantages whose std is not known yet."""
        return group_advantages(rewards, group_ids, normalize_by_std=False)

    def gradient_scale(self, rewards: Tensor, group_ids: Tensor) -> float | None:
        """Give what the gradient of `centered` rewards must be multiplied by, once all rewards [B] are known.

        None: an advantage would be clipped, and then the gradient is not a multiple.
        """
        std = batch_std(rewards, ddof=self.ddof)
        centered = self.centered(rewards, group_ids)
        if exceeds_advantage_clip(centered, std, eps=self.eps, advantage_clip=self.clip):
            return None
        return 1 / (std + self.eps) if std > 0 else 0.0
