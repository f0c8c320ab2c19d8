"""The strategy that runs a `DiffusionRLModule` on generator and trainer workers."""

from digenrl.strategies.disaggregated import DisaggregatedStrategy

__all__ = ["DisaggregatedStrategy"]
