"""Diffusion and flow models as policies."""

from digenrl.policies.policy import DiffusionPolicy

__all__ = ["DiffusionPolicy"]
