"""How the examples' base policies are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl import Condition, DiffusionPolicy
from digenrl.functional import append_dims

BATCH_SIZE = 64


def fit_velocity(
    policy: DiffusionPolicy,
    data: Tensor,
    condition: Condition,
    *,
    iterations: int,
    peak_lr: float,
    warm_up: int,
    decay: float,
) -> None:
    """Fit the velocity to noise - data (rectified flow, arXiv:2209.03003).

    Args:
        policy: built; all of its weights are trained.
        data: [D, ...] samples, each of the policy's `latent_shape`.
        condition: of D rows.
        iterations: optimizer steps, each on 64 random rows.
        peak_lr: largest learning rate.
        warm_up: iterations in which it rises to that.
        decay: share of the iterations in which it falls to 0 at the end.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak_lr, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda index: min(1.0, (index + 1) / warm_up, (iterations - index) / (decay * iterations))
    )
    for _ in range(iterations):
        rows = torch.randint(len(data), (BATCH_SIZE,))
        sigma = torch.rand(BATCH_SIZE)
        noise = torch.randn(BATCH_SIZE, *data.shape[1:])
        latents = torch.lerp(data[rows], noise, append_dims(sigma, noise.ndim))
        velocity = policy.velocity(latents, sigma, condition.select(rows))
        loss = (velocity - (noise - data[rows])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
