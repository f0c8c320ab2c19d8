"""Diffusion and flow models as policies."""

from digenrl.policies.policy import DiffusionPolicy, VelocityField
from digenrl.policies.weight_copy import WeightCopy

__all__ = ["DiffusionPolicy", "VelocityField", "WeightCopy"]
