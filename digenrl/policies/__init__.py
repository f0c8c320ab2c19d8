"""Diffusion and flow models as policies."""

from digenrl.policies.policy import DiffusionPolicy, VelocityField
from digenrl.policies.stored_tensors import StoredTensor, stored_tensors
from digenrl.policies.weight_copy import WeightCopy

__all__ = ["DiffusionPolicy", "StoredTensor", "VelocityField", "WeightCopy", "stored_tensors"]
