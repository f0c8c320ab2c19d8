"""How a module is validated: deterministic samples, scored."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.module.prompts import as_prompts
from digenrl.module.scoring import Scoring
from digenrl.rewards import RewardError
from digenrl.types import Prompt, PromptBatch

VALIDATION_MEAN = "val/reward/mean"
"""Name of the metric; a share of a batch that did not log it had no sample that could be scored."""


class Validation(Scoring):
    """The part of `DiffusionRLModule` that validates."""

    seed: int

    def sample(self, prompts: PromptBatch) -> Tensor:
        """Make one deterministic sample per row: media [B, (F), C, H, W] in [0, 1]."""
        raise NotImplementedError

    def validation_step(self, batch: Sequence[Prompt | str], batch_idx: int) -> None:
        """Score deterministic samples whose noise is the same in every validation."""
        prompts = self.validation_prompts(batch, batch_idx)
        self.score_validation(self.sample(prompts), prompts)

    def validation_prompts(self, batch: Sequence[Prompt | str], batch_idx: int) -> PromptBatch:
        """Ask for one sample per prompt of a batch."""
        prompts = PromptBatch.for_validation(as_prompts(batch, first_uid=batch_idx << 32), seed=self.seed)
        self.check_prompts(prompts.prompts)
        return prompts

    def score_validation(self, media: Tensor, prompts: PromptBatch) -> None:
        """Score B samples and log the mean; samples whose reward has failed are left out, if groups are dropped."""
        rewards = self.total_rewards(self.ask_reward(media, prompts))
        scored = rewards[rewards.isfinite()]
        self.note_validation(scored=len(scored) > 0)
        if len(scored):
            self.log(
                VALIDATION_MEAN,
                scored.mean(),
                prog_bar=True,
                batch_size=len(scored),
                on_epoch=True,
                sync_dist=self._trainer is not None and self.trainer.world_size > 1,
            )

    def note_validation(self, *, scored: bool) -> None:
        """Note whether a share of a validation had a sample that could be scored."""
        self._validated.append(scored)

    def on_validation_epoch_end(self) -> None:
        """Refuse a validation in which no sample could be scored.

        Raises:
            RewardError: the reward has failed for all samples.
        """
        validated, self._validated = self._validated, []
        if validated and not any(validated):
            raise RewardError("the reward has failed for all validation samples: see the warnings above.")
