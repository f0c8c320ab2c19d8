"""The mathematics of the losses and advantages: pure functions over tensors, unreduced.

Letters in shapes: B samples, N rows (one row is one sample at one timestep), G groups, P pairs, R rewards.
"""

from digenrl.functional.advantages import (
    batch_std,
    exceeds_advantage_clip,
    group_advantages,
    per_reward_advantages,
    weighted_sum,
    zero_std_groups,
)
from digenrl.functional.forward_process import (
    adaptive_mean_square,
    crd_kl_weight,
    crd_loss,
    matching_log_prob,
    nft_loss,
    noised_latents,
    reward_probability,
)
from digenrl.functional.groups import GroupReduction, mean_per_group, rows_of_whole_groups, sum_per_group
from digenrl.functional.preference import group_preference_loss, pair_loss, pair_preference_loss
from digenrl.functional.rows import append_dims, mean_square
from digenrl.functional.selection import best_of_n, preference_pairs
from digenrl.functional.surrogate import (
    clipped_surrogate,
    guard_log_ratio,
    guard_surrogate,
    is_clipped,
    kl_to_reference,
)

__all__ = [
    "GroupReduction",
    "adaptive_mean_square",
    "append_dims",
    "batch_std",
    "best_of_n",
    "clipped_surrogate",
    "crd_kl_weight",
    "crd_loss",
    "exceeds_advantage_clip",
    "group_advantages",
    "group_preference_loss",
    "guard_log_ratio",
    "guard_surrogate",
    "is_clipped",
    "kl_to_reference",
    "matching_log_prob",
    "mean_per_group",
    "mean_square",
    "nft_loss",
    "noised_latents",
    "pair_loss",
    "pair_preference_loss",
    "per_reward_advantages",
    "preference_pairs",
    "reward_probability",
    "rows_of_whole_groups",
    "sum_per_group",
    "weighted_sum",
    "zero_std_groups",
]
