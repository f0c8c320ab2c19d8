"""What columns of prompts a policy reads: one that nobody reads is refused, for it would have no effect."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from digenrl.policies.policy import DiffusionPolicy
from digenrl.types import PROMPT_FIELDS, Prompt


def check_prompt_fields(
    policy: DiffusionPolicy,
    prompts: Sequence[Prompt],
    *,
    is_guided: bool,
    read_by_reward: Collection[str] = (),
    name: str = "prompts",
) -> None:
    """Check that a policy reads the images, videos and negative prompts that prompts have, and can.

    Args:
        policy: need not be built.
        prompts: of one source, which may be in one batch.
        is_guided: whether anything of the run has classifier-free guidance.
        read_by_reward: columns that the reward says it needs: these are not without effect.
        name: of the prompts, for messages.

    Raises:
        ValueError: it does not, or cannot; or some prompts have what others lack.
    """
    if not prompts:
        return
    for field in PROMPT_FIELDS:
        holders = [prompt for prompt in prompts if field in prompt.metadata]
        if not holders or (field in read_by_reward and field not in policy.prompt_fields):
            continue
        where = f"`{name}` has the column `{field}`, as for {holders[0].text[:60]!r}, but"
        if field not in policy.prompt_fields:
            known = ", ".join(policy.prompt_fields) or "none"
            raise ValueError(
                f"{where} `{type(policy).__name__}` does not read it (it reads: {known}): remove the column, take a "
                "policy that does, or name it in `requires` of the reward that it is for."
            )
        if len(holders) < len(prompts):
            raise ValueError(
                f"{where} {len(prompts) - len(holders)} of {len(prompts)} prompts lack it, and they cannot be in one "
                "batch: give all of them one"
                + (", which may be None for the policy's own." if field == "negative_prompt" else ".")
            )
        if field == "negative_prompt" and not is_guided and field not in read_by_reward:
            raise ValueError(
                f"{where} `guidance_scale` is 1, with which negative prompts have no effect: set it above 1, or remove "
                "the column."
            )
    policy.check_prompts(prompts)
